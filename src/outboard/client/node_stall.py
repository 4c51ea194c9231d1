"""Notices that an engine core on a node hangs: by what its node tells of it, while something waits for it."""

from __future__ import annotations

import time

from outboard.protocol.control import EngineProgress, EngineStatus, StallReport
from outboard.protocol.progress import BUSY

__all__ = ["NodeStallWatch"]


class NodeStallWatch:
    """As `StallWatch`, for an engine core whose progress page and process are on another host.

    News that does not come is no stall: whether the node is there is its head's business.

    Args:
        status: of the engine core when it was ready.
        slot: unused: the head tells each front end of its own messages.
        timeout: `FaultConfig.stall_timeout`, seconds.

    Attributes:
        is_dead: never known here.
    """

    def __init__(self, status: EngineStatus, slot: int, timeout: float) -> None:
        self._incarnation = status.incarnation
        self._news: EngineProgress | None = None
        self._untaken: tuple[int, float] | None = None  # messages taken when some were first seen waiting, and when
        self.is_dead = False

    def note(self, news: EngineProgress) -> None:
        """The head tells how it goes on."""
        if news.incarnation == self._incarnation:
            self._news = news

    def age(self, sent: int) -> float:
        """See `StallWatch.age`."""
        news = self._news
        if news is None:
            return 0.0
        if news.activity == BUSY:
            self._untaken = None
            return news.age
        if news.taken >= sent:
            self._untaken = None
            return 0.0
        now = time.monotonic()
        if self._untaken is None or self._untaken[0] != news.taken:
            self._untaken = (news.taken, now)
        return now - self._untaken[1]

    def progress(self) -> tuple[int, float]:
        """See `StallWatch.progress`."""
        return (self._news.steps, self._news.age) if self._news is not None else (0, 0.0)

    def ask_for_stack(self) -> None:
        """There is no way to ask."""

    def report(self, sent: int) -> StallReport:
        """See `StallWatch.report`; with no stack."""
        steps, _ = self.progress()
        process, cpu = (self._news.process, self._news.cpu) if self._news is not None else ("sleeping", 0.0)
        return StallReport(self.age(sent), steps, process, cpu)

    def close(self) -> None:
        """Nothing is held."""
