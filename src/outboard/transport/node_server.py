"""The node channel's sockets: a head's ROUTER that lets nodes join, and the contexts of both ends."""

from __future__ import annotations

import zmq

from outboard.config import NetworkConfig
from outboard.transport.curve import KeyedContext, SessionKeys
from outboard.transport.network import bind_tcp
from outboard.transport.sockets import check_descriptors, os_errors

__all__ = ["NodeServer", "node_context"]

_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
# A node says little at once: the last of an engine core's stderr, and its traceback.
_MAX_BYTES = 1 << 20
# File descriptors that either end may need.
_DESCRIPTORS = 32
# Messages held for a node that does not read; it is given up before there are many.
_HIGH_WATER_MARK = 10_000


def node_context(secret: str) -> KeyedContext:
    """A context for the node channel, with the keys that belong to the secret: it is there before a session's are.

    Raises:
        ConfigError: the secret is too short.
        OSError: too few file descriptors are left.
    """
    check_descriptors(_DESCRIPTORS, "a node channel")
    with os_errors():
        return KeyedContext(SessionKeys.from_secret(secret))


class NodeServer:
    """Belongs to one thread. Wait until `fd` is readable or `pending` is true.

    Args:
        secret: what nodes must know.
        network: where to listen.

    Attributes:
        address: for nodes to connect to.
        fd: tells by its edge that something has come.

    Raises:
        ConfigError: the secret is too short, or there is no such interface, address or name.
        OSError: the port is taken, or too few file descriptors are left.
    """

    def __init__(self, secret: str, network: NetworkConfig) -> None:
        self._context = node_context(secret)
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
            self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            # Who comes back, before it was noticed that it had gone, is not turned away.
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            with os_errors():
                self.address = bind_tcp(self._socket, network, network.port)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.fd = int(self._socket.getsockopt(zmq.FD))

    @property
    def refused(self) -> dict[str, int]:
        """How many connections were turned away, see `KeyedContext.refused`."""
        return self._context.refused

    def pending(self) -> bool:
        """Whether something has come that is to be received; whoever sends may have taken the edge of it."""
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """(sender, frames) of the next message; None if there is none."""
        try:
            sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return sender, frames

    def send(self, receiver: bytes, body: bytes) -> None:
        """Sends to a peer that has sent something; a peer that is gone is no error."""
        self._socket.send_multipart([receiver, body])

    def close(self, linger_ms: int = 0) -> None:
        """Closes; what has not left may take so long. Blocks meanwhile."""
        self._socket.close(linger=linger_ms)
        self._context.term()
