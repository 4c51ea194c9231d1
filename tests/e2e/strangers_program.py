"""Strangers at the ports of a head: `python strangers_program.py HOST SERVER_KEY PORT...`; waits for no answer.

Each port gets scans, junk, a browser, peers that do not encrypt or have wrong keys, and some that say half a greeting
and nothing more. It says how many connections it has made, holds the last kind until its stdin is closed, and ends.
"""

from __future__ import annotations

import random
import socket
import struct
import sys

import zmq

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
PLAIN = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
SAID = {
    "scan": b"",
    "junk": random.Random(1).randbytes(5000),
    "browser": b"GET / HTTP/1.1\r\nHost: head\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "plain ZeroMQ": PLAIN + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    "junk in place of a CURVE hello": GREETING + b"\x04\xc8\x05HELLO" + random.Random(2).randbytes(194),
    "an endless frame": GREETING + b"\x02" + struct.pack(">Q", 1 << 62) + bytes(5000),
}
HALF = (b"\xff\0\0\0", GREETING[:40], GREETING, b"")


def main() -> None:
    host, server_key, *ports = sys.argv[1:]
    held: list[socket.socket] = []
    made = 0
    for port in map(int, ports):
        for what in SAID.values():
            with socket.create_connection((host, port), timeout=20) as visitor:
                made += 1
                if what:
                    visitor.sendall(what)
                else:  # a scanner resets what it has opened
                    visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for what in HALF:
            held.append(socket.create_connection((host, port), timeout=20))
            held[-1].sendall(what)
            made += 1
    context = zmq.Context()
    for port in ports:
        other, _ = zmq.curve_keypair()
        for server in (other, server_key.encode()):
            public, secret = zmq.curve_keypair()
            peer = context.socket(zmq.DEALER)
            for name, value in (("CURVE_SERVERKEY", server), ("CURVE_PUBLICKEY", public), ("CURVE_SECRETKEY", secret)):
                peer.setsockopt(getattr(zmq, name), value)
            peer.setsockopt(zmq.RECONNECT_IVL, -1)  # once
            peer.connect(f"tcp://{host}:{port}")
            peer.send(b"let me in")
            made += 1
    print(made, flush=True)
    sys.stdin.read()
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
