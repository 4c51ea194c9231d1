"""Those who have no business with a session's TCP sockets, and a context that ends by itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import zmq

from outboard.config import NetworkConfig
from outboard.transport.curve import KeyedContext, SessionKeys

LOOPBACK = NetworkConfig(listen="127.0.0.1")
REQUEST = b"GET / HTTP/1.1\r\nHost: outboard\r\n\r\n"


class _Kept(KeyedContext):
    """An unreferenced socket would warn that it was not closed."""

    sockets: list[Any]

    def socket(self, *args: Any, **kwargs: Any) -> Any:
        self.sockets = [*self.__dict__.get("sockets", ()), super().socket(*args, **kwargs)]
        return self.sockets[-1]


@contextlib.contextmanager
def keyed(keys: SessionKeys) -> Iterator[KeyedContext]:
    """A context with these keys, which closes its sockets in the end."""
    context = _Kept(keys)
    try:
        yield context
    finally:
        context.destroy(linger=0)


def place(address: str) -> tuple[str, int]:
    """Host and port of a ZeroMQ address."""
    host, _, port = address.removeprefix("tcp://").partition("#")[0].rpartition(":")
    return host.strip("[]"), int(port)


def visit(address: str, says: bytes = b"") -> None:
    """Connects, says something, and closes the connection once it is refused, or at once where nothing is said."""
    with socket.create_connection(place(address), timeout=20) as visitor:
        if says:
            with contextlib.suppress(ConnectionError):
                visitor.sendall(says)
                while visitor.recv(4096):
                    pass


@contextlib.contextmanager
def knocking(address: str, kind: int = zmq.DEALER, **options: bytes) -> Iterator[zmq.Socket[bytes]]:
    """A socket of a context of its own with these options, which has connected and sent something."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        knocker = context.socket(kind)
        address, _, own_key = address.partition("#")
        if own_key and "CURVE_SERVERKEY" in options:
            options["CURVE_SERVERKEY"] = bytes.fromhex(own_key)
        for name, value in options.items():
            knocker.setsockopt(getattr(zmq, name), value)
        knocker.setsockopt(zmq.RECONNECT_IVL, 60_000)  # once
        knocker.connect(address)
        knocker.send(b"let me in")
        yield knocker
    finally:
        context.destroy(linger=0)
