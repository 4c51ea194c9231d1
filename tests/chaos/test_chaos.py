"""Ten schedules of the chaos that between them have nearly every kind of fault; `make chaos` runs hundreds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos import schedule
from chaos.__main__ import warm_up
from chaos.plan import STRIKES, draw
from chaos.schedule import run_plan
from outboard import EngineDeadError
from outboard.client.pending import PendingTable
from outboard.frontend.dispatcher import Dispatcher
from outboard.protocol.messages import EngineCoreOutputs

pytestmark = pytest.mark.timeout(120)


def kinds(seed: int) -> set[str]:
    """The kinds of fault of a schedule."""
    plan = draw(seed)
    return {strike.kind for strike in plan.strikes} | {f"end: {plan.end}"}


def chosen(count: int) -> list[int]:
    """The seeds that between them have the most kinds of fault."""
    seeds: list[int] = []
    seen: set[str] = set()
    for _ in range(count):
        seeds.append(max(range(200), key=lambda seed: len(kinds(seed) - seen)))
        seen |= kinds(seeds[-1])
    return seeds


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


@pytest.mark.parametrize("seed", chosen(10))
def test_survived(seed: int) -> None:
    report = run_plan(draw(seed))
    assert not report.violations, f"make chaos SEED={seed}\n{report.stderr}"


def test_a_seed_says_all() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert set(STRIKES) <= {kind for seed in range(len(STRIKES)) for kind in kinds(seed)}


# --- the chaos sees what is wrong ---


def seeds_of(kind: str, **wanted: object) -> Iterator[int]:
    """Seeds that begin with this fault, and have these fields in their plans."""
    for seed in range(list(STRIKES).index(kind), 10_000, len(STRIKES)):
        plan = draw(seed)
        if all(getattr(plan, name) == value for name, value in wanted.items()):
            yield seed


def test_a_message_that_is_delivered_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = Dispatcher.on_message
    messages = iter(range(10**9))

    def twice(self: Dispatcher, message: EngineCoreOutputs | EngineDeadError) -> None:
        deliver(self, message)
        if next(messages) % 10 == 9:
            deliver(self, message)

    monkeypatch.setattr(Dispatcher, "on_message", twice)
    seed = next(seeds_of("block the loop", side="llm", end="shutdown", engine="mock"))
    assert "tokens" in {violation.sort for violation in run_plan(draw(seed)).violations}


def test_calls_that_are_forgotten_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingTable, "fail_calls", lambda self, cause, rank=None: None)
    monkeypatch.setattr(schedule, "_PATIENCE", 2.0)
    seed = next(
        seed
        for seed in seeds_of("hang in a utility", side="llm", end="shutdown")
        if draw(seed).config.faults.stall_action == "restart" and len(draw(seed).strikes) == 1
    )
    assert "hung" in {violation.sort for violation in run_plan(draw(seed)).violations}
