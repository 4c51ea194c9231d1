"""The way of outputs, from an engine core to a client: a plain Unix socket, or ZeroMQ's PUSH and PULL.

The client chooses; its address says which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from outboard.config import TransportConfig
from outboard.protocol.tensors import Buffer
from outboard.transport.poller import SocketPoller
from outboard.transport.reader import Loop, OnMessage, SocketReader
from outboard.transport.session import front_end_socket
from outboard.transport.sockets import ZmqContext, ZmqSender, bind_output, remove_socket_file
from outboard.transport.unix import SCHEME
from outboard.transport.unix_outputs import UnixReader, UnixSender

__all__ = ["OutputReader", "OutputSender", "ZmqReader", "connect_outputs", "listen_for_outputs"]


class OutputSender(Protocol):
    """The engine core's end. Never blocks but to close."""

    def send(self, frames: Sequence[Buffer], more: bool = False) -> bool:
        """Sends a message: whole, if at all. False if it is not taken now. Auxiliary frames are not copied.

        Where `more` comes at once, or else `flush`, the message may wait for that.
        """
        ...

    def writable(self) -> bool:
        """Whether a message would be taken now; cheaper than to encode one and be refused."""
        ...

    def flush(self) -> bool:
        """Goes on with what was taken and could not leave at once; False if there is need to call this again."""
        ...

    def close(self, linger_ms: int) -> None:
        """Closes; what was taken may take so long to leave."""
        ...


class OutputReader(Protocol):
    """The client's end. Calls `on_message(body, auxiliary frames)` for each message; a body is valid during the call.

    What it returns is how many tokens there were: past a number of them others on the loop get their turn.

    Attributes:
        address: for `connect_outputs`. Never used twice: what a dead peer still holds for an old one must not reach a
            new socket.
    """

    address: str

    def accept(self) -> bool:
        """The engine core says that it has connected; False if it has not."""
        ...

    def attach(self, loop: Loop) -> None:
        """Starts reading on `loop`; call it on that loop."""
        ...

    def drain(self, limit: int) -> int:
        """Hands on up to `limit` messages that are there, fewer where they hold many tokens; how many they were."""
        ...

    def stop(self) -> None:
        """Takes no more. Idempotent. Call it on the loop, or where none runs."""
        ...

    def close(self) -> None:
        """Frees all, once it was stopped; nobody may be using it. Idempotent."""
        ...


def listen_for_outputs(
    context: ZmqContext,
    directory: str,
    epoch: int,
    config: TransportConfig,
    on_message: OnMessage,
    on_end: Callable[[str], None],
    on_stranger: Callable[[str], None],
) -> OutputReader:
    """A client's end, as the config wants it.

    Args:
        context: for ZeroMQ.
        directory: for the socket's file.
        epoch: of the client and the engine core.
        config: which way, and its limits.
        on_message: see `OutputReader`.
        on_end: called once if no more will come: with what is wrong, or with nothing where the other end was closed.
            ZeroMQ does not tell.
        on_stranger: called with what is known of a connection that is not the engine core's. ZeroMQ lets them in.

    Raises:
        OSError: the path cannot be used, or no file descriptor is left.
    """
    path = front_end_socket(directory, "out")
    if config.sockets == "zmq":
        return ZmqReader(context, path, config, on_message)
    return UnixReader(path, epoch, config.max_message_bytes, on_message, on_end, on_stranger)


def connect_outputs(
    context: ZmqContext,
    address: str,
    epoch: int,
    config: TransportConfig,
    poller: SocketPoller,
    on_writable: Callable[[], None],
) -> OutputSender:
    """An engine core's end, of the kind of the client's.

    Args:
        context: for ZeroMQ.
        address: of the client's end.
        epoch: of the client and the engine core.
        config: limits.
        poller, on_writable: what tells, by this call, that a refused message may be tried again, where that can be
            told.

    Raises:
        OSError: the address is none, nobody is there, or no file descriptor is left.
    """
    if address.startswith(SCHEME):
        return UnixSender(address, epoch, config.high_water_mark, poller, on_writable)
    return ZmqSender(context, address, config)


class ZmqReader(SocketReader):
    """ZeroMQ's end: anybody may connect at any time, whose messages are told apart by their epoch."""

    def __init__(
        self,
        context: ZmqContext,
        path: str,
        config: TransportConfig,
        on_message: OnMessage,
    ) -> None:
        self.address = f"ipc://{path}"
        super().__init__(bind_output(context, self.address, config), on_message)

    def accept(self) -> bool:
        return True

    def stop(self) -> None:
        self.detach()

    def close(self) -> None:
        self._socket.close(linger=0)
        remove_socket_file(self.address)
