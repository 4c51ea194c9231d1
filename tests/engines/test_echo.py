"""`EchoEngine`, stepped with no process around it."""

from __future__ import annotations

import time
from array import array
from typing import Any

import pytest

from outboard.engine.batch import Columns, OutputBatch
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.engines.echo import EchoEngine
from outboard.errors import EngineOptionError, InvalidRequestError, PromptTooLongError
from outboard.protocol.messages import EngineCoreRequest, SchedulerStats
from outboard.protocol.sampling import SamplingParams


class Driver:
    """Steps an engine and gathers what each request got; handles are numbers in order of arrival."""

    def __init__(self, engine: EchoEngine) -> None:
        self.engine = engine
        self.batch = OutputBatch()
        self.columns = Columns()
        self.ids: list[str] = []
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, tuple[str, Any]] = {}
        self.results: dict[str, Any] = {}
        self.scheduled: list[str] = []

    def add(self, request_id: str, prompt: list[int], inputs: Any = None, said: int = 0, **params: Any) -> None:
        self.engine.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=array("i", prompt),
                inputs=inputs,
                sampling_params=SamplingParams(**params),
                num_output_tokens=said,
            )
        )
        self.batch.open(request_id, len(self.ids), self.columns)
        self.ids.append(request_id)

    def step(self) -> None:
        self.engine.step(self.batch)
        columns = self.columns
        ids = [self.ids[handle] for handle in columns.handles]
        start = 0
        for request_id, count in zip(ids, columns.counts or [1] * len(ids), strict=True):
            self.tokens.setdefault(request_id, []).extend(columns.tokens[start : start + count])
            start += count
        for position, reason, stop in columns.finished or ():
            self.finished[ids[position]] = (reason, stop)
        if columns.extras is not None:
            self.results |= {ids[position]: value for position, value in columns.extras.results.items()}
            self.scheduled += [ids[position] for position in columns.extras.queue_times]
        columns.clear()

    def run(self) -> None:
        while self.engine.has_work():
            self.step()


def test_one_token_a_step_and_the_last_carries_the_reason() -> None:
    driver = Driver(EchoEngine())
    driver.add("a", [7, 8, 9])
    for tokens, finished in (([7], {}), ([7, 8], {}), ([7, 8, 9], {"a": ("stop", None)})):
        assert driver.engine.has_work()
        driver.step()
        assert driver.tokens == {"a": tokens}
        assert driver.finished == finished
    assert not driver.engine.has_work()
    assert len(driver.batch) == 0


def test_a_longer_prompt_ends_with_length() -> None:
    driver = Driver(EchoEngine())
    driver.add("cut", [1, 2, 3], max_tokens=2)
    driver.add("just", [1, 2], max_tokens=2)
    driver.add("all", list(range(40)), max_tokens=None)
    driver.run()
    assert driver.tokens == {"cut": [1, 2], "just": [1, 2], "all": list(range(40))}
    assert driver.finished == {"cut": ("length", None), "just": ("stop", None), "all": ("stop", None)}


def test_stop_token_ids() -> None:
    driver = Driver(EchoEngine())
    driver.add("stopped", [5, 6, 7], stop_token_ids=[6])
    driver.add("later", [6, 6, 6, 6], stop_token_ids=[6], min_tokens=3)
    driver.add("other", [5, 6, 7], stop_token_ids=[9])
    driver.run()
    assert driver.tokens == {"stopped": [5, 6], "later": [6, 6, 6], "other": [5, 6, 7]}
    assert driver.finished == {"stopped": ("stop", 6), "later": ("stop", 6), "other": ("stop", None)}


@pytest.mark.parametrize("inputs", [{"pixels": [1, 2]}, "text", 0, []])
def test_inputs_come_back_as_the_result(inputs: Any) -> None:
    driver = Driver(EchoEngine())
    driver.add("a", [], inputs=inputs)
    driver.step()
    assert driver.results == {"a": inputs}
    assert driver.tokens == {"a": []}
    assert driver.finished == {"a": ("stop", None)}
    assert not driver.engine.has_work()


def test_nothing_to_echo() -> None:
    engine = EchoEngine()
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add_request(EngineCoreRequest(request_id="a"))
    assert not engine.has_work()


def test_requests_wait_in_order() -> None:
    driver = Driver(EchoEngine(max_num_seqs=2))
    for request_id in "abcd":
        driver.add(request_id, [1, 2])
    assert driver.engine.scheduler_stats() == SchedulerStats(4, 0)
    driver.step()
    assert driver.scheduled == ["a", "b"]
    assert driver.engine.scheduler_stats() == SchedulerStats(2, 2)
    driver.step()
    assert set(driver.finished) == {"a", "b"}
    driver.step()
    assert driver.scheduled == ["a", "b", "c", "d"]
    driver.step()
    assert set(driver.finished) == {"a", "b", "c", "d"}
    assert driver.engine.scheduler_stats() == SchedulerStats(0, 0)


def test_abort() -> None:
    driver = Driver(EchoEngine(max_num_seqs=1))
    driver.add("running", [1, 2, 3])
    driver.add("waiting", [1, 2, 3])
    driver.add("kept", [4])
    driver.step()
    driver.engine.abort_requests(["running", "waiting", "unknown"])
    driver.run()
    assert driver.tokens == {"running": [1], "kept": [4]}
    assert set(driver.finished) == {"kept"}


def test_max_model_len() -> None:
    driver = Driver(EchoEngine(max_model_len=6))
    driver.add("short", [1, 2])
    driver.add("long", [1, 2, 3, 4], max_tokens=None)
    with pytest.raises(PromptTooLongError, match="6 tokens"):
        driver.add("too long", [1, 2, 3, 4, 5, 6])
    driver.run()
    assert driver.tokens == {"short": [1, 2], "long": [1, 2]}
    assert driver.finished == {"short": ("stop", None), "long": ("length", None)}


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": None},
        {"max_tokens": 5},
        {"max_tokens": 8, "stop_token_ids": [6]},
        {"max_tokens": 8, "stop_token_ids": [6], "min_tokens": 4},
        {"max_tokens": 8, "stop_token_ids": [3], "min_tokens": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("max_model_len", [None, 14])
def test_a_resumed_request_goes_on_as_it_would_have(params: dict[str, Any], max_model_len: int | None) -> None:
    prompt = [3, 6, 6, 3, 6, 9, 1, 2]
    whole = Driver(EchoEngine(max_model_len=max_model_len))
    assert whole.engine.info().exact_resume
    whole.add("whole", prompt, **params)
    whole.run()
    tokens = whole.tokens["whole"]
    for said in range(len(tokens)):
        rest = dict(params)
        if rest["max_tokens"] is not None:
            rest["max_tokens"] -= said
        rest["min_tokens"] = max(0, params.get("min_tokens", 0) - said)
        driver = Driver(EchoEngine(max_model_len=max_model_len))
        driver.add("rest", prompt + tokens[:said], said=said, **rest)
        driver.run()
        assert tokens[:said] + driver.tokens["rest"] == tokens
        assert driver.finished["rest"] == whole.finished["whole"]


def test_a_request_that_had_said_all_just_ends() -> None:
    driver = Driver(EchoEngine())
    driver.add("a", [1, 2, 1, 2], said=2)
    driver.run()
    assert (driver.tokens, driver.finished, driver.results) == ({"a": []}, {"a": ("stop", None)}, {})


@pytest.mark.parametrize("said", [-1, 2, 3, 4])
def test_what_cannot_have_been_said(said: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{said} of 3"):
        Driver(EchoEngine()).add("a", [1, 2, 1], said=said)


def test_a_step_takes_its_time() -> None:
    driver = Driver(EchoEngine(step_ms=10))
    driver.add("a", [1, 2, 3])
    start = time.monotonic()
    driver.run()
    assert time.monotonic() - start >= 0.03


def test_info_and_tokenizer() -> None:
    info = EchoEngine(max_num_seqs=3).info()
    assert (info.vocab_size, info.max_model_len, info.max_num_seqs) == (256, None, 3)
    assert EchoEngine(max_model_len=9).info().max_model_len == 9
    assert isinstance(EchoEngine.tokenizer({}), ByteTokenizer)


@pytest.mark.parametrize("options", [{"max_num_seqs": 0}, {"step_ms": -1}, {"max_model_len": 1}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(EngineOptionError, match=next(iter(options))):
        EchoEngine(**options)
