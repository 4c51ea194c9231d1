"""Messages on a stream of bytes, such as a Unix socket's; no sockets here.

HELLO     who connects says so, once
message   length of the body, number of auxiliary frames | the length of each of them | the body | the frames
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence

from outboard.errors import ProtocolError
from outboard.protocol.codec import MAX_FRAMES
from outboard.protocol.tensors import Buffer

__all__ = ["HELLO_BYTES", "Assembler", "Message", "head_of", "hello"]

_HELLO = struct.Struct("<8sQ")
_MAGIC = b"outboard"
HELLO_BYTES = _HELLO.size

_HEAD = struct.Struct("<QQ")
_HEAD_BYTES = _HEAD.size

# Messages without auxiliary frames that fit in here are handed on where they lie.
_ROOM = 64 << 10

# From here on memory in large pages, unzeroed, takes a third of the time.
_MAPPED = 8 << 20

Message = tuple[Buffer, Sequence[Buffer]]


def hello(epoch: int) -> bytes:
    """What an engine core says first: whom it takes the other end for."""
    return _HELLO.pack(_MAGIC, epoch)


def head_of(frames: Sequence[Buffer], prefix: bytes = b"") -> bytes:
    """What goes before the frames of a message; with the `prefix`, if any, that becomes a part of the first."""
    size = len(prefix) + len(frames[0])
    if len(frames) == 1:
        return _HEAD.pack(size, 0) + prefix
    return struct.pack(f"<QQ{len(frames) - 1}Q", size, len(frames) - 1, *map(len, frames[1:])) + prefix


class Assembler:
    """Makes messages of the bytes that come, however they come: fill `room()`, say how much with `came`, take `next`.

    Args:
        max_bytes: of a frame. No memory is taken for one that is announced as larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray(_ROOM)
        self._view = memoryview(self._buffer)
        self._most_in_place = min(_ROOM - _HEAD_BYTES, max_bytes)
        self._start = self._end = 0  # of what has come and was not taken
        self._large: _LargeMessage | None = None

    @property
    def holds(self) -> bool:
        """Whether there may be another message among what has come."""
        return self._start < self._end

    def room(self) -> memoryview:
        """Where the next bytes belong; never empty once `next` has found nothing."""
        return self._view[self._end :] if self._large is None else self._large.room()

    def came(self, count: int) -> None:
        """So many bytes were put into `room()`."""
        if self._large is None:
            self._end += count
        else:
            self._large.came(count)

    def next(self) -> Message | None:
        """The next message: body and auxiliary frames; None while it is not complete.

        The body is valid until the next call: whoever decodes it must copy. The frames are the caller's to keep.

        Raises:
            ProtocolError: what came is no message; nor is anything behind it.
        """
        if self._large is not None:
            return self._finish_large()
        start = self._start
        there = self._end - start
        if there >= _HEAD_BYTES:
            size, count = _HEAD.unpack_from(self._buffer, start)
            if count or size > self._most_in_place:
                return self._begin_large(size, count)
            end = start + _HEAD_BYTES + size
            if end <= self._end:
                self._start = end
                return self._view[start + _HEAD_BYTES : end], ()
        if start:
            if there:  # to the front, so that there is room for the rest
                self._view[:there] = self._view[start : self._end]
            self._start, self._end = 0, there
        return None

    def _begin_large(self, size: int, count: int) -> Message | None:
        if count > MAX_FRAMES:
            raise ProtocolError(f"a message of {count} frames; it may have {MAX_FRAMES}")
        self._large = _LargeMessage(size, count, self._max_bytes)
        self._start += _HEAD_BYTES
        return self._finish_large()

    def _finish_large(self) -> Message | None:
        large = self._large
        assert large is not None
        while self._start < self._end and (room := large.room()):
            count = min(len(room), self._end - self._start)
            room[:count] = self._view[self._start : self._start + count]
            self._start += count
            large.came(count)
        if large.room():
            return None
        self._large = None
        return large.frames[0], large.frames[1:]


class _LargeMessage:
    """A message that has memory of its own: a frame's is taken when all before it has come.

    Attributes:
        frames: the body and the auxiliary frames, as far as they have come.
    """

    def __init__(self, size: int, count: int, max_bytes: int) -> None:
        self._sizes = [size]
        self._count = count
        self._max_bytes = max_bytes
        self.frames: list[Buffer] = []
        self._room = memoryview(b"")
        if count:
            self._table = bytearray(8 * count)
            self._room = memoryview(self._table)
        else:
            self._next_frame()

    def room(self) -> memoryview:
        """Where the next bytes belong; empty when all have come."""
        return self._room

    def came(self, count: int) -> None:
        self._room = self._room[count:]
        if self._room:
            return
        if not self.frames and len(self._sizes) <= self._count:
            self._sizes += struct.unpack(f"<{self._count}Q", self._table)
        while not self._room and len(self.frames) < len(self._sizes):
            self._next_frame()

    def _next_frame(self) -> None:
        size = self._sizes[len(self.frames)]
        if size > self._max_bytes:
            raise ProtocolError(_too_large(size, self._max_bytes))
        self._room = _memory(size)
        self.frames.append(self._room)


def _memory(size: int) -> memoryview:
    try:
        if size < _MAPPED:
            return memoryview(bytearray(size))
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (MemoryError, OSError, OverflowError):
        raise ProtocolError(f"no memory for a frame of {size} bytes") from None
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them
    return memoryview(mapped)


def _too_large(size: int, max_bytes: int) -> str:
    return f"a frame of {size} bytes; max_message_bytes in TransportConfig allows {max_bytes}"
