"""A lockstep group of any size under any sequence of requests, faults and orders of delivery."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outboard.dp.waves import Phase
from wave_model import PROGRESS, Action, World

_INDEX = st.integers(0, 11)


class Waves(RuleBasedStateMachine):
    """Rules deliver, lose, repeat, ask and kill; what must come true is checked by letting all settle."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(
        size=st.integers(1, 4),
        clients=st.integers(1, 3),
        interval=st.integers(1, 3),
        steps=st.integers(1, 4),
        blocking=st.booleans(),
        settled=st.booleans(),
    )
    def begin(self, size: int, clients: int, interval: int, steps: int, blocking: bool, settled: bool) -> None:
        self.world = World(size, clients, interval, steps, blocking)
        if settled:
            self.world.settle()

    def one_of(self, actions: list[Action], index: int) -> None:
        if actions:
            self.world.apply(actions[index % len(actions)])

    @property
    def living(self) -> list[int]:
        return [index for index, front_end in enumerate(self.world.front_ends) if front_end.alive]

    # --- what happens by itself ---

    @rule(indices=st.lists(_INDEX, min_size=1, max_size=12))
    def progress(self, indices: list[int]) -> None:
        for index in indices:
            self.one_of(list(self.world.progress()), index)

    @rule(rank=_INDEX, kinds=st.sets(st.sampled_from(PROGRESS), min_size=1), count=st.integers(1, 30))
    def all_but_one(self, rank: int, kinds: set[str], count: int) -> None:
        """One rank does nothing of some kind, for a while."""
        for _ in range(count):
            actions = self.world.progress()
            action = next((a for a in actions if a[1] != rank % self.world.size or a[0] not in kinds), None)
            if action is None:
                break
            self.world.apply(action)

    @rule(index=_INDEX)
    def late_or_not(self, index: int) -> None:
        self.one_of(list(self.world.periodic()), index)

    @rule(index=_INDEX)
    def publish(self, index: int) -> None:
        if self.world.coordinator.state is not None and self.living:
            self.world.apply(("publish", self.living[index % len(self.living)]))

    # --- what is asked of it ---

    @precondition(lambda self: self.living)
    @rule(client=_INDEX, rank=_INDEX, count=st.integers(1, 3))
    def request(self, client: int, rank: int, count: int) -> None:
        for number in range(count):
            self.world.apply(("request", self.living[client % len(self.living)], (rank + number) % self.world.size))

    @rule(rank=_INDEX)
    def request_without_a_notice(self, rank: int) -> None:
        """Its front end believed the group awake, or died in between; nothing repeats for it."""
        self.world.apply(("add", 0, rank % self.world.size))

    @rule(client=_INDEX, rank=_INDEX)
    def abort(self, client: int, rank: int) -> None:
        self.world.apply(("abort", client % len(self.world.front_ends), rank % self.world.size))

    @rule()
    def pause(self) -> None:
        self.world.apply(("pause",))

    @rule()
    def resume(self) -> None:
        self.world.apply(("resume",))

    # --- what goes wrong ---

    @rule(
        index=_INDEX, kind=st.sampled_from(["lose_notice", "double_notice", "lose_publication", "double_publication"])
    )
    def disturb(self, index: int, kind: str) -> None:
        channel = "notices" if "notice" in kind else "heard"
        busy = [number for number, front_end in enumerate(self.world.front_ends) if getattr(front_end, channel)]
        self.one_of([(kind, number) for number in busy], index)

    @rule(arriving=st.integers(0, 255))
    def restart_coordinator(self, arriving: int) -> None:
        self.world.apply(("restart_coordinator", arriving))

    @rule(size=st.integers(1, 4))
    def restart_group(self, size: int) -> None:
        self.world.apply(("restart_group", size))

    # --- changes of size ---

    @precondition(lambda self: not self.world.resting)
    @rule(sizes=st.lists(st.integers(1, 4), max_size=2))
    def change_size(self, sizes: list[int]) -> None:
        """Two sizes: the first did not work out. None: it was taken back before."""
        self.world.apply(("quiesce", *sizes))

    @precondition(lambda self: self.world.resting and all(r.waves.group == self.world.group for r in self.world.ranks))
    @rule()
    def give_up_the_change(self) -> None:
        """Some rank did not come to rest in time."""
        self.world.apply(("let_go",))

    @precondition(lambda self: self.living)
    @rule(client=_INDEX)
    def front_end_dies(self, client: int) -> None:
        self.world.apply(("kill_front_end", self.living[client % len(self.living)]))

    @rule(client=_INDEX)
    def front_end_returns(self, client: int) -> None:
        client %= len(self.world.front_ends)
        if not self.world.front_ends[client].alive:
            self.world.apply(("new_front_end", client))

    # --- what must hold ---

    @invariant()
    def one_wave(self) -> None:
        waves = [rank.waves for rank in self.world.ranks if rank.waves.group == self.world.group]
        if not waves:
            return
        assert max(rank.wave for rank in waves) - min(rank.wave for rank in waves) <= 1
        running = {rank.wave for rank in waves if rank.phase is Phase.RUNNING}
        assert len(running) <= 1

    @rule()
    def settles(self) -> None:
        self.settled(self.world.clone())

    def teardown(self) -> None:
        self.settled(self.world)

    def settled(self, world: World) -> None:
        world.settle()
        world.check_rest()
        if world.coordinator.paused:
            world.apply(("resume",))
            world.settle()
            world.check_rest()


def check_that_its_work_waits_for_the_resume(world: World) -> None:
    world.settle()
    world.check_rest()
    assert world.ranks[0].work
    world.apply(("resume",))
    world.settle()
    world.check_rest()
    assert not world.ranks[0].work


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_that_restarts_in_a_pause_takes_no_step(size: int) -> None:
    """Drawn once: a rank that was alone stepped before the coordinator, which knew of the pause, had heard of it."""
    world = World(size, blocking=False)
    world.apply(("pause",))
    world.settle()
    assert world.coordinator.pause_complete
    world.apply(("restart_group", size))
    world.apply(("add", 0, 0))
    check_that_its_work_waits_for_the_resume(world)


def test_a_group_that_is_told_to_rest_before_it_has_heard_of_a_pause_takes_no_step() -> None:
    """Drawn once: the change of size woke a rank of a restarted group, and then its work had it step."""
    world = World(1, blocking=False)
    world.apply(("pause",))
    world.settle()
    world.apply(("restart_group", 1))
    world.apply(("rest",))
    world.apply(("add", 0, 0))
    world.apply(("let_go",))
    check_that_its_work_waits_for_the_resume(world)


@pytest.mark.timeout(300)
class TestWaves(Waves.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
