"""The progress page: signs of life that an engine core writes and that whoever waits for it reads.

A step may hold the GIL from end to end, so no thread of the engine core can answer for it, and a chunked prefill sends
nothing for long; so the busy loop writes into a page of shared memory, and a reader needs nothing of the process. A
memfd, opened through /proc/PID/fd. Numbers are 8 bytes, native, signed:

    0    a magic number
    1    steps taken
    2    time of the last sign of life: CLOCK_MONOTONIC, ns
    3    what it is at: `IDLE`, `BUSY`, or `FROZEN` (paused or asleep, so that no step is to be expected)
    8+   messages taken from each front end, by its slot

The time is written before the activity and read after it: nobody sees an engine core that has just become busy with the
time at which it became idle.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from time import monotonic_ns

import msgspec

__all__ = ["BUSY", "FROZEN", "IDLE", "MAX_SLOTS", "Progress", "ProgressPage", "ProgressReader"]

IDLE, BUSY, FROZEN = 0, 1, 2

_MAGIC = 0x4F75_7442_6F61_7264
_STEPS, _TIME, _ACTIVITY, _TAKEN = 1, 2, 3, 8
_SIZE = 4096
MAX_SLOTS = _SIZE // 8 - _TAKEN


class Progress(msgspec.Struct, frozen=True):
    """One look at a progress page. `time` in ns of CLOCK_MONOTONIC."""

    steps: int
    time: int
    activity: int
    taken: int


class ProgressPage:
    """The writer's side; belongs to the busy loop's thread.

    Args:
        shared: whether others can read it; without that it is there to be written to only.

    Attributes:
        fd: descriptor of the page; -1 if it is not shared.
    """

    def __init__(self, shared: bool = True) -> None:
        self.fd = -1
        memory: mmap.mmap | bytearray = bytearray(_SIZE)
        if shared:
            self.fd = os.memfd_create("outboard-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self.fd)
            os.ftruncate(self.fd, _SIZE)
            # Readers map it: one that was cut short would end them by SIGBUS.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            memory = mmap.mmap(self.fd, _SIZE)
        self._numbers = memoryview(memory).cast("q")
        self._steps = 0
        self.alive(IDLE)
        self._numbers[0] = _MAGIC

    def alive(self, activity: int = BUSY) -> None:
        """Notes a sign of life, and what the busy loop is at."""
        numbers = self._numbers
        numbers[_TIME] = monotonic_ns()
        numbers[_ACTIVITY] = activity

    def sign(self) -> None:
        """Notes a sign of life. May be called in any thread, at any time."""
        self._numbers[_TIME] = monotonic_ns()

    def stepped(self) -> float:
        """Notes that a step has been taken, which is a sign of life; the time, as `time.monotonic` has it."""
        now = monotonic_ns()
        self._steps = steps = self._steps + 1
        numbers = self._numbers
        numbers[_STEPS] = steps
        numbers[_TIME] = now
        return now * 1e-9

    def took(self, slot: int) -> None:
        """Notes that a message of a front end has been taken, which is a sign of life."""
        numbers = self._numbers
        numbers[_TAKEN + slot] += 1
        numbers[_TIME] = monotonic_ns()

    def clear(self, slot: int) -> None:
        """A new front end has this slot."""
        self._numbers[_TAKEN + slot] = 0


class ProgressReader:
    """The reader's side. Stays readable after the engine core has ended; `close` releases it."""

    def __init__(self, pid: int, fd: int, slot: int) -> None:
        """Opens the page of a process.

        Raises:
            OSError: no such process or descriptor.
            ValueError: it is no progress page.
        """
        page = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(page).st_size != _SIZE or not fcntl.fcntl(page, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError(f"descriptor {fd} of process {pid} is not a progress page")
            self._page = mmap.mmap(page, _SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(page)
        self._numbers = memoryview(self._page).cast("q")
        self._slot = slot
        if self._numbers[0] != _MAGIC:
            self.close()
            raise ValueError(f"descriptor {fd} of process {pid} is not a progress page")

    def read(self) -> Progress:
        """What the page says now."""
        numbers = self._numbers
        activity = numbers[_ACTIVITY]
        return Progress(numbers[_STEPS], numbers[_TIME], activity, numbers[_TAKEN + self._slot])

    def taken(self) -> dict[int, int]:
        """Messages taken from each front end that has sent any, by its slot."""
        return {slot: count for slot, count in enumerate(self._numbers[_TAKEN:]) if count}

    def close(self) -> None:
        """Releases the mapping. Idempotent."""
        self._numbers.release()
        self._page.close()
