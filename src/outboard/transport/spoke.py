"""A DEALER that never blocks: the end of whoever talks to a hub, such as a coordinator."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import zmq

from outboard.transport.network import connect, is_tcp
from outboard.transport.sockets import ZmqContext, closed_on_error, os_errors, wait_readable

__all__ = ["Spoke"]

_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
# Messages held for a peer that does not read, in each direction.
_HIGH_WATER_MARK = 10_000
# A hub may be bound a moment later than its peers connect, milliseconds.
_RECONNECT_MS = 5


class Spoke:
    """Belongs to one thread at a time.

    Args:
        context: of the socket.
        address: where the hub is bound, or will be, on this host or by TCP.
        linger_ms: how long what has been sent may take to leave after `close`.

    Attributes:
        socket: the socket itself, for a `SocketReader`.
        fd: for a `SocketPoller`.
    """

    def __init__(self, context: ZmqContext, address: str, *, linger_ms: int = 0) -> None:
        with os_errors():
            self.socket = context.socket(zmq.DEALER)
            with closed_on_error(self.socket):
                self.socket.setsockopt(zmq.LINGER, linger_ms)
                self.socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
                self.socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
                self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
                self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
                if is_tcp(address):  # the hub is to know it again when its connection is a new one
                    self.socket.setsockopt(zmq.IDENTITY, b"s" + secrets.token_bytes(16))
                connect(self.socket, address)
        self.fd = int(self.socket.getsockopt(zmq.FD))

    def send(self, body: bytes) -> bool:
        """Sends; False if more is held for the hub than it is worth."""
        try:
            self.socket.send(body, _NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """The frames of the next message; None if there is none."""
        if not int(self.socket.getsockopt(_EVENTS)) & _POLLIN:
            return None
        return self.socket.recv_multipart(_NOBLOCK)

    def wait(self, fds: Sequence[int], timeout: float | None) -> set[int]:
        """Waits until a message is there or one of `fds` is readable, at most `timeout` s; the readable `fds`."""
        return wait_readable(self.socket, fds, timeout)

    def close(self) -> None:
        """Idempotent."""
        self.socket.close()
