"""Notices that an engine core hangs: by its progress page, while something waits for it."""

from __future__ import annotations

import time

from outboard.launch.signs import Signs
from outboard.protocol.control import EngineProgress, EngineStatus, StallReport
from outboard.protocol.progress import BUSY

__all__ = ["PageStallWatch"]


class PageStallWatch:
    """A `StallWatch` of an engine core on this host. A blocked event loop of ours is no sign of anything.

    Two things are a hang: the busy loop is in a step, or a utility call, and has given no sign of life for too long;
    or it is in none, and messages that were sent to it are not taken.

    Args:
        status: of the engine core when it was ready.
        slot: this front end's place on its progress page.
        timeout: `FaultConfig.stall_timeout`, seconds.

    Raises:
        OSError, ValueError: it has no progress page that can be opened.
    """

    def __init__(self, status: EngineStatus, slot: int, timeout: float) -> None:
        assert status.pid is not None  # it is ready
        self._timeout = timeout
        self._signs = Signs(status.pid, status.progress_fd, status.stack_fd, status.stack_signal, slot)
        self._untaken: tuple[int, float] | None = None  # messages taken when some were first seen waiting, and when
        self._cpu: tuple[float, float] | None = None  # (when, CPU seconds) as suspicion arose

    @property
    def is_dead(self) -> bool:
        return self._signs.is_dead

    def note(self, news: EngineProgress) -> None:
        """Unused: its page tells more."""

    def age(self, sent: int) -> float:
        page = self._signs.page.read()
        now = time.monotonic()
        if page.activity == BUSY:
            self._untaken = None  # it takes them between two steps
            age = now - page.time / 1e9
        elif page.taken < sent:
            if self._untaken is None or self._untaken[0] != page.taken:
                self._untaken = (page.taken, now)
            age = now - self._untaken[1]
        else:
            self._untaken = None
            age = 0.0
        if age < self._timeout / 2:
            self._cpu = None
        elif self._cpu is None:
            self._cpu = (now, self._signs.cpu_seconds())
        return age

    def progress(self) -> tuple[int, float]:
        page = self._signs.page.read()
        return page.steps, max(0.0, time.monotonic() - page.time / 1e9)

    def ask_for_stack(self) -> None:
        self._signs.ask_for_stack()

    def report(self, sent: int) -> StallReport:
        cpu = 0.0
        if self._cpu is not None:
            since, before = self._cpu
            cpu = (self._signs.cpu_seconds() - before) / max(time.monotonic() - since, 1e-3)
        steps, process, stack = self._signs.page.read().steps, self._signs.process(cpu), self._signs.stack()
        return StallReport(self.age(sent), steps, process, cpu, stack)

    def close(self) -> None:
        self._signs.close()
