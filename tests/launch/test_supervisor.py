"""The states of a rank, over every order of what can happen to it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outboard.config import RestartPolicy
from outboard.errors import ConfigError
from outboard.launch.supervisor import RankSupervisor
from outboard.protocol.control import EngineState

SERVING = (EngineState.READY, EngineState.STALLED)


def ready(policy: RestartPolicy) -> RankSupervisor:
    supervisor = RankSupervisor(policy)
    assert supervisor.ready()
    return supervisor


def test_never_means_dead() -> None:
    supervisor = ready(RestartPolicy.never())
    supervisor.died(1.0)
    assert supervisor.state is EngineState.DEAD
    assert supervisor.restart_at is None


def test_the_first_start_up_is_not_tried_again() -> None:
    supervisor = RankSupervisor(RestartPolicy.on_failure())
    supervisor.died(1.0)
    assert supervisor.state is EngineState.DEAD


def test_restarts_within_the_window_are_counted_and_the_pause_doubles() -> None:
    supervisor = ready(RestartPolicy.on_failure(max_restarts=3, window=100, backoff=1, max_backoff=3))
    pauses = []
    for now in (10.0, 20.0, 30.0):
        supervisor.died(now)
        assert supervisor.state is EngineState.RESTARTING
        assert supervisor.restart_at is not None
        pauses.append(supervisor.restart_at - now)
        supervisor.begin()
        assert supervisor.ready()
    assert pauses == [1, 2, 3]
    supervisor.died(40.0)
    assert supervisor.state is EngineState.DEAD


def test_the_budget_comes_back_with_the_window() -> None:
    supervisor = ready(RestartPolicy.on_failure(max_restarts=1, window=100, backoff=1))
    supervisor.died(0.0)
    supervisor.begin()
    supervisor.ready()
    supervisor.died(100.0)
    assert supervisor.state is EngineState.RESTARTING
    assert supervisor.restart_at == 101.0


def test_a_stop_ends_a_restart_that_is_due() -> None:
    supervisor = ready(RestartPolicy.on_failure())
    supervisor.died(0.0)
    supervisor.stop()
    assert supervisor.state is EngineState.STOPPED
    assert supervisor.restart_at is None


@pytest.mark.parametrize(
    "wrong", [{"max_restarts": -1}, {"window": 0}, {"window": float("nan")}, {"backoff": -1}, {"max_backoff": 1e9}]
)
def test_a_policy_that_makes_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RestartPolicy(**wrong)  # type: ignore[arg-type]


class Life(RuleBasedStateMachine):
    """A process that may start, serve, hang, recover, die or be stopped at any time."""

    @initialize(restarts=st.integers(0, 3), window=st.floats(1, 50), backoff=st.floats(0, 5))
    def start(self, restarts: int, window: float, backoff: float) -> None:
        self.policy = RestartPolicy.on_failure(restarts, window=window, backoff=backoff)
        self.supervisor = RankSupervisor(self.policy)
        self.now = 0.0
        self.running = True
        self.stopping = False
        self.deaths: list[float] = []
        self.incarnations = [0]

    @rule(seconds=st.floats(0, 60))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.running)
    @rule()
    def gets_ready(self) -> None:
        starting = self.supervisor.state in (EngineState.STARTING, EngineState.RESTARTING)
        assert self.supervisor.ready() == (starting and not self.stopping)

    @rule()
    def stalls(self) -> None:
        was_ready = self.supervisor.state is EngineState.READY
        assert self.supervisor.stalled() == (was_ready and not self.stopping)

    @rule()
    def progresses(self) -> None:
        was_stalled = self.supervisor.state is EngineState.STALLED
        assert self.supervisor.progressed() == (was_stalled and not self.stopping)

    @precondition(lambda self: self.running)
    @rule()
    def dies(self) -> None:
        starting = self.supervisor.state is EngineState.STARTING
        recent = [death for death in self.deaths if death > self.now - self.policy.window]
        self.supervisor.died(self.now)
        self.running = False
        if self.stopping:
            assert self.supervisor.state is EngineState.STOPPED
        elif starting or len(recent) >= self.policy.max_restarts:
            assert self.supervisor.state is EngineState.DEAD
        else:
            assert self.supervisor.state is EngineState.RESTARTING
            assert self.supervisor.restart_at is not None
            assert self.now <= self.supervisor.restart_at <= self.now + self.policy.max_backoff
            self.deaths.append(self.now)

    @precondition(lambda self: self.supervisor.restart_at is not None)
    @rule()
    def is_started_again(self) -> None:
        assert self.supervisor.restart_at is not None
        self.now = max(self.now, self.supervisor.restart_at)
        self.supervisor.begin()
        self.running = True
        self.incarnations.append(self.supervisor.incarnation)

    @rule()
    def is_stopped(self) -> None:
        self.supervisor.stop()
        self.stopping = True

    @invariant()
    def holds(self) -> None:
        supervisor = self.supervisor
        assert self.incarnations == list(range(len(self.incarnations)))
        assert not (supervisor.restart_at is not None and self.running)
        if supervisor.state in SERVING and not self.stopping:
            assert self.running
        if not supervisor.alive:
            assert supervisor.restart_at is None
        if self.stopping and not self.running:
            assert not supervisor.alive


TestLife = Life.TestCase
