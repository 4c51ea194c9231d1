"""Reads the signs of life of an engine core on a node, for front ends that are elsewhere."""

from __future__ import annotations

import time

from outboard.launch.signs import Signs
from outboard.protocol.nodes import RankProgress, WatchRank
from outboard.protocol.progress import BUSY

__all__ = ["RankWatch"]


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
        self._rank, self._incarnation = what.rank, what.incarnation
        self._stack_after = stall_timeout / 2
        self._asked = False  # for the stack of this step
        self._signs = Signs(what.pid, what.progress_fd, what.stack_fd, what.stack_signal, 0)
        self._before = (time.monotonic(), self._signs.cpu_seconds())

    def look(self) -> RankProgress:
        """How it goes on."""
        signs = self._signs
        taken, page = signs.page.taken(), signs.page.read()
        age = max(0.0, time.monotonic() - page.time / 1e9)
        now, seconds = time.monotonic(), signs.cpu_seconds()
        cpu = (seconds - self._before[1]) / max(now - self._before[0], 1e-3)
        self._before = now, seconds
        stack = ""
        if page.activity != BUSY or age <= self._stack_after:
            self._asked = False
        elif self._asked:  # by an earlier look
            stack = signs.stack()
        else:
            self._asked = signs.ask_for_stack()
        process = signs.process(cpu)
        return RankProgress(self._rank, self._incarnation, page.steps, age, page.activity, taken, process, cpu, stack)

    def close(self) -> None:
        """Releases what it holds. Idempotent."""
        self._signs.close()
