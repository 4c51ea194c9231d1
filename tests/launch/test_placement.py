"""Which node a rank goes to."""

from __future__ import annotations

from typing import Any

import pytest

from outboard.launch.placement import PlacedStarter, Placement, Room
from outboard.launch.rank_process import NoRoom


def room(name: str, places: int, taken: int = 0, leaving: bool = False) -> Room:
    return Room(f"id-{name}", name, places, taken, leaving)


def test_the_first_ranks_are_local() -> None:
    placement = Placement(2)
    assert [placement.is_local(rank) for rank in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("rooms", "chosen"),
    [
        ([], None),
        ([room("a", 1)], "a"),
        ([room("a", 1, 1)], None),
        ([room("a", 2, 1), room("b", 2)], "b"),
        ([room("a", 2), room("b", 2)], "a"),  # which joined first
        ([room("a", 4, 2), room("b", 2, 1), room("c", 8, 3)], "c"),  # the smallest part is taken
        ([room("a", 2, leaving=True), room("b", 2, 1)], "b"),
        ([room("a", 2, leaving=True)], None),
        ([room("a", 1, 3)], None),
    ],
)
def test_ranks_spread(rooms: list[Room], chosen: str | None) -> None:
    found = Placement(0).choose(rooms)
    assert (found.name if found is not None else None) == chosen


def test_six_ranks_on_three_nodes_are_two_each() -> None:
    taken = dict.fromkeys("abc", 0)
    for _ in range(6):
        found = Placement(0).choose([room(name, 4, count) for name, count in taken.items()])
        assert found is not None
        taken[found.name] += 1
    assert set(taken.values()) == {2}


def test_no_room_names_those_that_there_are() -> None:
    assert "no node has joined" in Placement(0).no_room(3, [])
    text = Placement(0).no_room(3, [room("a", 2, 2), room("b", 1, leaving=True)])
    assert text.startswith("no room: rank 3 is to run on a node")
    assert "a (2 of 2 places taken), b (leaving)" in text


class _Local:
    def start(self, rank: int, incarnation: int, env: Any) -> Any:
        return "local", rank, incarnation, env


def test_the_starter_goes_by_the_placement() -> None:
    rooms: list[Room] = []
    starter = PlacedStarter(Placement(1), _Local(), lambda: rooms, lambda *what: what)  # type: ignore[arg-type,return-value]
    assert starter.start(0, 4, {}) == ("local", 0, 4, {})
    with pytest.raises(NoRoom, match="rank 1"):
        starter.start(1, 0, {})
    rooms.append(room("a", 1))
    assert starter.start(1, 0, {"X": "1"}) == ("id-a", 1, 0, {"X": "1"})


def test_a_node_that_was_not_heard_since_its_hello_gets_none() -> None:
    joining = Room("a", "far", 2, 0, joining=True)
    assert Placement(0).choose([joining]) is None
    assert "far (joining)" in Placement(0).no_room(0, [joining])
