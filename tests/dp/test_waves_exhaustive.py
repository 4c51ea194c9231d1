"""Every state that a small lockstep group can get into, by every order of events, faults included."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Hashable, Iterator

import pytest

from wave_model import Action, World


class Graph:
    """All states that are reachable when each event of `budget` happens at most so many times."""

    def __init__(self, world: World, **budget: int) -> None:
        self.forward: list[list[int]] = []  # by progress alone
        self.backward: list[list[int]] = []  # by progress and what is periodic
        self.at_rest: list[int] = []
        self._came_by: list[tuple[int, Action]] = []  # state and action that led to a state first
        self._index: dict[Hashable, int] = {}
        self._queue: deque[tuple[World, Counter[str]]] = deque()
        self._visit(world, Counter(budget), (-1, ()))
        number = -1
        while self._queue:
            number += 1
            self._expand(number, *self._queue.popleft())
        self.size = len(self._index)

    def _visit(self, world: World, left: Counter[str], came_by: tuple[int, Action]) -> int:
        key = (world.key(), tuple(left.values()))
        number = self._index.setdefault(key, len(self._index))
        if number == len(self.forward):
            self.forward.append([])
            self.backward.append([])
            self._came_by.append(came_by)
            self._queue.append((world, left))
        return number

    def _expand(self, number: int, world: World, left: Counter[str]) -> None:
        progress, periodic = list(world.progress()), list(world.periodic())
        if not progress and not periodic:
            self._perform(number, world, ("check_rest",))
            self.at_rest.append(number)
        for action in progress + periodic:
            target = self._visit(self._perform(number, world, action), left, (number, action))
            self.backward[target].append(number)
            if action in progress:
                self.forward[number].append(target)
        for action in self.events(world, left):
            after = self._perform(number, world, action)
            spent = left.copy()
            spent[action[0]] -= 1
            self._visit(after, spent, (number, action))

    def _perform(self, number: int, world: World, action: Action) -> World:
        after = world.clone()
        try:
            if action == ("check_rest",):
                after.check_rest()
            else:
                after.apply(action)
        except Exception as error:
            error.add_note(f"after {self.way_to(number)}, {action}")
            raise
        return after

    def way_to(self, number: int) -> str:
        """The actions that lead to a state."""
        actions = []
        while number > 0:
            number, action = self._came_by[number]
            actions.append(str(action))
        return ", ".join(reversed(actions))

    @staticmethod
    def events(world: World, left: Counter[str]) -> Iterator[Action]:
        ranks = range(world.size)
        for front_end in range(len(world.front_ends)):
            if left["request"]:
                yield from (("request", front_end, rank) for rank in ranks)
            if left["lose_notice"] and world.front_ends[front_end].notices:
                yield "lose_notice", front_end
            if left["lose_publication"] and world.front_ends[front_end].heard:
                yield "lose_publication", front_end
        if left["add"]:
            yield from (("add", 0, rank) for rank in ranks)
        if left["abort"]:
            yield from (("abort", 0, rank) for rank in ranks if world.ranks[rank].work)
        if left["notify"]:
            yield "notify", world.coordinator._wave
        for name in ("pause", "resume"):
            if left[name] and world.coordinator.paused == (name == "resume"):
                yield (name,)
        if left["restart_coordinator"]:
            yield from (("restart_coordinator", arriving) for arriving in (0b0000, 0b0011, 0b1100, 0b1111))
        if left["restart_group"]:
            yield "restart_group", world.size
        for name in ("rest", "shrink", "grow"):
            if left[name] and not world.resting:
                yield (name,)
        if left["let_go"] and world.resting and not any(rank.waves.group < world.group for rank in world.ranks):
            yield ("let_go",)

    def check_that_rest_is_reached(self) -> None:
        """From every state, with no more requests and faults, rest can be reached: no deadlock, nothing left behind."""
        reached = set(self.at_rest)
        stack = list(reached)
        while stack:
            for source in self.backward[stack.pop()]:
                if source not in reached:
                    reached.add(source)
                    stack.append(source)
        assert len(reached) == self.size

    def check_that_progress_ends(self) -> int:
        """Progress has no cycle, so that each order of it ends: no livelock. Returns the length of the longest."""
        incoming = [0] * self.size
        for targets in self.forward:
            for target in targets:
                incoming[target] += 1
        ready = [number for number in range(self.size) if not incoming[number]]
        depth = [0] * self.size
        sorted_ones = 0
        while ready:
            number = ready.pop()
            sorted_ones += 1
            for target in self.forward[number]:
                depth[target] = max(depth[target], depth[number] + 1)
                incoming[target] -= 1
                if not incoming[target]:
                    ready.append(target)
        assert sorted_ones == self.size
        return max(depth)


# Unhindered, they take 20 s together, and the slow one 40 s.
# Without coverage, which takes twice the time and tells nothing that other tests of the same parts do not.
pytestmark = [pytest.mark.timeout(180), pytest.mark.no_cover]

BLOCKING, NOT_BLOCKING = True, False


@pytest.fixture(autouse=True)
def _no_search_for_garbage() -> Iterator[None]:
    """A graph keeps all that it makes, and none of it is a cycle: to look for those takes half of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("size", "front_ends", "blocking", "budget"),
    [
        (2, 0, BLOCKING, {"add": 2, "notify": 1}),
        (2, 0, NOT_BLOCKING, {"add": 1, "notify": 1, "abort": 1}),
        (2, 0, BLOCKING, {"add": 1, "pause": 1, "resume": 1}),
        (2, 0, NOT_BLOCKING, {"add": 1, "pause": 1}),
        (2, 0, BLOCKING, {"add": 1, "restart_coordinator": 1}),
        (2, 0, NOT_BLOCKING, {"add": 1, "restart_coordinator": 1}),
        (2, 0, BLOCKING, {"pause": 1, "restart_coordinator": 1}),
        (2, 0, BLOCKING, {"add": 1, "restart_group": 1, "restart_coordinator": 1}),
        (2, 0, BLOCKING, {"rest": 1, "notify": 1}),
        (2, 0, NOT_BLOCKING, {"rest": 1, "pause": 1}),
        (2, 0, BLOCKING, {"rest": 1, "restart_coordinator": 1}),
        pytest.param(2, 0, BLOCKING, {"rest": 2, "let_go": 1}, marks=pytest.mark.slow),
        (2, 0, BLOCKING, {"shrink": 1, "add": 1}),
        (1, 0, BLOCKING, {"grow": 1, "notify": 1}),
        (1, 0, NOT_BLOCKING, {"add": 1, "pause": 1, "restart_group": 1, "rest": 1, "let_go": 1}),
        (1, 0, NOT_BLOCKING, {"add": 1, "pause": 1, "restart_group": 1, "restart_coordinator": 1}),
        (2, 0, NOT_BLOCKING, {"add": 1, "pause": 1, "restart_group": 1}),
        (2, 1, BLOCKING, {"request": 1}),
        (3, 0, BLOCKING, {"add": 1}),
        (3, 0, NOT_BLOCKING, {"add": 1}),
    ],
    ids=lambda value: "-".join(f"{name}{count}" for name, count in value.items()) if isinstance(value, dict) else None,
)
def test_every_order_of_events_comes_to_rest(
    size: int, front_ends: int, blocking: bool, budget: dict[str, int]
) -> None:
    """With no front end, requests come from nowhere and notices by surprise: that covers what any front end may do."""
    graph = Graph(World(size, front_ends, blocking=blocking), **budget)
    graph.check_that_rest_is_reached()
    assert graph.check_that_progress_ends() < 100
    assert graph.at_rest
