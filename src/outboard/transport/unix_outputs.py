"""Outputs over a plain Unix socket: the engine core's end and the client's."""

from __future__ import annotations

import socket
from collections.abc import Callable

from outboard.errors import ProtocolError
from outboard.transport.framing import Message
from outboard.transport.poller import SocketPoller
from outboard.transport.reader import MAX_MESSAGES, MAX_TOKENS, Loop, OnMessage
from outboard.transport.unix import UnixListener, UnixMessages, UnixWriter, connect_unix

__all__ = ["UnixReader", "UnixSender"]


class UnixSender:
    """The engine core's end, an `OutputSender`. Belongs to the busy loop, once made.

    Args:
        address: where the client listens.
        epoch: of the client and this engine core.
        high_water_mark: see `UnixWriter`.
        poller: tells when a socket that took no more is to be tried again.
        on_writable: called by the poller then, in its thread.

    Raises:
        OSError: nobody listens there, or no file descriptor is left.
    """

    def __init__(
        self, address: str, epoch: int, high_water_mark: int, poller: SocketPoller, on_writable: Callable[[], None]
    ) -> None:
        self._socket = connect_unix(address, epoch)
        fd = self._socket.fileno()
        self._writer = UnixWriter(self._socket, high_water_mark, lambda: poller.arm(fd))
        self.writable, self.send, self.flush = self._writer.writable, self._writer.send, self._writer.flush
        self._poller = poller
        poller.add_writable(fd, on_writable)

    def close(self, linger_ms: int) -> None:
        self._writer.finish(linger_ms)
        if self._socket.fileno() >= 0:
            self._poller.remove(self._socket.fileno())
            self._socket.close()


class UnixReader:
    """The client's end: calls `on_message(body, auxiliary frames)` for every message.

    Not to be shared between threads. Holds its functions strongly: what must not be kept alive must not be reachable
    from them. An exception of `on_message` is not caught here. A body is valid during the call.

    Args:
        path: where to listen; the file must not exist.
        epoch: of the client and the engine core that is to connect.
        max_message_bytes: of a frame.
        on_message: see above.
        on_end: called once, when no more will come: with what is wrong, or with nothing where the other end was closed.
        on_stranger: called with what is known of each connection that was not the engine core's.

    Attributes:
        address: for `UnixSender`.

    Raises:
        OSError: the path cannot be used, or no file descriptor is left.
    """

    def __init__(
        self,
        path: str,
        epoch: int,
        max_message_bytes: int,
        on_message: OnMessage,
        on_end: Callable[[str], None],
        on_stranger: Callable[[str], None],
    ) -> None:
        self._listener = UnixListener(path, epoch, on_stranger)
        self.address = self._listener.address
        self._max_message_bytes = max_message_bytes
        self._on_message = on_message
        self._on_end = on_end
        self._scheduled = False  # whether there is a callback on the loop, besides the descriptor's
        self._loop: Loop | None = None
        self._socket: socket.socket | None = None
        self._messages: UnixMessages | None = None  # of the socket, while that is read

    def accept(self) -> bool:
        """Takes the engine core's connection, which must have been made, and listens no more; False if there is none.

        Raises:
            OSError: no file descriptor is left.
        """
        self._socket = self._listener.accept()
        if self._socket is None:
            return False
        self._messages = UnixMessages(self._socket, self._max_message_bytes)
        return True

    def attach(self, loop: Loop) -> None:
        """Starts reading on `loop`; call it on that loop."""
        if self._socket is not None:
            self._loop = loop
            loop.add_reader(self._socket.fileno(), self._on_readable)

    def drain(self, limit: int) -> int:
        """Hands on up to `limit` messages that are there, fewer where they hold many tokens; how many they were."""
        if self._messages is not None:
            self._messages.look()
        tokens = 0
        for count in range(limit):
            if self._messages is None or (message := self._next(self._messages)) is None:
                return count
            tokens += self._on_message(*message) or 0
            if tokens >= MAX_TOKENS:
                return count + 1
        return limit

    def stop(self) -> None:
        """Takes no more, and lets the engine core know. Idempotent. Call it on the loop, or where none runs."""
        connection, self._socket = self._socket, None
        loop, self._loop = self._loop, None
        self._messages = None
        if connection is not None:
            if loop is not None and not loop.is_closed():
                loop.remove_reader(connection.fileno())
            connection.close()

    def close(self) -> None:
        """Frees all, once it was stopped. Idempotent."""
        self._listener.close()

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
            # What is in the socket is told of again, what is here is not.
            if self._messages is not None and self._messages.holds and self._loop is loop:
                self._scheduled = True
                loop.call_soon(self._on_turn)

    def _next(self, messages: UnixMessages) -> Message | None:
        reason = ""
        try:
            message = messages.next()
        except ProtocolError as error:
            message, reason = None, str(error)
        if messages.ended and message is None:
            self.stop()
            self._on_end(reason)
        return message
