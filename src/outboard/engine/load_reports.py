"""What an engine core tells a coordinator of its load. No IO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from outboard.dp.coordinator_state import LoadReport
from outboard.protocol.messages import SchedulerStats

__all__ = ["LoadReporter", "Mouth"]


class Mouth(Protocol):
    """By which the busy loop speaks to one incarnation of the coordinator. Never blocks."""

    coordinator: int

    def say(self, message: Any) -> bool:
        """False if it is not taken."""
        ...

    def close(self) -> None: ...


class LoadReporter:
    """Tells coordinators of load, where it changes and no more often than every 10 ms.

    Args:
        rank, incarnation: of this engine core.
    """

    INTERVAL = 0.010

    def __init__(self, rank: int, incarnation: int) -> None:
        self._rank = rank
        self._incarnation = incarnation
        self._sequence = 0
        self._last: LoadReport | None = None
        self._due = 0.0

    def joined(self) -> None:
        """There is a coordinator that knows nothing."""
        self._last = None
        self._due = 0.0

    def report(
        self, now: float, stats: SchedulerStats, by_client: Callable[[], dict[int, int]], mouth: Mouth
    ) -> float | None:
        """Reports this load, unless it is known; seconds after which to call again, or None: all is told."""
        if now < self._due:
            return self._due - now
        load = LoadReport(
            self._rank, self._incarnation, 0, stats.waiting, stats.running, stats.kv_cache_usage, by_client()
        )
        if load == self._last:
            return None
        self._due = now + self.INTERVAL
        if not mouth.say(msgspec.structs.replace(load, sequence=self._sequence + 1)):
            return self.INTERVAL
        self._last = load
        self._sequence += 1
        return None
