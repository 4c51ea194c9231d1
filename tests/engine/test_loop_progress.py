"""What the busy loop tells on the progress page; see loop_driver.py."""

from __future__ import annotations

from typing import Any

import pytest
from loop_driver import Asleep, Core, Engine

from outboard import OutputBatch
from outboard.engine.events import BadRequest, Stop
from outboard.protocol.progress import BUSY, FROZEN, IDLE
from outboard.testing import EngineHarness


@pytest.fixture
def core() -> Core:
    return Core()


def test_it_is_busy_while_it_has_work_and_then_idle(core: Core) -> None:
    seen: list[int] = []
    core.engine.on_step = lambda outputs: seen.append(core.progress().activity)
    assert core.progress().activity == IDLE
    core.add(0, [1, 2, 3])
    core.loop.turn()
    assert core.progress().activity == BUSY
    core.settle()
    assert core.progress().activity == IDLE
    assert seen == [BUSY] * 3


def test_steps_are_counted_with_their_time(core: Core) -> None:
    core.add(0, [1, 2, 3])
    last = core.progress()
    for number in range(3):
        core.loop.turn()
        now = core.progress()
        assert now.steps == number + 1
        assert now.time > last.time
        last = now
    core.settle()
    assert core.progress().steps == 3


@pytest.mark.parametrize("how", [("pause_generation", "keep"), ("sleep",)])
def test_it_is_frozen_while_no_step_is_to_be_expected(core: Core, how: tuple[Any, ...]) -> None:
    core.engine.sleep = lambda level: None  # type: ignore[method-assign]
    core.add(0, [1, 2, 3])
    core.loop.turn()
    core.call(0, *how)
    core.settle()
    assert core.progress().activity == FROZEN
    core.add(1, [1])  # is held
    core.settle()
    assert core.progress().activity == FROZEN
    if how[0] != "sleep":
        core.call(1, "resume_generation")
        core.loop.turn()
        assert core.progress().activity == BUSY


def test_a_pause_in_which_requests_go_on_is_not_frozen(core: Core) -> None:
    core.add(0, [1, 2, 3])
    core.call(0, "pause_generation", "wait")
    core.loop.turn()
    assert core.progress().activity == BUSY
    core.settle()
    assert core.progress().activity == IDLE


def test_whatever_may_take_long_is_done_while_busy(core: Core) -> None:
    """A hang shows by the time of a page that says busy, wherever the engine hangs."""
    seen: dict[str, int] = {}

    def note(name: str, method: Any) -> Any:
        def noted(*args: Any) -> Any:
            seen.setdefault(name, core.progress().activity)
            return method(*args)

        return noted

    engine = core.engine
    for name in ("add_request", "abort_requests", "has_work", "scheduler_stats", "step"):
        core.settle()
        setattr(engine, name, note(name, getattr(engine, name)))
    core.loop._calls.methods["echo"] = note("echo", engine.echo)
    core.call(0, "echo")
    core.settle()
    core.add(0, [1, 2])
    core.loop.turn()
    core.settle()
    core.add(0, [1, 2])
    core.loop.turn()
    core.abort(0)
    core.settle()
    core.port.open = False
    core.call(1, "echo")
    core.loop.turn()
    del seen["has_work"]
    core.loop.turn()  # waits for a time, then tries again to send
    core.leave()
    assert seen == dict.fromkeys(("add_request", "abort_requests", "has_work", "scheduler_stats", "step", "echo"), BUSY)


def test_each_message_is_counted_good_or_bad(core: Core) -> None:
    other = core.join(slot=7)
    core.add(0, [1])
    core.abort(99)
    core.call(0, "echo")
    core.call(1, "no_such")
    core.send(None)
    core.send(BadRequest(5, "bad"))
    other.add(0, [1])
    core.settle()
    assert (core.progress(0).taken, core.progress(7).taken, core.progress(1).taken) == (6, 1, 0)


def test_a_message_is_counted_when_it_is_taken(core: Core) -> None:
    counts: list[int] = []
    core.loop._calls.methods["echo"] = lambda: counts.append(core.progress().taken)
    for call_id in range(3):
        core.call(call_id, "echo")
    core.settle()
    assert counts == [1, 2, 3]


def test_a_client_with_the_slot_of_another_starts_at_zero(core: Core) -> None:
    core.add(0, [1])
    core.settle()
    core.leave()
    core.add(1, [1])
    again = core.join(slot=0)
    core.settle()
    assert core.progress(0).taken == 0
    again.add(0, [1])
    core.settle()
    assert core.progress(0).taken == 1


def test_a_long_step_can_give_signs_of_life(core: Core) -> None:
    times: list[int] = []

    def long(outputs: OutputBatch) -> None:
        for _ in range(3):
            core.engine.progress()
            times.append(core.progress().time)

    core.engine.on_step = long
    core.add(0, [1])
    core.loop.turn()
    assert len(set(times)) == 3
    core.settle()
    core.engine.progress()  # as from a thread of the engine's own
    assert core.progress().activity == IDLE


def test_elsewhere_signs_of_life_do_nothing() -> None:
    engine = Engine()
    engine.progress()
    EngineHarness(engine).engine.progress()


def test_a_loop_that_waits_is_idle_whatever_woke_it(core: Core) -> None:
    core.abort(99)
    core.settle()
    assert core.progress().activity == IDLE
    core.port.open = False
    core.call(0, "echo")
    for _ in range(3):
        core.loop.turn()
        assert core.progress().activity == IDLE
    core.port.open = True
    core.settle()
    with pytest.raises(Asleep):
        core.loop.turn()
    assert core.progress().activity == IDLE


def test_it_is_idle_in_the_end(core: Core) -> None:
    core.add(0)
    core.loop.turn()
    core.inbox.put(Stop())
    core.loop.run()
    assert core.progress().activity == IDLE
