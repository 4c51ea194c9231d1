"""Reads the signs of life of an engine core on a node, for front ends that are elsewhere."""

from __future__ import annotations

import os
import signal
import time

import psutil

from outboard.protocol.nodes import RankProgress, WatchRank
from outboard.protocol.progress import BUSY, ProgressReader

__all__ = ["RankWatch"]

# From this share of a core on, a process that happens to sleep when it is looked at counts as running.
_BUSY = 0.5

# Bytes of a stack that are told.
_MOST_STACK = 64 << 10

_STATES = {
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "stopped",
    psutil.STATUS_DISK_SLEEP: "blocked",
    psutil.STATUS_ZOMBIE: "gone",
    psutil.STATUS_DEAD: "gone",
    psutil.STATUS_RUNNING: "running",
}


class RankWatch:
    """One engine core that is ready.

    Args:
        what: which one, and where its progress page is.
        stall_timeout: `FaultConfig.stall_timeout`. The stack of a step that takes half of that is told: whoever finds
            that it hangs has no time to ask.

    Raises:
        OSError, ValueError: it has no page that can be opened; it is dying just now.
    """

    def __init__(self, what: WatchRank, stall_timeout: float) -> None:
        self._rank, self._incarnation, self._pid = what.rank, what.incarnation, what.pid
        self._stack_signal = what.stack_signal
        self._stack_after = stall_timeout / 2
        self._stack_from = -1  # how long the file of stacks was when this step's was asked for; -1: it was not
        self._page = ProgressReader(what.pid, what.progress_fd, 0)
        self._pidfd = self._stack_fd = -1
        try:
            self._pidfd = os.pidfd_open(what.pid)
            self._stack_fd = os.open(f"/proc/{what.pid}/fd/{what.stack_fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise
        self._before = (time.monotonic(), self._cpu_seconds())

    def look(self) -> RankProgress:
        """How it goes on."""
        taken, page = self._page.taken(), self._page.read()
        age = max(0.0, time.monotonic() - page.time / 1e9)
        now, seconds = time.monotonic(), self._cpu_seconds()
        cpu = (seconds - self._before[1]) / max(now - self._before[0], 1e-3)
        self._before = now, seconds
        try:
            state = _STATES.get(psutil.Process(self._pid).status(), "running" if cpu > _BUSY else "sleeping")
        except psutil.Error:
            state = "gone"
        stack = self._stack(state) if page.activity == BUSY and age > self._stack_after else self._no_stack()
        return RankProgress(self._rank, self._incarnation, page.steps, age, page.activity, taken, state, cpu, stack)

    def close(self) -> None:
        """Releases what it holds. Idempotent."""
        self._page.close()
        for fd in (self._pidfd, self._stack_fd):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._stack_fd = -1

    def _stack(self, state: str) -> str:
        """The stack of a long step: asked for by the first call, there for the next."""
        try:
            if self._stack_from < 0:
                if state != "stopped":  # else the signal would wait, and hit it at work once it goes on
                    self._stack_from = os.fstat(self._stack_fd).st_size
                    signal.pidfd_send_signal(self._pidfd, self._stack_signal)
                return ""
            return os.pread(self._stack_fd, _MOST_STACK, self._stack_from).decode(errors="replace")
        except (OSError, ValueError):
            return ""

    def _no_stack(self) -> str:
        self._stack_from = -1
        return ""

    def _cpu_seconds(self) -> float:
        try:
            times = psutil.Process(self._pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)
