"""The way of inputs, from a client to an engine core: a plain Unix socket, or ZeroMQ's ROUTER and DEALER.

The client chooses; its address says which it is. A message is frames: type byte, body, auxiliary frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from outboard.config import TransportConfig
from outboard.protocol.tensors import Buffer
from outboard.transport.reader import Loop
from outboard.transport.session import front_end_socket
from outboard.transport.sockets import ZmqContext
from outboard.transport.unix import SCHEME
from outboard.transport.unix_inputs import UnixInputReceiver, UnixInputSender
from outboard.transport.zmq_inputs import ZmqInputReceiver, ZmqInputSender, bind_input

__all__ = ["InputReceiver", "InputSender", "connect_inputs", "listen_for_inputs"]


class InputSender(Protocol):
    """The client's end. Never blocks.

    Attributes:
        address: for `connect_inputs`. Never used twice.
    """

    address: str

    @property
    def tracked(self) -> Sequence[tuple[object, Sequence[Buffer]]]:
        """(tracker, frames) of messages that were taken, and whose buffers are still in use; oldest first.

        The tracker is ZeroMQ's; over a Unix socket None.
        """
        ...

    def accept(self) -> bool:
        """The engine core says that it has connected; False if it has not."""
        ...

    def wait_for_peer(self, seconds: float) -> None:
        """Waits until a message would reach the engine core, at most so long: ZeroMQ connects when it likes. Blocks."""
        ...

    def attach(self, loop: Loop) -> None:
        """From now on there is a loop that can tell when there is room; call it on that loop."""
        ...

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Sends a message: whole, if at all. False if it is not taken now.

        One to a peer that is gone is taken, and lost. Auxiliary frames are not copied.
        """
        ...

    def call_when_writable(self, callback: Callable[[], None]) -> None:
        """Calls it, once, when it is worth trying again what was refused."""
        ...

    def stop(self) -> None:
        """Sends nothing more. Idempotent. Call it on the loop, or where none runs."""
        ...

    def close(self) -> None:
        """Frees all, once it was stopped; nobody may be using it. Idempotent."""
        ...


class InputReceiver(Protocol):
    """The engine core's end. Belongs to the input thread.

    Attributes:
        fd: for `SocketPoller`.
    """

    fd: int

    @property
    def ended(self) -> bool:
        """Whether no more will come: `fd` tells nothing of use any more. ZeroMQ never says so."""
        ...

    def receive(self) -> Sequence[Buffer] | None:
        """The frames of the next message; None if there is none. The first two are valid until the next call.

        Raises:
            ContextTerminated: it is time to close.
            ProtocolError: what came is no message; nor will anything behind it be.
        """
        ...

    def pending(self) -> bool:
        """Whether there may be another; cheaper than to try to receive it in vain."""
        ...

    def close(self) -> None: ...


def listen_for_inputs(
    context: ZmqContext,
    directory: str,
    epoch: int,
    identity: bytes,
    config: TransportConfig,
    call_later: Callable[[float, Callable[[], None]], object],
    on_end: Callable[[], None],
    on_stranger: Callable[[str], None],
) -> InputSender:
    """A client's end, as the config wants it.

    Args:
        context: for ZeroMQ.
        directory: for the socket's file.
        epoch: of the client and the engine core.
        identity: of the engine core, for ZeroMQ.
        config: which way, and its limits.
        call_later: calls a function after a delay in seconds, in this thread.
        on_end: called once if the engine core closes the connection. ZeroMQ does not tell.
        on_stranger: called with what is known of a connection that is not the engine core's. ZeroMQ lets them in.

    Raises:
        OSError: the path cannot be used, or no file descriptor is left.
    """
    path = front_end_socket(directory, "in")
    if config.sockets == "zmq":
        address = f"ipc://{path}"
        return ZmqInputSender(bind_input(context, address, config), address, identity, call_later)
    return UnixInputSender(path, epoch, config.high_water_mark, on_end, on_stranger)


def connect_inputs(
    context: ZmqContext, address: str, epoch: int, identity: bytes, config: TransportConfig
) -> InputReceiver:
    """An engine core's end, of the kind of the client's.

    Args:
        context: for ZeroMQ.
        address: of the client's end.
        epoch: of the client and the engine core.
        identity: of the engine core, for ZeroMQ.
        config: limits.

    Raises:
        OSError: the address is none, nobody is there, or no file descriptor is left.
    """
    if address.startswith(SCHEME):
        return UnixInputReceiver(address, epoch, config.max_message_bytes)
    return ZmqInputReceiver(context, address, identity, config)
