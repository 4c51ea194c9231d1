"""Sockets and the reader that drains one on an event loop. Nothing else imports zmq."""
