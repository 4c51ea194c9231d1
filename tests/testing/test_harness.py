"""The harness does with an engine what the busy loop does."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from outboard import (
    EngineCore,
    EngineCoreRequest,
    InvalidRequestError,
    OutputBatch,
    SamplingParams,
    SchedulerStats,
    UtilityError,
    UtilityNotFoundError,
    utility,
)
from outboard.engines.echo import EchoEngine
from outboard.engines.mock import MockEngine
from outboard.testing import EngineHarness, ManualClock


class Scripted(EngineCore):
    """Does in each step what the test says."""

    def __init__(self) -> None:
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[list[str]] = []
        self.steps: list[Any] = []
        self.ended = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        if request.inputs is not None:
            raise request.inputs
        self.added.append(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.aborted.append(list(request_ids))

    def has_work(self) -> bool:
        return bool(self.steps)

    def step(self, outputs: OutputBatch) -> None:
        self.steps.pop(0)(outputs)

    def shutdown(self) -> None:
        self.ended += 1

    @utility
    def double(self, number: int, *, plus: int = 0) -> int:
        return 2 * number + plus

    @utility
    def later(self) -> Future[int]:
        return Future()

    def hidden(self) -> None:
        raise AssertionError("called from outside")


def test_tokens_come_step_by_step() -> None:
    harness = EngineHarness(EchoEngine())
    name = harness.add([7, 8, 9], SamplingParams(max_tokens=5))
    assert [output.new_token_ids for output in harness.step()] == [[], [7]]  # the first is its queue time
    assert harness[name].tokens == [7]
    assert harness[name].first_step == 1
    assert not harness[name].finished
    assert harness.open_requests == [name]
    assert harness.run_until_idle()[name].tokens == [7, 8, 9]
    assert (harness[name].finish_reason, harness[name].last_step, harness.steps) == ("stop", 3, 3)
    assert harness.open_requests == []
    assert harness.step() == []
    assert harness.steps == 3


def test_everything_that_a_request_can_produce() -> None:
    engine = Scripted()
    harness = EngineHarness(engine)
    name = harness.add([1], request_id="it")
    result = {"a": 1}
    engine.steps += [
        lambda outputs: outputs.add("it", [1, 2], logprobs=[{1: -0.5}, {2: -0.25}], num_cached_tokens=3),
        lambda outputs: outputs.add("it", result=result),
        lambda outputs: outputs.add("it", [3], "error", 3, error="it broke", result=[]),
    ]
    record = harness.run_until_idle()[name]
    assert record.tokens == [1, 2, 3]
    assert record.logprobs == [{1: -0.5}, {2: -0.25}]
    assert record.results == [{"a": 1}, []]
    assert record.results[0] is result
    assert record.num_cached_tokens == 3
    assert (record.finish_reason, record.stop_reason, record.error) == ("error", 3, "it broke")
    assert record.exception is None


def test_the_engine_sees_a_request_as_in_a_process() -> None:
    engine = Scripted()
    harness = EngineHarness(engine)
    first, second = harness.add([1, 2]), harness.add(inputs=None)
    assert [request.request_id for request in engine.added] == [first, second]
    assert engine.added[0].prompt_token_ids == array("i", [1, 2])
    assert engine.added[0].external_req_id == first
    assert engine.added[0].sampling_params == SamplingParams()
    with pytest.raises(ValueError, match="never sees an id twice"):
        harness.add([1], request_id=first)


@pytest.mark.parametrize(
    ("error", "text"), [(InvalidRequestError("too odd"), "too odd"), (KeyError("image"), "KeyError: 'image'")]
)
def test_a_refused_request_ends_with_an_error(error: Exception, text: str) -> None:
    engine = Scripted()
    harness = EngineHarness(engine)
    record = harness[harness.add(inputs=error)]
    assert (record.finish_reason, record.error, record.exception) == ("error", text, error)
    assert harness.open_requests == []
    assert harness.stats() == SchedulerStats()


def test_an_abort_reaches_the_engine_whatever_the_request_does() -> None:
    engine = Scripted()
    harness = EngineHarness(engine)
    name = harness.add([1])
    harness.abort(name, "unknown")
    harness.abort(name)
    assert engine.aborted == [[name, "unknown"], [name]]
    assert harness[name].finish_reason == "abort"
    assert harness.open_requests == []


def test_outputs_after_the_end_are_noted_and_not_counted() -> None:
    engine = Scripted()
    harness = EngineHarness(engine)
    ended, aborted, going = harness.add([1]), harness.add([2]), harness.add([3])
    harness.abort(aborted)
    engine.steps += [
        lambda outputs: outputs.add(ended, [5], "stop"),
        lambda outputs: outputs.extend([ended, going, aborted], [6, 7, 8]),
        lambda outputs: outputs.scheduled(ended),
    ]
    harness.run_until_idle()
    assert harness[ended].tokens == [5]
    assert harness[aborted].tokens == []
    assert harness[going].tokens == [7]
    assert harness.strays == [ended, aborted, ended]


def test_queue_times_by_a_clock_that_is_told() -> None:
    clock = ManualClock()
    harness = EngineHarness(EchoEngine(max_num_seqs=1), clock=clock)
    first = harness.add([1, 2])
    clock.advance(1.5)
    second = harness.add([3])
    harness.step()
    assert harness[first].queue_time == 1.5
    assert harness[second].queue_time is None
    clock.advance(2)
    harness.run_until_idle()
    assert harness[second].queue_time == 2
    assert harness.strays == []


def test_running_for_ever_is_an_error_that_names_the_requests() -> None:
    harness = EngineHarness(MockEngine(max_model_len=1000))
    name = harness.add([1], SamplingParams(max_tokens=None))
    with pytest.raises(AssertionError, match=rf"after 10 steps; 1 requests have not ended: '{name}' \(10 tokens\)"):
        harness.run_until_idle(max_steps=10)
    harness.abort(name)
    assert harness.run_until_idle(max_steps=0)[name].finish_reason == "abort"


def test_the_bound_is_exact() -> None:
    harness = EngineHarness(EchoEngine())
    harness.add([1, 2, 3])
    harness.run_until_idle(max_steps=3)


def test_an_exception_of_a_step_passes_through() -> None:
    engine = Scripted()
    harness = EngineHarness(engine)
    engine.steps.append(lambda outputs: outputs.extend(["a"], []))
    with pytest.raises(ValueError, match="1 request ids but 0 tokens"):
        harness.step()


def test_utilities() -> None:
    harness = EngineHarness(Scripted())
    assert harness.call("double", 4, plus=1) == 9
    with pytest.raises(UtilityError, match="argument 'number' of 'double' does not fit int"):
        harness.call("double", "4")
    assert isinstance(harness.call("later"), Future)
    for name in ("hidden", "nothing"):
        with pytest.raises(UtilityNotFoundError, match=rf"{name}.*double.*later"):
            harness.call(name)


def test_stats_and_the_default() -> None:
    harness = EngineHarness(Scripted())
    harness.add([1])
    assert harness.stats() == SchedulerStats(running=1)
    echo = EngineHarness(EchoEngine())
    echo.add([1])
    assert echo.stats() == SchedulerStats(waiting=1)


def test_shutdown_aborts_first() -> None:
    engine = Scripted()
    harness = EngineHarness(engine)
    name = harness.add([1])
    harness.shutdown()
    assert engine.aborted == [[name]]
    assert engine.ended == 1
    assert harness[name].finish_reason == "abort"
