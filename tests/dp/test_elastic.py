"""The plan of a change of size, over orders of events and faults, in a world without processes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outboard.dp.elastic import ScalePlan
from outboard.dp.elastic_steps import (
    Action,
    Announce,
    Drain,
    Facts,
    Kill,
    Quiesce,
    Reconfigure,
    Resume,
    Start,
    Stop,
)
from outboard.protocol.scaling import (
    ScaleState,
)

TIMEOUT, DRAIN = 10.0, 5.0


class World:
    """Ranks that do as they are told, once they are let; and what can happen to them."""

    def __init__(self, old: int, new: int, *, lockstep: bool, commit: bool = True) -> None:
        self.now = 0.0
        self.old, self.new, self.lockstep = old, new, lockstep
        self.plan = ScalePlan(old, new, lockstep=lockstep, timeout=TIMEOUT, drain=DRAIN, commit=commit)
        self.members = old
        self.ready = set(range(old))
        self.starting: set[int] = set()
        self.ending: set[int] = set()
        self.ended: set[int] = set()
        self.asked: dict[str, set[int]] = {"quiet": set(), "drained": set(), "reconfigured": set()}
        self.said: dict[str, set[int]] = {"quiet": set(), "drained": set(), "reconfigured": set()}
        self.refused: dict[int, str] = {}
        self.size_of = dict.fromkeys(range(old), old)  # the size that each rank of a group believes in
        self.resting: set[int] = set()
        self.group = set(range(old))
        self.connected = self.acknowledged = self.fallen = False
        self.started = False
        self.log: list[Action] = []

    def facts(self) -> Facts:
        return Facts(
            ready=frozenset(self.ready),
            ended=frozenset(self.ended if self.started else self.ended | set(range(self.old, self.new))),
            connected=self.connected,
            acknowledged=self.acknowledged,
            fallen=self.fallen,
            quiet=frozenset(self.said["quiet"]),
            drained=frozenset(self.said["drained"]),
            reconfigured=frozenset(self.said["reconfigured"]),
            refused=self.refused,
        )

    def run(self) -> None:
        for _ in range(50):
            actions = self.plan.advance(self.facts(), self.now)
            if actions is None or (not actions and self.plan.over):
                return
            for action in actions:
                self.do(action)
        raise AssertionError(f"it goes round and round: {self.log}")

    def do(self, action: Action) -> None:
        self.log.append(action)
        match action:
            case Start(ranks):
                self.started = True
                self.starting |= set(ranks)
            case Announce(size):
                self.members = size
                self.group |= set(range(size))
                self.acknowledged = False
                for rank in set(range(size, self.old)) - self.ready:
                    self.end(rank)
            case Drain(ranks):
                self.fallen = False
                self.ask("drained", ranks)
            case Quiesce(ranks):
                self.fallen = False
                self.ask("quiet", ranks)
            case Reconfigure(ranks, size):
                assert not self.lockstep or self.resting.issuperset(set(ranks) & set(range(min(self.old, size))))
                self.refused = {}
                self.asked["quiet"] = set()
                self.group &= set(range(size))
                self.ask("reconfigured", ranks)
                for rank in ranks:
                    self.size_of[rank] = size
            case Resume(ranks):
                self.resting -= set(ranks)
                self.asked["quiet"] = set()
                assert len({self.size_of[rank] for rank in ranks}) == 1
            case Stop(ranks):
                self.ending |= set(ranks) & (self.ready | self.starting)
            case Kill(ranks, reason):
                assert reason
                for rank in ranks:
                    if rank in self.ready | self.starting:
                        self.ending.add(rank)

    def ask(self, what: str, ranks: range) -> None:
        self.asked[what] = set(ranks) & self.ready
        self.said[what] = set()

    def answer(self, what: str, rank: int) -> None:
        if rank in self.asked[what] and rank in self.ready:
            self.said[what].add(rank)
            if what == "quiet":
                self.resting.add(rank)

    def end(self, rank: int) -> None:
        """A process has ended. Members are started again, ranks that come or leave are not."""
        self.ready.discard(rank)
        self.starting.discard(rank)
        self.ending.discard(rank)
        if rank >= self.members:
            self.ended.add(rank)
        if self.lockstep and rank in self.group:
            self.fallen = True
            self.resting = set()
            self.asked = {what: set() for what in self.asked}
            for other in self.group:
                self.size_of[other] = self.members
                self.ready.discard(other)
                self.ending.discard(other)
                if other >= self.members:
                    self.ended.add(other)

    def settle(self) -> None:
        """All that can go well does, in order."""
        for _ in range(40):
            self.run()
            if self.plan.over:
                return
            for rank in list(self.starting):
                self.starting.discard(rank)
                self.ready.add(rank)
            for rank in list(self.ending):
                self.end(rank)
            self.ready |= set(range(self.members)) - self.starting
            self.connected = self.acknowledged = True
            for what, ranks in self.asked.items():
                for rank in ranks:
                    self.answer(what, rank)
        raise AssertionError(f"it does not end: {self.plan.state}, {self.log}")


def kinds(world: World) -> list[str]:
    return [type(action).__name__ for action in world.log]


@pytest.mark.parametrize(
    ("old", "new", "lockstep", "order"),
    [
        (2, 4, False, ["Start", "Reconfigure", "Announce"]),
        (1, 3, True, ["Start", "Quiesce", "Reconfigure", "Announce", "Resume"]),
        (4, 1, False, ["Announce", "Drain", "Stop", "Reconfigure"]),
        (3, 2, True, ["Announce", "Drain", "Quiesce", "Stop", "Reconfigure", "Resume"]),
    ],
)
def test_the_order(old: int, new: int, lockstep: bool, order: list[str]) -> None:
    world = World(old, new, lockstep=lockstep)
    world.settle()
    assert kinds(world) == order
    assert world.plan.state is ScaleState.DONE
    assert world.plan.reason == ""
    assert world.members == new


def test_it_waits_for_the_commit() -> None:
    world = World(1, 2, lockstep=False, commit=False)
    world.run()
    world.starting.clear()
    world.ready.add(1)
    world.connected = True
    world.run()
    assert world.plan.state is ScaleState.READY
    world.now += 1000
    world.run()
    assert world.plan.state is ScaleState.READY
    world.plan.commit()
    world.settle()
    assert world.plan.state is ScaleState.DONE


def test_what_does_not_get_ready_in_time_is_named() -> None:
    world = World(1, 3, lockstep=False)
    world.run()
    world.starting.discard(1)
    world.ready.add(1)
    world.now += TIMEOUT
    world.settle()
    assert world.plan.state is ScaleState.ROLLED_BACK
    assert "rank 2 was not ready within 10 s" in world.plan.reason
    assert world.members == 1
    assert world.ended == {1, 2}


def test_a_group_that_has_been_told_of_a_new_size_is_told_of_the_old_one() -> None:
    world = World(2, 3, lockstep=True)
    world.run()
    world.starting.clear()
    world.ready.add(2)
    world.connected = True
    world.run()
    for rank in (0, 1):
        world.answer("quiet", rank)
    world.run()
    assert kinds(world)[-1] == "Reconfigure"
    world.end(2)
    world.settle()
    assert kinds(world)[-3:] == ["Kill", "Reconfigure", "Resume"]
    assert world.plan.state is ScaleState.ROLLED_BACK
    assert set(world.size_of[rank] for rank in (0, 1)) == {2}


def test_ranks_that_do_not_get_empty_are_ended() -> None:
    world = World(3, 1, lockstep=False)
    world.run()
    world.answer("drained", 1)
    world.now += DRAIN
    world.settle()
    kills = [action for action in world.log if isinstance(action, Kill)]
    assert [list(kill.ranks) for kill in kills] == [[2]]
    assert world.plan.state is ScaleState.DONE
    assert "rank 2 had not ended its requests within 5 s" in world.plan.reason


def test_a_group_is_not_cut_in_the_middle_of_a_step() -> None:
    world = World(3, 1, lockstep=True)
    world.run()
    world.now += DRAIN
    world.run()
    world.asked["drained"] = set()
    world.settle()
    assert kinds(world) == ["Announce", "Drain", "Quiesce", "Kill", "Kill", "Stop", "Reconfigure", "Resume"]


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 1)])
def test_taken_back_before_it_has_begun(old: int, new: int) -> None:
    world = World(old, new, lockstep=False)
    world.plan.abort("no more wanted")
    world.settle()
    assert world.log == []
    assert world.plan.state is ScaleState.ROLLED_BACK


def test_too_late_to_go_back() -> None:
    world = World(2, 1, lockstep=False)
    world.run()
    world.plan.abort("no more wanted")
    world.settle()
    assert world.plan.state is ScaleState.DONE
    assert world.plan.reason == ""


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2)])
def test_a_rank_that_starts_again_meanwhile_is_not_waited_for(old: int, new: int) -> None:
    world = World(old, new, lockstep=False)
    world.connected = True
    world.end(0)
    world.run()
    if world.starting:
        world.starting.clear()
        world.ready.add(2)
    world.answer("drained", 2)
    world.run()
    assert kinds(world)[-1] == "Reconfigure"
    world.ready.add(0)  # it was not there to be told
    world.settle()
    assert world.plan.state is ScaleState.DONE
    assert "rank 0 was not ready, and so not told" in world.plan.reason


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(lambda sizes: sizes[0] != sizes[1])


class Course(RuleBasedStateMachine):
    """Whatever happens in whatever order, it ends in the old or in the new size, and all that counts agree on which."""

    world: World

    @initialize(sizes=SIZES, lockstep=st.booleans(), commit=st.booleans())
    def begin(self, sizes: tuple[int, int], lockstep: bool, commit: bool) -> None:
        self.world = World(*sizes, lockstep=lockstep, commit=commit)
        self.world.run()

    @rule(data=st.data())
    def a_rank_gets_ready(self, data: Any) -> None:
        if self.world.starting:
            rank = data.draw(st.sampled_from(sorted(self.world.starting)))
            self.world.starting.discard(rank)
            self.world.ready.add(rank)
            self.world.run()

    @rule(data=st.data(), what=st.sampled_from(["quiet", "drained", "reconfigured"]))
    def a_rank_answers(self, data: Any, what: str) -> None:
        if self.world.asked[what]:
            self.world.answer(what, data.draw(st.sampled_from(sorted(self.world.asked[what]))))
            self.world.run()

    @rule(data=st.data())
    def a_rank_cannot_be_reconfigured(self, data: Any) -> None:
        open_ones = (self.world.asked["reconfigured"] - self.world.said["reconfigured"]) & self.world.ready
        if open_ones and self.world.lockstep:
            self.world.refused = {data.draw(st.sampled_from(sorted(open_ones))): "no"}
            self.world.run()

    @rule(data=st.data())
    def a_rank_dies(self, data: Any) -> None:
        alive = sorted(self.world.ready | self.world.starting)
        if alive:
            self.world.end(data.draw(st.sampled_from(alive)))
            self.world.run()

    @rule(data=st.data())
    def a_rank_ends_as_asked(self, data: Any) -> None:
        if self.world.ending:
            self.world.end(data.draw(st.sampled_from(sorted(self.world.ending))))
            self.world.run()

    @rule()
    def members_start_again(self) -> None:
        self.world.ready |= set(range(self.world.members)) - self.world.starting
        self.world.run()

    @rule()
    def all_connect(self) -> None:
        self.world.connected = True
        self.world.run()

    @rule()
    def all_acknowledge(self) -> None:
        self.world.acknowledged = True
        self.world.run()

    @rule(seconds=st.sampled_from([1.0, DRAIN, TIMEOUT]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.run()

    @rule()
    def it_is_committed(self) -> None:
        self.world.plan.commit()
        self.world.run()

    @precondition(lambda self: not self.world.plan.over)
    @rule()
    def it_is_taken_back(self) -> None:
        before = self.world.plan.announced
        self.world.plan.abort("no more wanted")
        self.world.run()
        assert before or self.world.plan.rolling_back or self.world.plan.over

    @invariant()
    def one_size_counts(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        announced = [action for action in world.log if isinstance(action, Announce)]
        assert len(announced) <= 1
        assert world.plan.announced == bool(announced) or world.plan.state is ScaleState.ROLLED_BACK
        if world.plan.state is ScaleState.DONE:
            assert world.members == world.new
        if world.plan.state is ScaleState.ROLLED_BACK:
            assert world.members == world.old
            assert not announced
            assert world.plan.reason
        if world.plan.over:
            gone = range(world.members, max(world.old, world.new))
            started = any(isinstance(action, Start) for action in world.log) or world.old > world.new
            assert not started or world.ended.issuperset(gone)

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        world.plan.commit()
        world.settle()
        if world.lockstep:
            assert not world.resting & set(range(world.members))
            assert {world.size_of[rank] for rank in range(world.members)} == {world.members}


TestCourse = Course.TestCase
TestCourse.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
