"""The coordinator's side of load: gathers what ranks report, and decides when to publish it to the front ends."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import msgspec

from outboard.dp.waves import WaveState

__all__ = ["LoadBoard", "LoadReport", "Publication"]

# A smaller change of the share of a KV cache in use is not worth a publication.
_KV_STEP = 0.01


class LoadReport(msgspec.Struct, array_like=True, tag="load_report", frozen=True, gc=False):
    """Load of one rank, as it saw it.

    Attributes:
        incarnation: of that rank.
        sequence: counts the reports of that incarnation; one that is not above the last is void.
        waiting: requests not yet scheduled.
        running: requests being worked on.
        kv_cache_usage: share of the KV cache in use, 0 to 1.
        by_client: how many of the waiting and running requests each front end sent, by `client_index`; empty where the
            rank does not count. With it a front end knows exactly which of its own requests the report includes.
    """

    rank: int
    incarnation: int
    sequence: int
    waiting: int
    running: int
    kv_cache_usage: float = 0.0
    by_client: dict[int, int] = {}

    @property
    def version(self) -> tuple[int, int]:
        """Orders the reports of one rank."""
        return self.incarnation, self.sequence


class Publication(msgspec.Struct, array_like=True, tag="publication", frozen=True):
    """All that a coordinator tells front ends; complete each time, so that a lost one only makes the next one news.

    Attributes:
        coordinator: its incarnation.
        sequence: counts its publications.
        members: version of the membership.
        loads: the latest report of each member that has reported.
        wave: of a lockstep group, once the coordinator knows.
    """

    coordinator: int
    sequence: int
    members: int
    loads: list[LoadReport]
    wave: WaveState | None = None

    @property
    def version(self) -> tuple[int, int]:
        """Orders publications, those of restarted coordinators included."""
        return self.coordinator, self.sequence


class LoadBoard:
    """The latest load of every rank, and when to publish it. Times are in seconds of any one clock.

    A change is published at once, unless something was published less than `busy_interval` ago: then when that is
    over. With no change all is published again after `idle_interval`, for front ends that came late or missed one.

    Args:
        coordinator: incarnation of the coordinator.
    """

    def __init__(self, coordinator: int = 0, *, busy_interval: float = 0.1, idle_interval: float = 5.0) -> None:
        if not 0 <= busy_interval <= idle_interval:
            raise ValueError(f"0 <= busy_interval <= idle_interval must hold, not {busy_interval}, {idle_interval}")
        self._coordinator = coordinator
        self._busy_interval = busy_interval
        self._idle_interval = idle_interval
        self._incarnations: dict[int, int] = {}
        self._members = 0
        self._loads: dict[int, LoadReport] = {}
        self._published: dict[int, LoadReport] = {}
        self._wave: WaveState | None = None
        self._changed = False
        self._published_at = -inf
        self._sequence = 0
        self._size: float = inf

    @property
    def members(self) -> int:
        """Version of the membership."""
        return self._members

    @property
    def loads(self) -> dict[int, LoadReport]:
        """The latest report of each member that has reported, by rank; not to be changed."""
        return self._loads

    @property
    def next_due(self) -> float:
        """When to call `publish`; minus infinity: now. Any other call may bring it forward."""
        return self._published_at + (self._busy_interval if self._changed else self._idle_interval)

    def set_members(self, version: int, incarnations: Mapping[int, int]) -> None:
        """Which ranks there are, and in which incarnation. Reports of others are void, those that went are forgotten.

        Args:
            version: rises with each change; an older one is void.
        """
        if version < self._members:
            return
        if self._incarnations != incarnations or self._members != version:
            self._changed = True
        self._members = version
        self._incarnations = dict(incarnations)
        self._loads = {rank: load for rank, load in self._loads.items() if load.incarnation == incarnations.get(rank)}

    def set_size(self, size: int) -> None:
        """Ranks from this on get no more requests: their load is published no more."""
        self._size = size
        self._changed = True

    def report(self, report: LoadReport) -> bool:
        """A rank reported its load. Returns whether it is news; late and repeated ones are not."""
        if self._incarnations.get(report.rank) != report.incarnation:
            return False
        last = self._loads.get(report.rank)
        if last is not None and report.sequence <= last.sequence:
            return False
        self._loads[report.rank] = report
        self._changed |= _differ(report, self._published.get(report.rank))
        return True

    def set_wave(self, wave: WaveState | None) -> None:
        """The wave's state, whenever it may have changed."""
        self._changed |= wave != self._wave
        self._wave = wave

    def publish(self, now: float) -> Publication | None:
        """What to send to every front end now; None: nothing is due before `next_due`."""
        if now < self.next_due:
            return None
        self._published = dict(self._loads)
        self._published_at = now
        self._changed = False
        self._sequence += 1
        loads = [self._loads[rank] for rank in sorted(self._loads) if rank < self._size]
        return Publication(self._coordinator, self._sequence, self._members, loads, self._wave)


def _differ(load: LoadReport, published: LoadReport | None) -> bool:
    if published is None or load.incarnation != published.incarnation:
        return True
    return (load.waiting, load.running) != (published.waiting, published.running) or abs(
        load.kv_cache_usage - published.kv_cache_usage
    ) >= _KV_STEP
