"""Notices that an engine core on a node hangs: by what its node tells of it, while something waits for it."""

from __future__ import annotations

import time

from outboard.protocol.control import EngineProgress, EngineStatus, StallReport
from outboard.protocol.progress import BUSY

__all__ = ["NewsStallWatch"]


class NewsStallWatch:
    """A `StallWatch` of an engine core whose progress page and process are on another host.

    News that does not come is no stall: whether the node is there is its head's business.

    Args:
        status: of the engine core when it was ready.
    """

    def __init__(self, status: EngineStatus) -> None:
        self._incarnation = status.incarnation
        self._news: EngineProgress | None = None
        self._untaken: tuple[int, float] | None = None  # messages taken when some were first seen waiting, and when

    @property
    def is_dead(self) -> bool:
        """False: it is never known here."""
        return False

    def note(self, news: EngineProgress) -> None:
        if news.incarnation == self._incarnation:
            self._news = news

    def age(self, sent: int) -> float:
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
        return (self._news.steps, self._news.age) if self._news is not None else (0, 0.0)

    def ask_for_stack(self) -> None:
        """There is no way to ask."""

    def report(self, sent: int) -> StallReport:
        """With no stack."""
        steps, _ = self.progress()
        process, cpu = (self._news.process, self._news.cpu) if self._news is not None else ("sleeping", 0.0)
        return StallReport(self.age(sent), steps, process, cpu)

    def close(self) -> None:
        """Nothing is held."""
