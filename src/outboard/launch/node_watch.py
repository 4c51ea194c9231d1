"""Reads the signs of life of an engine core on a node, for front ends that are elsewhere."""

from __future__ import annotations

import time

import psutil

from outboard.protocol.nodes import RankProgress, WatchRank
from outboard.protocol.progress import ProgressReader

__all__ = ["RankWatch"]

# From this share of a core on, a process that happens to sleep when it is looked at counts as running.
_BUSY = 0.5

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

    Raises:
        OSError, ValueError: it has no page that can be opened; it is dying just now.
    """

    def __init__(self, what: WatchRank) -> None:
        self._rank, self._incarnation, self._pid = what.rank, what.incarnation, what.pid
        self._page = ProgressReader(what.pid, what.progress_fd, 0)
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
        return RankProgress(self._rank, self._incarnation, page.steps, age, page.activity, taken, state, cpu)

    def close(self) -> None:
        """Releases the page. Idempotent."""
        self._page.close()

    def _cpu_seconds(self) -> float:
        try:
            times = psutil.Process(self._pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)
