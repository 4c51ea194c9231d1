"""Starts ranks in a Ray cluster: a place for each, a node in it, the engine core there.

    asked --room--> placed --all new ranks have room--> joining --its node has joined--> joined
      any --lost, or not wanted any more--> gone

Room comes first: no engine core loads before all ranks that come together have room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from outboard.config import RayPlacement
from outboard.errors import EngineStartupError, NoRoomError
from outboard.launch.placement import Room
from outboard.launch.rank_process import NoRoom, RankProcess, RankStarter, Unplaceable
from outboard.launch.ray.facts import describe
from outboard.launch.ray.news import PlaceLost, PlaceMade, PlaceNews, PlacePending

__all__ = ["Nodes", "Places", "RayStarter"]

# A place that was lost before its node had joined is asked for again after so long, seconds, each time twice.
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_NOT_YET = "Ray has not placed it yet"


class Places(Protocol):
    """See `RayPlaces`."""

    fd: int

    def ask(self, number: int) -> None: ...
    def start(self, number: int) -> None: ...
    def drop(self, number: int) -> None: ...
    def news(self) -> list[PlaceNews]: ...
    def close(self) -> None: ...


class Nodes(Protocol):
    """See `NodeDesk`."""

    def rooms(self) -> list[Room]: ...
    def start(self, node_id: str, rank: int, incarnation: int, env: Mapping[str, str]) -> RankProcess: ...
    def lose(self, name: str, what: str, word: str) -> None: ...


class _State(Enum):
    ASKED = "waits for room"
    PLACED = "has room"
    JOINING = "its node is being started"
    JOINED = "has a node"
    FAILED = "cannot be had"


@dataclass(slots=True)
class _Place:
    number: int
    since: float  # when it was asked for
    state: _State = _State.ASKED
    name: str = ""  # of the node
    why: str = ""
    error: type[EngineStartupError] = EngineStartupError


class RayStarter(RankStarter):
    """Belongs to the launcher's thread.

    Args:
        placement: what a rank takes.
        places: become its own.
        nodes: the desk where nodes join.
        clock: the time, seconds.
    """

    def __init__(
        self, placement: RayPlacement, places: Places, nodes: Nodes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._placement = placement
        self._places = places
        self._nodes = nodes
        self._clock = clock
        self._by_rank: dict[int, _Place] = {}
        self._old: set[int] = set()  # ranks that have been started once, and so do not wait for others
        self._pauses: dict[int, tuple[float, float]] = {}  # rank -> until when, and how long, it asks for no place
        self._next_number = 0
        self.fd = places.fd

    def start(self, rank: int, incarnation: int, env: Mapping[str, str]) -> RankProcess:
        """See `RankStarter`."""
        place = self._by_rank.get(rank) or self._ask(rank)
        if place.state is _State.ASKED:
            self._look_at_time(rank, place)
        if place.state is _State.FAILED:
            del self._by_rank[rank]
            raise Unplaceable(place.why, place.error)
        if place.state is _State.PLACED:
            self._look_at_others(rank)
            self._places.start(place.number)
            place.state = _State.JOINING
        room = next((room for room in self._nodes.rooms() if room.name == place.name), None)
        if place.state is _State.ASKED or room is None or not room.free:
            raise NoRoom(self._why(rank, place), on_its_way=place.state is _State.JOINING or not place.why)
        place.state = _State.JOINED
        self._old.add(rank)
        self._pauses.pop(rank, None)
        return self._nodes.start(room.node_id, rank, incarnation, env)

    def look(self, ranks: Collection[int]) -> None:
        """See `RankStarter`."""
        for news in self._places.news():
            self._take(news)
        names = {room.name for room in self._nodes.rooms()}
        for rank, place in list(self._by_rank.items()):
            # A node that was silent for too long has been given up, whatever Ray thinks of it.
            if rank not in ranks or (place.state is _State.JOINED and place.name not in names):
                self._drop(rank)
        self._old.intersection_update(ranks)

    def close(self) -> None:
        """See `RankStarter`."""
        self._by_rank.clear()
        self.fd = -1
        self._places.close()

    # --- places ---

    def _ask(self, rank: int) -> _Place:
        now = self._clock()
        until, _ = self._pauses.get(rank, (now, 0.0))
        if now < until:
            raise NoRoom(f"no room: rank {rank} has lost its place, and asks Ray for another one in a moment")
        place = self._by_rank[rank] = _Place(self._next_number, now)
        self._next_number += 1
        self._places.ask(place.number)
        return place

    def _drop(self, rank: int) -> None:
        place = self._by_rank.pop(rank)
        if place.state is not _State.FAILED:
            self._places.drop(place.number)

    def _take(self, news: PlaceNews) -> None:
        rank, place = next(
            ((rank, place) for rank, place in self._by_rank.items() if place.number == news.number), (-1, None)
        )
        if place is None:
            return
        match news:
            case PlacePending():
                place.why = news.why
            case PlaceMade():
                place.name = news.name
                if place.state is _State.ASKED:
                    place.state = _State.PLACED
            case PlaceLost():
                self._lost(rank, place, news)

    def _lost(self, rank: int, place: _Place, news: PlaceLost) -> None:
        self._nodes.lose(place.name, news.what, news.word)
        if place.state is not _State.JOINED and rank not in self._old:
            what = f"its node {place.name}" if place.name else "its place"
            place.state, place.why = _State.FAILED, f"{what} in the Ray cluster {news.what}"
            return
        del self._by_rank[rank]
        if place.state is not _State.JOINED:
            pause = min(max(self._pauses.get(rank, (0.0, 0.0))[1] * 2, _FIRST_PAUSE), _LONGEST_PAUSE)
            self._pauses[rank] = (self._clock() + pause, pause)

    def _look_at_time(self, rank: int, place: _Place) -> None:
        """A rank that is new waits no longer than it may."""
        if rank not in self._old and self._clock() - place.since >= self._placement.timeout:
            seconds = f"within {self._placement.timeout:g} s"
            self._places.drop(place.number)
            place.state, place.error = _State.FAILED, NoRoomError
            place.why = f"no room in the Ray cluster {seconds} for {describe(self._placement)}: {place.why or _NOT_YET}"

    def _look_at_others(self, rank: int) -> None:
        """Raises `NoRoom` while another new rank has none, where this one is new too."""
        if rank in self._old:
            return
        waiting = [
            other
            for other, place in self._by_rank.items()
            if other not in self._old and place.state is _State.ASKED and other != rank
        ]
        if waiting:
            place = self._by_rank[waiting[0]]
            raise NoRoom(
                f"rank {rank} has room, and waits for the others. {self._why(waiting[0], place)}", on_its_way=True
            )

    def _why(self, rank: int, place: _Place) -> str:
        if place.state is _State.ASKED:
            why = place.why or _NOT_YET
            return f"no room: rank {rank} waits for {describe(self._placement)} in the Ray cluster: {why}"
        return f"rank {rank} waits for its node {place.name}, which Ray starts"
