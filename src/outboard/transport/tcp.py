"""A client's ends of the data channel to one engine core on another machine: a PULL and a ROUTER that listen by TCP.

Each is for a single connection. What is lost with a connection is not sent again, so the end of either is the end of
the channel: `on_end` is told, as by a Unix socket.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import zmq

from outboard.config import NetworkConfig, TransportConfig
from outboard.transport.network import bind_tcp_for_one
from outboard.transport.reader import Loop, OnMessage, SocketReader
from outboard.transport.sockets import ZmqContext, ZmqSocket, check_descriptors, closed_on_error, make_socket, os_errors
from outboard.transport.zmq_inputs import ZmqInputSender

__all__ = ["TcpInput", "TcpInputSender", "TcpReader", "bind_input_tcp", "listen_by_tcp", "listen_tcp"]

# Seconds that an engine core has to connect from the moment on when the client listens. It does so as soon as it is
# asked, so this only ends where its packets do not come through.
_CONNECTED_WITHIN = 30.0
# File descriptors of a socket, its connection, its monitor and its pipe, with some to spare for strangers.
_DESCRIPTORS = 16
# A stranger's handshake may take so much memory.
_MAX_INPUT_BYTES = 4096


class TcpInput:
    """A ROUTER for an `Outbox`. The engine core connects to it by an `InputReceiver`.

    Attributes:
        socket: the ROUTER.
        address: for the engine core.
        lost: as of `bind_tcp_for_one`; `listen_tcp` has its reader look at it.
    """

    def __init__(self, socket: ZmqSocket, address: str, lost: int) -> None:
        self.socket = socket
        self.address = address
        self.lost = lost

    def close(self) -> None:
        """Closes, after the reader that looks at it was stopped; nobody may be using it. Idempotent."""
        self.socket.close(linger=0)
        lost, self.lost = self.lost, -1
        if lost >= 0:
            os.close(lost)


class TcpReader(SocketReader):
    """An `OutputReader`, and the watch over both connections of the channel.

    Attributes:
        address: for `connect_outputs`.
    """

    def __init__(
        self,
        socket: ZmqSocket,
        address: str,
        lost: int,
        inputs: TcpInput | None,
        on_message: OnMessage,
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(socket, on_message)
        self.address = address
        self._lost = lost
        self._watched = [lost] if inputs is None else [lost, inputs.lost]
        self._on_end: Callable[[str], None] | None = on_end

    def accept(self) -> bool:
        """True: that a connection does not come is told by `on_end`; its way is another than that of the news."""
        return True

    def attach(self, loop: Loop) -> None:
        super().attach(loop)
        for fd in self._watched:
            loop.add_reader(fd, self._on_lost, fd)

    def stop(self) -> None:
        """Takes no more. Idempotent. Call it on the loop, or where none runs."""
        self._watch_no_more()
        self.detach()

    def close(self) -> None:
        """Frees all, once it was stopped; nobody may be using it. Idempotent."""
        self._socket.close(linger=0)
        lost, self._lost = self._lost, -1
        if lost >= 0:
            os.close(lost)

    def _watch_no_more(self) -> None:
        self._on_end = None
        if self._loop is not None and not self._loop.is_closed():
            for fd in self._watched:
                self._loop.remove_reader(fd)
        self._watched.clear()

    def _on_lost(self, fd: int) -> None:
        """What had come before stays to be read."""
        reason = os.read(fd, 4096).decode()
        on_end = self._on_end
        self._watch_no_more()
        if on_end is not None:
            on_end(reason)


def bind_input_tcp(
    context: ZmqContext, network: NetworkConfig, config: TransportConfig, *, within: float = _CONNECTED_WITHIN
) -> TcpInput:
    """A client's socket for what it sends to one engine core on another machine.

    Args:
        context: with the session's keys.
        network: where to listen.
        config: limits.
        within: seconds that the engine core has to connect.

    Raises:
        ConfigError: there is no such interface or address, or no key to listen with.
        OSError: no port is free, or too few file descriptors are left.
    """
    # Nothing but an empty message comes in here.
    limits = msgspec.structs.replace(config, max_message_bytes=_MAX_INPUT_BYTES)
    return TcpInput(*_listen(context, zmq.ROUTER, network, limits, within))


def listen_tcp(
    context: ZmqContext,
    network: NetworkConfig,
    config: TransportConfig,
    on_message: OnMessage,
    on_end: Callable[[str], None],
    inputs: TcpInput | None = None,
    *,
    within: float = _CONNECTED_WITHIN,
) -> TcpReader:
    """A client's end for what one engine core on another machine sends.

    Args:
        context: with the session's keys.
        network: where to listen.
        config: limits.
        on_message: see `OutputReader`.
        on_end: called once, on the loop, where the connection of this or of `inputs` has ended or did not come: with
            what is wrong, or with nothing where it was closed. What had come before can still be drained.
        inputs: the way in of the same engine core.
        within: seconds that the engine core has to connect.

    Raises:
        ConfigError: there is no such interface or address, or no key to listen with.
        OSError: no port is free, or too few file descriptors are left.
    """
    return TcpReader(*_listen(context, zmq.PULL, network, config, within), inputs, on_message, on_end)


@os_errors()
def _listen(
    context: ZmqContext, kind: int, network: NetworkConfig, config: TransportConfig, within: float
) -> tuple[ZmqSocket, str, int]:
    """The socket, its address and what tells that its peer is lost."""
    check_descriptors(_DESCRIPTORS, "a socket that listens by TCP")
    socket = make_socket(context, kind, config)
    with closed_on_error(socket):
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return socket, *bind_tcp_for_one(socket, network, within)


class TcpInputSender(ZmqInputSender):
    """An `InputSender`. `TcpReader` has the watch over its connection.

    Args:
        inputs: where to send; becomes the sender's own.
        identity: the engine core's.
        call_later: calls a function after a delay in seconds, in this thread.
    """

    def __init__(
        self, inputs: TcpInput, identity: bytes, call_later: Callable[[float, Callable[[], None]], object]
    ) -> None:
        super().__init__(inputs.socket, inputs.address, identity, call_later)
        self._inputs = inputs

    def close(self) -> None:
        self._inputs.close()


def listen_by_tcp(
    context: ZmqContext,
    network: NetworkConfig,
    config: TransportConfig,
    identity: bytes,
    call_later: Callable[[float, Callable[[], None]], object],
    on_message: OnMessage,
    on_end: Callable[[str], None],
) -> tuple[TcpInputSender, TcpReader]:
    """A client's ends of both directions to an engine core on another machine; arguments and errors as above."""
    inputs = bind_input_tcp(context, network, config)
    try:
        reader = listen_tcp(context, network, config, on_message, on_end, inputs)
    except BaseException:
        inputs.close()
        raise
    return TcpInputSender(inputs, identity, call_later), reader
