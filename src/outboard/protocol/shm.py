"""Leased shared-memory slots: how large arrays cross without passing through a socket.

Each direction has an arena: one memfd of fixed length that its sender makes, of which only the part in use has memory.
A slot is a piece of it.

    sender                                            receiver
    lease a slot, copy the array in    --reference-->  a view of the slot
    the slot is free again             <--its word--   the last view has died: 0 into the slot's word

The receiver opens the arena through /proc/PID/fd, so there is no name and nothing to unlink: the memory lives as long
as someone has it mapped. Where that is not permitted (another user, another pid namespace) the arena is never attached,
and every lease is refused; so it is when the arena is full. Nobody ever waits for a slot.

The start of an arena, as 64-bit words of this machine's byte order:

    0            key: random, checked by whoever opens the arena, so that no other file can be taken for it
    1            1 once the receiver has attached
    2, 3, 4      in the client's arena: descriptor, key and length of the engine core's, written by the engine core
    16 and up    one word a lease: its number while it is held, 0 when it is free
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import stat
import weakref
from typing import TYPE_CHECKING, Any

import msgspec

from outboard.protocol.extents import Extents

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DATA", "GRANULE", "MAX_LEASES", "ArenaAddress", "SlotPool", "SlotReader", "SlotRef"]

logger = logging.getLogger("outboard.protocol")

MAX_LEASES = 1024
# Slots are multiples of this: small enough to waste little, large enough that gaps can be used again.
GRANULE = 256 << 10

_KEY, _ATTACHED, _PEER_FD, _PEER_KEY, _PEER_LENGTH = range(5)
_LEASES = 16
DATA = -(-(_LEASES + MAX_LEASES) * 8 // mmap.PAGESIZE) * mmap.PAGESIZE

# Linux 5.14; Python's mmap has no name for it. It maps pages at once, for a tenth of what faults would cost.
_MADV_POPULATE_WRITE = 23


class ArenaAddress(msgspec.Struct, array_like=True, frozen=True):
    """Where an arena is: a descriptor of a process, the key in its first word, and its length in bytes."""

    pid: int
    fd: int
    key: int
    length: int


class SlotRef(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One lease, as it travels: its place in the table, its number, never used twice, and where the slot begins."""

    index: int
    number: int
    offset: int


class _Arena:
    """The memfd of a pool and its mapping; the descriptor is closed when nobody refers to this any more."""

    def __init__(self, limit: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfds")
        self.length = DATA + limit // GRANULE * GRANULE
        self.fd = os.memfd_create("outboard-slots", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        self.reserved = DATA  # up to here there is memory
        # Reserved: to touch a page for which there is no memory would end in SIGBUS.
        os.posix_fallocate(self.fd, 0, DATA)
        os.ftruncate(self.fd, self.length)
        self.mapping = mmap.mmap(self.fd, self.length)
        self.words = memoryview(self.mapping)[:DATA].cast("Q")
        self.words[_KEY] = secrets.randbits(64)

    def reserve(self, size: int) -> bool:
        """Reserves memory for so many more bytes; False if there is none."""
        start = self.reserved
        if start + size > self.length:
            return False
        try:
            os.posix_fallocate(self.fd, start, size)
        except OSError as error:
            logger.warning("no memory for %d bytes of shared-memory slots, frames are used: %s", size, error)
            return False
        try:
            self.mapping.madvise(_MADV_POPULATE_WRITE, start, size)
        except OSError:  # an older kernel: then the first copy maps the pages
            pass
        self.reserved += size
        return True


class SlotPool:
    """The sender's side of an arena. Belongs to the thread that encodes; any other may close it.

    Args:
        limit: most bytes that all slots together may take; rounded down to a multiple of 256 KiB.

    Raises:
        OSError: the system has no memory or no descriptor for it, or no memfds at all.
    """

    def __init__(self, limit: int) -> None:
        self._arena: _Arena | None = _Arena(limit)
        self._free = Extents()
        self._held: dict[int, tuple[int, int]] = {}  # index of the lease -> (offset, size)
        self._indices = list(range(MAX_LEASES))
        self._number = secrets.randbits(62)  # another pool's references mean nothing here

    @property
    def address(self) -> ArenaAddress | None:
        """None once it is closed."""
        arena = self._arena
        return None if arena is None else ArenaAddress(os.getpid(), arena.fd, arena.words[_KEY], arena.length)

    @property
    def peer(self) -> tuple[int, int, int]:
        """Descriptor, key and length of the receiver's own arena, as it wrote them here; zeros if it did not."""
        words = self._arena.words if self._arena is not None else (0,) * _LEASES
        return words[_PEER_FD], words[_PEER_KEY], words[_PEER_LENGTH]

    @property
    def reserved(self) -> int:
        """Bytes of memory that slots take, held or free."""
        return 0 if self._arena is None else self._arena.reserved - DATA

    @property
    def held(self) -> int:
        """How many slots are held."""
        if (arena := self._arena) is None:
            return 0
        self._collect(arena.words)
        return len(self._held)

    def lease(self, size: int) -> tuple[SlotRef, memoryview] | None:
        """A slot of `size` bytes to be filled; None if there is none: then use another way."""
        arena = self._arena
        if arena is None or not arena.words[_ATTACHED]:
            return None
        self._collect(arena.words)
        room = -(-size // GRANULE) * GRANULE
        offset = self._take(arena, room) if self._indices else None
        if offset is None:
            return None
        index = self._indices.pop()
        self._number += 1
        self._held[index] = (offset, room)
        arena.words[_LEASES + index] = self._number
        return SlotRef(index, self._number, offset), memoryview(arena.mapping)[offset : offset + size]

    def give_back(self, ref: SlotRef) -> None:
        """Frees a slot whose reference is not going to be sent."""
        if (arena := self._arena) is not None and arena.words[_LEASES + ref.index] == ref.number:
            arena.words[_LEASES + ref.index] = 0

    def close(self) -> None:
        """The end: no more leases, and all memory is free that no receiver has mapped. Idempotent."""
        self._arena = None

    def _collect(self, words: memoryview) -> None:
        """Takes back what the receiver has freed."""
        for index in [index for index in self._held if not words[_LEASES + index]]:
            self._free.add(*self._held.pop(index))
            self._indices.append(index)

    def _take(self, arena: _Arena, size: int) -> int | None:
        """Memory that is in use already is preferred to new."""
        if (offset := self._free.take(size)) is not None:
            return offset
        start = arena.reserved
        missing = size - self._free.room_before(start)
        if not arena.reserve(missing):
            return None
        self._free.add(start, missing)
        return self._free.take(size)


class SlotReader:
    """The receiver's side of an arena. May be used, and its views may die, in any thread.

    Raises:
        OSError: the arena cannot be opened, or it is not that arena.
    """

    def __init__(self, address: ArenaAddress) -> None:
        path = f"/proc/{address.pid}/fd/{address.fd}"
        # Looked at before it is opened: in another pid namespace this is any file of any process.
        found = os.stat(path)  # noqa: PTH116
        if not stat.S_ISREG(found.st_mode) or not found.st_size == address.length >= DATA:
            raise OSError(f"{path} is not the arena that was announced")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(fd, address.length)
        finally:
            os.close(fd)
        words = memoryview(mapping)[:DATA].cast("Q")
        if words[_KEY] != address.key:
            raise OSError(f"{path} is not the arena that was announced: it has another key")
        words[_ATTACHED] = 1
        self._arena: tuple[mmap.mmap, memoryview] | None = (mapping, words)

    def announce(self, address: ArenaAddress) -> None:
        """Tells the owner of this arena where the reader's own is."""
        if self._arena is not None:
            words = self._arena[1]
            words[_PEER_FD], words[_PEER_KEY], words[_PEER_LENGTH] = address.fd, address.key, address.length

    @property
    def held(self) -> int:
        """How many slots are held, here or on their way."""
        return 0 if self._arena is None else sum(map(bool, self._arena[1][_LEASES : _LEASES + MAX_LEASES]))

    def open(self, ref: SlotRef, size: int) -> np.ndarray[Any, Any]:
        """The first `size` bytes of a slot, writable; the slot is free once nothing refers to them any more.

        Raises:
            ValueError: there is no such lease, or the reader is closed.
        """
        import numpy as np

        if (arena := self._arena) is None:
            raise ValueError("shared memory is closed")
        mapping, words = arena
        if not _is_held(words, ref) or not DATA <= ref.offset <= len(mapping) - size:
            raise ValueError(f"shared-memory slot {ref.index} is not leased by this message")
        owner = np.frombuffer(mapping, np.uint8, size, ref.offset)
        weakref.finalize(owner, _free, words, ref, os.getpid()).atexit = False
        return owner

    def free(self, ref: SlotRef) -> None:
        """Frees a slot that was never opened."""
        if (arena := self._arena) is not None and _is_held(arena[1], ref):
            _free(arena[1], ref, os.getpid())

    def close(self) -> None:
        """Lets go of the arena; views that live keep their memory. Idempotent."""
        self._arena = None


def _is_held(words: memoryview, ref: SlotRef) -> bool:
    return 0 <= ref.index < MAX_LEASES and words[_LEASES + ref.index] == ref.number != 0


def _free(words: memoryview, ref: SlotRef, pid: int) -> None:
    """The last act of a view, in whichever thread it dies. In a forked copy it does nothing: the original lives."""
    if os.getpid() == pid and words[_LEASES + ref.index] == ref.number:
        words[_LEASES + ref.index] = 0
