"""The channel between the supervisor and an API process: msgpack messages, and at the start two descriptors.

    supervisor    Setup, the listening socket, the limits page -> API process
    API process   Serving -> supervisor             it takes requests from now on
    supervisor    Drain, SetLogLevel -> API process
    API process   Drained -> supervisor             and ends

A Unix socket of type SOCK_SEQPACKET: a message is a packet. Where one side closes it, the other has lost it for good.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from outboard.errors import ProtocolError
from outboard.launch.group import EngineAddresses
from outboard.serve.config import ServeConfig

__all__ = [
    "CHANNEL_PATH",
    "Channel",
    "Drain",
    "Drained",
    "FromApi",
    "Hello",
    "Serving",
    "SetLogLevel",
    "Setup",
    "ToApi",
    "receive_setup",
    "send_setup",
]

# Environment variables of an API process: where the supervisor's socket is.
CHANNEL_PATH = "OUTBOARD_API_CHANNEL"
_MOST_BYTES = 128 << 10


class Hello(msgspec.Struct, array_like=True, tag="hello", frozen=True):
    """First message of an API process."""

    pid: int


class Setup(msgspec.Struct, array_like=True, tag="setup", frozen=True):
    """What an API process must know.

    Attributes:
        index: its row of the limits page; 0 and up.
        client_index: as a front end of the engine cores.
        addresses: of these.
        config: of the server.
        metrics_directory, report: see `outboard.observe.metrics.render`.
    """

    index: int
    client_index: int
    addresses: EngineAddresses
    config: ServeConfig
    metrics_directory: str
    report: str


class Drain(msgspec.Struct, array_like=True, tag="drain", frozen=True):
    """Take no more requests, let those that run end for so many seconds, and then end."""

    timeout: float


class SetLogLevel(msgspec.Struct, array_like=True, tag="log_level", frozen=True):
    """Of Outboard's loggers."""

    level: str


class Serving(msgspec.Struct, array_like=True, tag="serving", frozen=True):
    """It takes requests."""


class Drained(msgspec.Struct, array_like=True, tag="drained", frozen=True):
    """It has no more requests. `cut`: how many had not ended in time."""

    cut: int


ToApi = Drain | SetLogLevel
FromApi = Hello | Serving | Drained
_M = TypeVar("_M")
_encode = msgspec.msgpack.Encoder().encode


class Channel(Generic[_M]):
    """One end, on an event loop.

    Args:
        connection: taken over.
        kinds: of messages that come.
        on_message: called with each.
        on_end: called once, when the other side is gone or talks nonsense.
    """

    def __init__(
        self,
        connection: socket.socket,
        kinds: Any,
        on_message: Callable[[_M], None],
        on_end: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._closed = False
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._read)

    def send(self, message: ToApi | FromApi) -> None:
        """Sends a message; one that cannot be sent at once is a channel that is lost."""
        if self._closed:
            return
        try:
            self._connection.send(_encode(message))
        except OSError:
            self._end()

    def close(self) -> None:
        """Closes this end; `on_end` is not called. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()

    def _read(self) -> None:
        try:
            packet = self._connection.recv(_MOST_BYTES)
            message = self._decode(packet) if packet else None
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, msgspec.DecodeError):
            message = None
        if message is None:
            self._end()
        else:
            self._on_message(message)

    def _end(self) -> None:
        if not self._closed:
            self.close()
            self._on_end()


def send_setup(connection: socket.socket, setup: Setup, descriptors: list[int]) -> None:
    """Sends the first message, with the listening socket and the limits page."""
    socket.send_fds(connection, [_encode(setup)], descriptors)


def receive_setup(path: Path) -> tuple[socket.socket, Setup, list[int]]:
    """Connects to the supervisor; the connection, the first message, and its descriptors. Blocks.

    Raises:
        ProtocolError: it is not the supervisor.
        OSError: there is none.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
        connection.send(_encode(Hello(os.getpid())))
        packet, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 2)
        try:
            setup = msgspec.msgpack.decode(packet, type=Setup)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the first message on {path} is none of a supervisor's: {error}") from None
    except BaseException:
        connection.close()
        raise
    return connection, setup, descriptors
