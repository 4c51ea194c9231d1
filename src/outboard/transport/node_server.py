"""A head's end of the node channel: a ROUTER that lets nodes join, beside the control channel in the same thread."""

from __future__ import annotations

import secrets
from pathlib import Path

import zmq

from outboard.config import NetworkConfig
from outboard.transport.sockets import ZmqContext, make_context

__all__ = ["NodeServer", "listen_for_engines", "node_context"]

_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
# A node says little at once: the last of an engine core's stderr, and its traceback.
_MAX_BYTES = 1 << 20
# Messages held for a node that does not read; it is given up before there are many.
_HIGH_WATER_MARK = 10_000


def node_context(secret: str) -> ZmqContext:
    """A context for the node channel, which is encrypted by what belongs to the secret."""
    return make_context()


def listen_for_engines(socket: zmq.Socket[bytes], network: NetworkConfig) -> str:
    """Has the control channel's socket listen to engine cores on nodes; the address for them to connect to."""
    socket.bind(f"tcp://{network.listen}:*")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def read_token_file(path: str | Path) -> str:
    return Path(path).read_text().strip()


def new_token_file(path: str | Path) -> None:
    Path(path).write_text(secrets.token_hex(32))


class NodeServer:
    """Belongs to one thread. Wait until `fd` is readable or `pending` is true.

    Args:
        context: of the socket; becomes the server's own.
        network: where to listen.

    Attributes:
        address: for nodes to connect to.
        fd: tells by its edge that something has come.

    Raises:
        ConfigError: there is no such interface, address or name.
        OSError: the port is taken.
    """

    def __init__(self, context: ZmqContext, network: NetworkConfig) -> None:
        self._context = context
        self._socket = context.socket(zmq.ROUTER)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
            self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self.address = self._bind(network)
        except BaseException:
            self.close()
            raise
        self.fd = int(self._socket.getsockopt(zmq.FD))

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
        """Closes, context and all; what has not left may take so long."""
        self._socket.close(linger=linger_ms)
        self._context.term()

    def _bind(self, network: NetworkConfig) -> str:
        try:
            self._socket.bind(f"tcp://{network.listen}:{network.port or '*'}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot listen for nodes at {network.listen}: {error.strerror}") from None
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
