"""What a front end knows of the load of its ranks: its own requests exactly, those of others from time to time."""

from __future__ import annotations

from collections.abc import Iterable

from outboard.dp.coordinator_state import LoadReport, Publication

__all__ = ["LoadTable"]

# A KV cache is under pressure from here on; at 1 each waiting request counts for four, as in vLLM.
_KV_FREE = 0.5
_KV_WEIGHT = 6.0


class _Rank:
    """One rank; `position` in the table's columns, -1 while no request may go there."""

    __slots__ = ("included", "inflight", "kv", "penalty", "position", "reported", "version", "waiting")

    def __init__(self) -> None:
        self.position = -1
        self.inflight = 0  # own requests, sent and not ended
        self.forget()

    def forget(self) -> None:
        """Nothing is known of its load."""
        self.version = (-1, -1)
        self.reported = 0  # all requests, by its last report
        self.included = 0  # own ones among them
        self.waiting = 0
        self.kv = 0.0
        self.penalty = 0.0


class LoadTable:
    """Estimates how many requests each rank has, for policies to choose by.

    Own requests are counted as they are sent and end. The requests of others are known by reports only, which are late
    or missing, so a rank's estimate is the greater of

    * own requests in flight times `client_count`: as if all front ends did the same, which they do in a burst;
    * the last report, and what changed since: own requests that it did not include, again times `client_count`, less
      those that have ended.

    So neither a report from before a burst nor a missing one makes a front end forget what it sent. Where reports do
    not say whose requests they count, own ones in flight when a report arrives are taken as included. The only front
    end there is knows better than any report.

    A rank with requests waiting and its KV cache fuller than half, and than that of some other rank, is made to look
    busier: its queue drains slowly. Where all are equally full it tells nothing, and late news would be magnified.

    Args:
        ranks: those that may be chosen.
        client_index, client_count: this front end, and how many there are.

    Attributes:
        ranks: those that may be chosen, ascending.
        loads: at the same positions, their estimates; kept up to date; not to be changed.
        own: at the same positions, own requests in flight.
    """

    __slots__ = ("_entries", "_version", "_void", "client_count", "client_index", "loads", "own", "ranks")

    def __init__(self, ranks: Iterable[int] = (), *, client_index: int = 0, client_count: int = 1) -> None:
        if not 0 <= client_index < client_count:
            raise ValueError(f"client_index must be from 0 to {client_count - 1}, not {client_index}")
        self.client_index = client_index
        self.client_count = client_count
        self.ranks: tuple[int, ...] = ()
        self.loads: list[float] = []
        self.own: list[int] = []
        self._entries: dict[int, _Rank] = {}
        self._void: dict[int, int] = {}  # rank -> the last of its incarnations that has ended
        self._version = (-1, -1)
        self.set_available(ranks)

    def set_available(self, ranks: Iterable[int]) -> None:
        """Which ranks may be chosen from now on: neither dead nor leaving. Own requests on others still count there."""
        for entry in self._entries.values():
            entry.position = -1
        self.ranks = tuple(sorted(set(ranks)))
        self.loads = []
        self.own = []
        for position, rank in enumerate(self.ranks):
            entry = self._entries.setdefault(rank, _Rank())
            entry.position = position
            self.loads.append(self._estimate(entry))
            self.own.append(entry.inflight)
        self._entries = {rank: e for rank, e in self._entries.items() if e.position >= 0 or e.inflight}

    def sent(self, rank: int) -> None:
        """A request was sent to this rank. Each must end once, by `ended`, also where the rank died."""
        entry = self._entries.setdefault(rank, _Rank())
        entry.inflight += 1
        if entry.position >= 0:
            self._update(entry)

    def ended(self, rank: int) -> None:
        """A request ended, was aborted, failed, or moved to another rank."""
        entry = self._entries[rank]
        entry.inflight -= 1
        if entry.position >= 0:
            self._update(entry)
        elif not entry.inflight:
            del self._entries[rank]

    def in_flight(self, rank: int) -> int:
        """Own requests on this rank."""
        entry = self._entries.get(rank)
        return entry.inflight if entry is not None else 0

    def published(self, publication: Publication) -> bool:
        """A coordinator published loads. Returns whether it is news; late and repeated ones are void."""
        if publication.version <= self._version:
            return False
        self._version = publication.version
        for report in publication.loads:
            entry = self._entries.get(report.rank)
            ended = report.version[0] <= self._void.get(report.rank, -1)
            if entry is not None and report.version > entry.version and not ended:
                self._take(entry, report)
        entries = [self._entries[rank] for rank in self.ranks]
        full = max(_KV_FREE, min((entry.kv for entry in entries), default=0.0))
        for entry in entries:
            entry.penalty = _KV_WEIGHT * entry.waiting * max(0.0, entry.kv - full)
            self._update(entry)
        return True

    def _take(self, entry: _Rank, report: LoadReport) -> None:
        total = report.waiting + report.running
        entry.version = report.version
        entry.reported = total
        entry.waiting = report.waiting
        entry.kv = report.kv_cache_usage
        if self.client_count == 1:
            entry.included = total
        elif report.by_client:
            entry.included = report.by_client.get(self.client_index, 0)
        else:
            entry.included = min(entry.inflight, total)

    def forget(self, rank: int, incarnation: int = -1) -> None:
        """This rank's reports up to this incarnation are void: it has ended. Own requests are not touched.

        What a coordinator publishes may be behind that news, also where the rank leaves and comes again.
        """
        self._void[rank] = max(incarnation, self._void.get(rank, -1))
        entry = self._entries.get(rank)
        if entry is not None:
            entry.forget()
            if entry.position >= 0:
                self._update(entry)

    def _update(self, entry: _Rank) -> None:
        position = entry.position
        self.own[position] = entry.inflight
        self.loads[position] = self._estimate(entry)

    def _estimate(self, entry: _Rank) -> float:
        own = entry.inflight
        change = own - entry.included
        seen = entry.reported + (change * self.client_count if change > 0 else change)
        floor = own * self.client_count
        return (seen if seen > floor else floor) + entry.penalty
