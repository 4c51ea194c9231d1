"""The warden's other half: what the engine core writes to stdout and stderr.

Imported by `warden.py`, which runs outside the package, so it imports nothing of Outboard.
"""

from __future__ import annotations

import _thread
import os
import select
import time

# The report page, as outboard/protocol/report.py lays it out.
NUMBER = 8
TAIL_OFFSET = 128 << 10
TAIL_SIZE = 64 << 10

PENDING_SIZE = 64 << 10  # stderr that waits for a slow reader; beyond it the oldest is dropped
PIPE_BUF = 4096  # writes up to this size do not mix with those of other processes
FLUSH_INTERVAL = 0.05  # seconds between two updates of the tail on the report page
REST_BOUND = 0.2  # seconds for the rest of stderr, once all that could write has been killed


class Copier:
    """Copies the engine's stderr to ours, in a thread of its own.

    The inherited stderr is shared with the owner, so it must not be made non-blocking; and POLLOUT promises nothing
    where others write to the same pipe or the terminal has room for a few bytes only. A thread may simply block.
    """

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._wake = _locked()
        self._done = _locked()
        self._pending = bytearray()
        self._dropped = 0
        self._in_line = False
        self._closing = False
        self._broken = False
        _thread.start_new_thread(self._run, ())

    def put(self, data: bytes) -> None:
        """Copy this, unless the reader is too far behind. Never blocks."""
        with self._lock:
            if self._broken:
                return
            self._pending += data
            excess = len(self._pending) - PENDING_SIZE
            if excess > 0:
                cut = self._pending.find(b"\n", excess - 1) + 1 or excess
                del self._pending[:cut]
                self._dropped += cut
        self._notify()

    def finish(self, seconds: float) -> None:
        """Wait until all is written, no longer than this."""
        self._closing = True
        self._notify()
        self._done.acquire(timeout=max(seconds, 0.0))

    def _notify(self) -> None:
        if self._wake.locked():  # only this thread releases it, only the other one takes it
            self._wake.release()

    def _run(self) -> None:
        try:
            while True:
                self._wake.acquire()
                closing = self._closing  # asked before the last look at what is pending
                while chunk := self._take():
                    _write(2, chunk)
                    self._in_line = not chunk.endswith(b"\n")
                if closing:
                    return
        except OSError:  # closed, or a terminal that has gone: nobody reads any more
            with self._lock:
                self._broken = True
                self._pending.clear()
        finally:
            self._done.release()

    def _take(self) -> bytes:
        """The next bytes to write: whole lines if there are any, so that those of several engines do not mix."""
        with self._lock:
            if self._dropped:
                marker = b"[outboard: %d bytes of engine stderr not shown]\n" % self._dropped
                self._dropped = 0
                return b"\n" + marker if self._in_line else marker
            end = self._pending.rfind(b"\n", 0, PIPE_BUF) + 1 or PIPE_BUF
            chunk = bytes(self._pending[:end])
            del self._pending[:end]
            return chunk


class EngineOutput:
    """What the engine writes to stdout and stderr: copied on, and its end kept on the report page."""

    def __init__(self, source: int, report_fd: int) -> None:
        self.source = source
        self.open = True
        self._report_fd = report_fd
        self._tail = bytearray()
        self._flush_at: float | None = None
        self._flushed = 0.0
        self._copier = Copier()

    def read(self) -> None:
        """Take what the pipe holds, after it was reported readable."""
        data = os.read(self.source, 64 << 10)
        if not data:
            self.open = False
            return
        self._copier.put(data)
        self._tail += data
        del self._tail[:-TAIL_SIZE]
        if self._flush_at is None:
            self._flush_at = max(time.monotonic(), self._flushed + FLUSH_INTERVAL)

    def timeout(self) -> float | None:
        """Milliseconds until `flush` has something to do; None: not before more is read."""
        return None if self._flush_at is None else max(self._flush_at - time.monotonic(), 0.0) * 1000

    def flush(self, at_once: bool = False) -> None:
        """Bring the tail on the report page up to date, a few times a second at most."""
        now = time.monotonic()
        if self._flush_at is not None and (at_once or now >= self._flush_at):
            self._flush_at = None
            self._flushed = now
            store(self._report_fd, number(len(self._tail)) + self._tail, TAIL_OFFSET)

    def finish(self) -> None:
        """Take the rest. Who could write is dead, so the pipe ends, unless it was handed out of the engine's tree."""
        deadline = time.monotonic() + REST_BOUND
        poller = select.poll()
        poller.register(self.source, select.POLLIN)
        while self.open and (left := deadline - time.monotonic()) > 0 and poller.poll(left * 1000):
            self.read()
        self.flush(at_once=True)
        self._copier.finish(deadline - time.monotonic())


def store(fd: int, data: bytes, offset: int) -> None:
    """Write to the report page, if there is memory for it: the engine is not to die of its own obituary."""
    try:
        os.pwrite(fd, data, offset)
    except OSError:
        pass


def load(fd: int, offset: int) -> int:
    """A number of the report page."""
    return int.from_bytes(os.pread(fd, NUMBER, offset), "little", signed=True)


def number(value: int) -> bytes:
    return value.to_bytes(NUMBER, "little", signed=True)


def _locked() -> _thread.LockType:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


def _write(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # the owner has made it non-blocking
            poller = select.poll()
            poller.register(fd, select.POLLOUT)
            poller.poll()
