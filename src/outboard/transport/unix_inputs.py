"""Inputs over a plain Unix socket: the client's end and the engine core's.

The type byte of a message travels as the first byte of its body. The first message of a turn of the client's event loop
leaves at once; those that follow in the same turn leave together: one system call, and the engine core wakes once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from outboard.protocol.tensors import Buffer
from outboard.transport.reader import Loop
from outboard.transport.unix import UnixListener, UnixMessages, UnixWriter, connect_unix

__all__ = ["UnixInputReceiver", "UnixInputSender"]


# Bytes that may wait for the end of the turn: what the other end reads at once.
_TOGETHER = 64 << 10


class UnixInputSender:
    """The client's end, an `InputSender`. Not to be shared between threads.

    Args:
        path: where to listen; the file must not exist.
        epoch: of the client and the engine core that is to connect.
        high_water_mark: see `UnixWriter`.
        on_end: called once, when the engine core is found to have closed the connection.
        on_stranger: called with what is known of each connection that was not the engine core's.

    Attributes:
        address: for `UnixInputReceiver`.

    Raises:
        OSError: the path cannot be used, or no file descriptor is left.
    """

    def __init__(
        self,
        path: str,
        epoch: int,
        high_water_mark: int,
        on_end: Callable[[], None],
        on_stranger: Callable[[str], None],
    ) -> None:
        self._listener = UnixListener(path, epoch, on_stranger)
        self.address = self._listener.address
        self._high_water_mark = high_water_mark
        self._on_end = on_end
        self._loop: Loop | None = None
        self._socket: socket.socket | None = None
        self._writer: UnixWriter | None = None  # of the socket, while it is written to
        self._waiting: Callable[[], None] | None = None  # to be called when there is room
        self._full = False  # whether the socket took no more; the loop looks for room then
        self._together = False  # whether there are turns
        self._in_turn = False  # whether something has been sent in this one
        self._gathered = 0  # bytes that wait for its end

    @property
    def tracked(self) -> Sequence[tuple[object, Sequence[Buffer]]]:
        """What is left of a message that the socket took in part; the rest it has copied."""
        unsent = self._writer.unsent if self._writer is not None else ()
        return ((None, unsent),) if unsent else ()

    def accept(self) -> bool:
        """Takes the engine core's connection, which must have been made, and listens no more; False if there is none.

        Raises:
            OSError: no file descriptor is left.
        """
        self._socket = self._listener.accept()
        if self._socket is None:
            return False
        self._writer = UnixWriter(self._socket, self._high_water_mark, self._wait_for_room, self._on_gone)
        return True

    def wait_for_peer(self, seconds: float) -> None:
        """It is there, or never will be."""

    def attach(self, loop: Loop) -> None:
        """From now on `loop` tells when there is room, and when the engine core has closed; call it on that loop."""
        if self._socket is not None:
            self._loop = loop
            # A blocking client's thread would have to be woken for each.
            self._together = isinstance(loop, asyncio.AbstractEventLoop)
            loop.add_reader(self._socket.fileno(), self._on_readable)
            if self._full:
                loop.add_writer(self._socket.fileno(), self._on_writable)

    def send(self, frames: Sequence[Buffer]) -> bool:
        writer = self._writer
        if writer is None:
            return True
        kind, *rest = frames
        if not self._in_turn or self._full:
            loop = self._loop
            if self._together and not self._in_turn and loop is not None and not loop.is_closed():
                self._in_turn = True
                loop.call_soon(self._on_turn_end)
            return writer.send(rest, False, kind)  # type: ignore[arg-type]
        taken = writer.send(rest, True, kind)  # type: ignore[arg-type]
        self._gathered += len(rest[0])
        if self._gathered >= _TOGETHER:
            self._gathered = 0
            writer.flush()
        return taken

    def call_when_writable(self, callback: Callable[[], None]) -> None:
        self._waiting = callback
        self._wait_for_room()

    def stop(self) -> None:
        if self._writer is not None:
            self._writer.flush()
        connection, self._socket = self._socket, None
        loop, self._loop = self._loop, None
        self._writer = self._waiting = None
        if connection is not None:
            if loop is not None and not loop.is_closed():
                loop.remove_reader(connection.fileno())
                loop.remove_writer(connection.fileno())
            connection.close()

    def close(self) -> None:
        """Frees all, once it was stopped. Idempotent."""
        self._listener.close()

    def _on_turn_end(self) -> None:
        self._in_turn = False
        self._gathered = 0
        if self._writer is not None:
            self._writer.flush()

    def _wait_for_room(self) -> None:
        if self._full or self._writer is None:
            return
        self._full = True
        if self._loop is not None and self._socket is not None:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        if self._writer is None or not self._writer.flush() or self._loop is None or self._socket is None:
            return
        self._full = False
        self._loop.remove_writer(self._socket.fileno())
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting()

    def _on_readable(self) -> None:
        """The engine core says nothing here: it has closed."""
        if self._socket is None:
            return
        try:
            if self._socket.recv(1 << 16):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._end()

    def _on_gone(self) -> None:
        """Found while something was sent, maybe in another thread than the loop's: only there it may be closed."""
        self._writer = None
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon(self._end)

    def _end(self) -> None:
        if self._socket is not None:
            self._writer = None
            self.stop()
            self._on_end()


class UnixInputReceiver:
    """The engine core's end, an `InputReceiver`. Belongs to the input thread.

    Args:
        address: where the client listens.
        epoch: of the client and this engine core.
        max_message_bytes: of a frame.

    Attributes:
        fd: for `SocketPoller`.

    Raises:
        OSError: nobody listens there, or no file descriptor is left.
    """

    def __init__(self, address: str, epoch: int, max_message_bytes: int) -> None:
        self._socket = connect_unix(address, epoch)
        self._messages = UnixMessages(self._socket, max_message_bytes)
        self.fd = self._socket.fileno()

    @property
    def ended(self) -> bool:
        return self._messages.ended

    def receive(self) -> Sequence[Buffer] | None:
        messages = self._messages
        message = messages.next()
        if message is None or not messages.holds:
            messages.look()  # this is called again only once there is something
        if message is None:
            return None
        body, aux = message
        return (body[:1], body[1:], *aux)

    def pending(self) -> bool:
        return self._messages.holds

    def close(self) -> None:
        self._socket.close()
