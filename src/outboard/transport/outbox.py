"""What a client sends to one engine core, in order, without ever blocking."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence

import zmq
from zmq.backend import Socket as SocketBase

from outboard.protocol.tensors import Buffer
from outboard.transport.sockets import ZmqSocket

__all__ = ["Outbox"]

# Plain ints: arithmetic on ZeroMQ's enums costs 1 us.
_MORE = int(zmq.SNDMORE)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

_FIRST_RETRY = 0.001
_LAST_RETRY = 0.020


class Outbox:
    """Sends over a ROUTER, or holds what it does not take.

    At its high-water mark a ROUTER refuses with EAGAIN, and its POLLOUT tells nothing of one peer; so what was refused
    is retried on a timer of 1 to 20 ms, and one stopped engine core delays no other.

    Args:
        socket: a bound ROUTER.
        identity: the peer's.
        call_later: calls a function after a delay in seconds, in this thread.
        give_back: told of the body of each message that is not going to be sent, for the shared memory it refers to.

    Attributes:
        tracked: (tracker, frames) of messages with frames that ZeroMQ did not copy, oldest first.
        unreachable: whether ZeroMQ has no connection to the peer.
        sent: messages that ZeroMQ took.
    """

    def __init__(
        self,
        socket: ZmqSocket,
        identity: bytes,
        call_later: Callable[[float, Callable[[], None]], object],
        give_back: Callable[[Buffer], None] = lambda body: None,
    ) -> None:
        self._socket = socket
        # Past pyzmq's wrapper, which only adds arguments of other socket types.
        self._send = functools.partial(SocketBase.send, socket)
        self._identity = identity
        self._call_later = call_later
        self._give_back = give_back
        self._held: deque[tuple[int | None, Sequence[Buffer]]] = deque()
        self._delay = 0.0  # 0: no retry is due
        self.tracked: deque[tuple[zmq.MessageTracker, Sequence[Buffer]]] = deque()
        self.unreachable = False
        self.sent = 0

    def __len__(self) -> int:
        """Messages held here because ZeroMQ did not take them."""
        return len(self._held)

    def send(self, frames: Sequence[Buffer], key: int | None = None) -> None:
        """Sends a message (type byte, body, auxiliary frames), or holds it behind those held already.

        Args:
            frames: auxiliary frames are not copied: they must not change before their tracker is done.
            key: names the message for `take_back`.
        """
        if self._socket.closed:
            return  # as to a peer that is gone
        if self.tracked:
            self.free_sent()
        if self._held or not self._try_send(frames):
            self._held.append((key, frames))
            self._schedule()

    def take_back(self, key: int) -> bool:
        """Removes a message that is still held here; False if it has been sent."""
        for position, (held_key, frames) in enumerate(self._held):
            if held_key == key:
                del self._held[position]
                self._give_back(frames[1])
                return True
        return False

    def free_sent(self) -> None:
        """Lets go of buffers that ZeroMQ has let go of."""
        tracked = self.tracked
        while tracked and tracked[0][0].done:
            tracked.popleft()

    def clear(self) -> None:
        """Forgets what is held; the peer is gone."""
        self._held.clear()
        self.tracked.clear()

    def _schedule(self) -> None:
        if not self._delay:
            self._delay = _FIRST_RETRY
            self._call_later(self._delay, self._retry)

    def _retry(self) -> None:
        while self._held and not self._socket.closed and self._try_send(self._held[0][1]):
            self._held.popleft()
            self._delay = _FIRST_RETRY / 2
        if self._held and not self._socket.closed:
            self._delay = min(self._delay * 2, _LAST_RETRY)
            self._call_later(self._delay, self._retry)
        else:
            self._delay = 0.0

    def _try_send(self, frames: Sequence[Buffer]) -> bool:
        socket, send = self._socket, self._send
        try:
            send(self._identity, _NOBLOCK_MORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.unreachable = True
            return False
        self.unreachable = False
        self.sent += 1
        # The identity reserved the place of all frames: the rest cannot be refused.
        send(frames[0], _MORE)
        if len(frames) == 2:  # type and body: most messages have no more
            send(frames[1])
            return True
        send(frames[1], _MORE)
        trackers = [socket.send(frame, _MORE, copy=False, track=True) for frame in frames[2:-1]]
        trackers.append(socket.send(frames[-1], copy=False, track=True))
        self.tracked.append((zmq.MessageTracker(*trackers), frames))
        return True
