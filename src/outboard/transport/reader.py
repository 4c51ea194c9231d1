"""Reads a PULL socket on an event loop through its file descriptor: no task, no thread, no queue.

`ZMQ_FD` is edge-triggered: it becomes readable when something changes, not while messages are there. So a callback
drains until ZMQ_EVENTS says that nothing is left (which also takes the edge), and where it stops before that, to let
others run, it puts itself back on the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import zmq

from outboard.protocol.tensors import Buffer
from outboard.transport.sockets import ZmqSocket

__all__ = ["MAX_MESSAGES", "MAX_TOKENS", "Loop", "OnMessage", "SocketReader"]

# How many messages one callback takes before others on the loop get their turn; and after how many tokens it takes no
# further one. Readers of streams merge what one turn brings: with 8 messages a token costs them half as much again.
MAX_MESSAGES = 32
MAX_TOKENS = 16_384
# Plain ints: arithmetic on ZeroMQ's enums costs 1 us.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)


# Takes body and auxiliary frames; returns how many tokens they held, or None where there are never any.
OnMessage: TypeAlias = Callable[[Buffer, Sequence[Buffer]], int | None]


class Loop(Protocol):
    """What is needed of an event loop; asyncio's has it."""

    def add_reader(self, fd: int, callback: Callable[..., Any], /, *args: Any) -> Any: ...
    def remove_reader(self, fd: int, /) -> Any: ...
    def add_writer(self, fd: int, callback: Callable[..., Any], /, *args: Any) -> Any: ...
    def remove_writer(self, fd: int, /) -> Any: ...
    def call_soon(self, callback: Callable[..., Any], /, *args: Any) -> Any: ...
    def is_closed(self) -> bool: ...


class SocketReader:
    """Calls `on_message(body, auxiliary frames)` on the loop for every message of a socket.

    Holds `on_message` strongly: what must not be kept alive must not be reachable from it. An exception of
    `on_message` is not caught here.
    """

    def __init__(self, socket: ZmqSocket, on_message: OnMessage) -> None:
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._on_message = on_message
        self._loop: Loop | None = None
        self._unfinished = False  # whether the last drain stopped before the socket was empty
        self._scheduled = False  # whether there is a callback on the loop, besides the descriptor's

    def attach(self, loop: Loop) -> None:
        """Starts reading on `loop`; call it on that loop."""
        self._loop = loop
        loop.add_reader(self._fd, self._on_readable)
        self._schedule(loop)  # the edge of what came before add_reader is gone

    def look_again(self) -> None:
        """To be called after a send on the same socket, which may have eaten the edge."""
        if self._loop is not None:
            self._schedule(self._loop)

    def detach(self) -> None:
        """Stops reading; must precede the socket's close. Idempotent. Call it on the loop, or where none runs."""
        loop, self._loop = self._loop, None
        self._scheduled = False
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._fd)

    def drain(self, limit: int) -> int:
        """Hands on up to `limit` messages that are there, fewer where they hold many tokens; how many they were."""
        socket = self._socket
        tokens = 0
        self._unfinished = True  # also behind a message whose handling raises: there will be no edge for it
        for count in range(limit):
            if not int(socket.getsockopt(_EVENTS)) & _POLLIN:
                self._unfinished = False
                return count
            frame = socket.recv(_NOBLOCK, copy=False)
            if frame.more:
                parts = [part.buffer for part in socket.recv_multipart(copy=False)]
                tokens += self._on_message(frame.buffer, parts) or 0
            else:
                tokens += self._on_message(frame.buffer, ()) or 0
            if socket.closed or tokens >= MAX_TOKENS:
                return count + 1
        return limit

    def _schedule(self, loop: Loop) -> None:
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._scheduled = False
        self._on_readable()

    def _on_readable(self) -> None:
        loop = self._loop
        if loop is None or self._scheduled:  # two drains a turn would become three in the next, and so on
            return
        try:
            self.drain(MAX_MESSAGES)
        finally:
            if self._unfinished and self._loop is loop:
                self._schedule(loop)
