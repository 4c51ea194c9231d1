"""Inputs over ZeroMQ: a ROUTER, bound by the client, and a DEALER, for each engine core."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq
from zmq.backend import Socket as SocketBase

from outboard.config import TransportConfig
from outboard.protocol.tensors import Buffer
from outboard.transport.network import connect
from outboard.transport.reader import Loop
from outboard.transport.sockets import (
    ZmqContext,
    ZmqSocket,
    closed_on_error,
    make_socket,
    os_errors,
    remove_socket_file,
)

__all__ = ["ZmqInputReceiver", "ZmqInputSender", "bind_input"]

# Plain ints: arithmetic on ZeroMQ's enums costs 1 us.
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_MORE = int(zmq.SNDMORE)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

_FIRST_RETRY = 0.001
_LAST_RETRY = 0.020


class ZmqInputSender:
    """The client's end, an `InputSender`: a ROUTER of its own, so that whoever else connects gets nothing.

    At its high-water mark a ROUTER refuses with EAGAIN, and its POLLOUT tells nothing of one peer; so what was refused
    is retried on a timer of 1 to 20 ms.

    Args:
        socket: a bound ROUTER with ROUTER_MANDATORY, or it would drop silently what it cannot route, and what exceeds
            its high-water mark. It becomes the sender's own.
        address: for the engine core.
        identity: the engine core's.
        call_later: calls a function after a delay in seconds, in this thread.
    """

    def __init__(
        self,
        socket: ZmqSocket,
        address: str,
        identity: bytes,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self.address = address
        self._socket = socket
        # Past pyzmq's wrapper, which only adds arguments of other socket types.
        self._send = functools.partial(SocketBase.send, socket)
        self._identity = identity
        self._call_later = call_later
        self._waiting: Callable[[], None] | None = None
        self._delay = _FIRST_RETRY
        self._tracked: deque[tuple[zmq.MessageTracker, Sequence[Buffer]]] = deque()

    @property
    def tracked(self) -> Sequence[tuple[object, Sequence[Buffer]]]:
        """(tracker, frames) of messages that ZeroMQ did not copy, and has not let go of; oldest first."""
        self._free_sent()
        return self._tracked

    def accept(self) -> bool:
        return True

    def wait_for_peer(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            if self._socket.recv_multipart()[0] == self._identity:
                return

    def attach(self, loop: Loop) -> None:
        pass

    def send(self, frames: Sequence[Buffer]) -> bool:
        if self._tracked:
            self._free_sent()
        socket, send = self._socket, self._send
        if socket.closed:
            return True
        try:
            send(self._identity, _NOBLOCK_MORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # it has not connected yet, or is gone
                raise
            return False
        self._delay = _FIRST_RETRY
        # The identity reserved the place of all frames: the rest cannot be refused.
        send(frames[0], _MORE)
        if len(frames) == 2:  # type and body: most messages have no more
            send(frames[1])
            return True
        send(frames[1], _MORE)
        trackers = [socket.send(frame, _MORE, copy=False, track=True) for frame in frames[2:-1]]
        trackers.append(socket.send(frames[-1], copy=False, track=True))
        self._tracked.append((zmq.MessageTracker(*trackers), frames))
        return True

    def call_when_writable(self, callback: Callable[[], None]) -> None:
        due = self._waiting is not None
        self._waiting = callback
        if not due:
            self._call_later(self._delay, self._retry)
            self._delay = min(self._delay * 2, _LAST_RETRY)

    def stop(self) -> None:
        self._waiting = None
        self._tracked.clear()

    def close(self) -> None:
        self._socket.close(linger=0)
        remove_socket_file(self.address)

    def _retry(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not self._socket.closed:
            waiting()

    def _free_sent(self) -> None:
        """Lets go of buffers that ZeroMQ has let go of."""
        tracked = self._tracked
        while tracked and tracked[0][0].done:
            tracked.popleft()


@os_errors()
def bind_input(context: ZmqContext, address: str, config: TransportConfig) -> ZmqSocket:
    """A socket for `ZmqInputSender` on this host.

    Raises:
        OSError: the address cannot be used, or too few file descriptors are left.
    """
    socket = make_socket(context, zmq.ROUTER, config)
    with closed_on_error(socket):
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(address)
    return socket


class ZmqInputReceiver:
    """The engine core's end, an `InputReceiver`. Belongs to the input thread.

    Attributes:
        fd: for `SocketPoller`.
        ended: never.

    Raises:
        OSError: the address or the identity is none, or too few file descriptors are left.
    """

    @os_errors()
    def __init__(self, context: ZmqContext, address: str, identity: bytes, config: TransportConfig) -> None:
        self._socket = make_socket(context, zmq.DEALER, config)
        with closed_on_error(self._socket):
            self._socket.setsockopt(zmq.IDENTITY, identity)
            connect(self._socket, address)
            self._socket.send(b"")  # a ROUTER can address a peer only once it knows its identity
        self.fd = int(self._socket.getsockopt(zmq.FD))
        self.ended = False

    def receive(self) -> Sequence[Buffer] | None:
        frames: list[Buffer] = []
        try:
            while True:  # `recv_multipart` would ask the socket for what each frame knows: whether there are more
                frame = SocketBase.recv(self._socket, _NOBLOCK, copy=False)
                frames.append(frame.buffer)
                if not frame.more:
                    return frames
        except zmq.Again:
            return None

    def pending(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def close(self) -> None:
        self._socket.close(linger=0)
