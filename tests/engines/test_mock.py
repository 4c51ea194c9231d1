"""`MockEngine`, stepped with no process around it."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outboard.engine.batch import Columns, OutputBatch
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.engines.mock import MockEngine
from outboard.errors import EngineOptionError, InvalidRequestError, PromptTooLongError
from outboard.protocol.messages import EngineCoreRequest, SchedulerStats
from outboard.protocol.sampling import SamplingParams


def letters(count: int) -> list[int]:
    return [97 + i % 26 for i in range(count)]


class Driver:
    """Steps an engine and gathers what each request got; handles are numbers in order of arrival."""

    def __init__(self, engine: MockEngine) -> None:
        self.engine = engine
        self.batch = OutputBatch()
        self.columns = Columns()
        self.ids: list[str] = []
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.scheduled: list[str] = []

    def add(self, request_id: str, prompt: int = 1, said: int = 0, **params: Any) -> None:
        self.engine.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=array("i", [1] * prompt),
                sampling_params=SamplingParams(**params),
                num_output_tokens=said,
            )
        )
        self.batch.open(request_id, len(self.ids), self.columns)
        self.ids.append(request_id)

    def step(self) -> int:
        """Takes one step; how many tokens it gave."""
        self.engine.step(self.batch)
        columns = self.columns
        ids = [self.ids[handle] for handle in columns.handles]
        start = 0
        for request_id, count in zip(ids, columns.counts or [1] * len(ids), strict=True):
            self.tokens.setdefault(request_id, []).extend(columns.tokens[start : start + count])
            start += count
        for position, reason, _ in columns.finished or ():
            self.finished[ids[position]] = reason
        if columns.extras is not None:
            self.scheduled += [ids[position] for position in columns.extras.queue_times]
        columns.clear()
        return start

    def run(self) -> None:
        while self.engine.has_work():
            self.step()


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Path and descriptor of a FIFO for acknowledgements."""
    path = tmp_path / "acks"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    yield str(path), fd
    os.close(fd)


def test_tokens_count_from_each_request_s_own_start() -> None:
    driver = Driver(MockEngine())
    driver.add("a", max_tokens=60)
    driver.add("b", max_tokens=3)
    driver.step()
    driver.add("c", max_tokens=30)
    driver.step()
    driver.add("d", max_tokens=1)
    driver.run()
    assert driver.tokens == {"a": letters(60), "b": letters(3), "c": letters(30), "d": letters(1)}
    assert driver.finished == dict.fromkeys("abcd", "length")
    assert driver.scheduled == ["a", "b", "c", "d"]


def test_the_last_token_carries_the_reason() -> None:
    driver = Driver(MockEngine())
    driver.add("a", max_tokens=2)
    assert driver.step() == 1
    assert not driver.finished
    assert driver.step() == 1
    assert driver.finished == {"a": "length"}
    assert not driver.engine.has_work()
    assert len(driver.batch) == 0


def test_requests_that_start_27_steps_apart() -> None:
    driver = Driver(MockEngine())
    driver.add("a", max_tokens=40)
    for _ in range(26):
        driver.step()
    driver.add("b", max_tokens=40)
    driver.run()
    assert driver.tokens == {"a": letters(40), "b": letters(40)}


def test_tokens_per_step() -> None:
    driver = Driver(MockEngine(tokens_per_step=4))
    driver.add("a", max_tokens=10)
    driver.add("b", max_tokens=4)
    assert driver.step() == 8
    driver.add("c", max_tokens=5)
    assert driver.step() == 8
    assert driver.step() == 3
    assert not driver.engine.has_work()
    assert driver.tokens == {"a": letters(10), "b": letters(4), "c": letters(5)}


def test_requests_wait_in_order() -> None:
    driver = Driver(MockEngine(max_num_seqs=2))
    for request_id in "abcd":
        driver.add(request_id, max_tokens=2)
    assert driver.engine.scheduler_stats() == SchedulerStats(4, 0)
    driver.step()
    assert driver.engine.scheduler_stats() == SchedulerStats(2, 2)
    assert driver.scheduled == ["a", "b"]
    driver.run()
    assert driver.scheduled == ["a", "b", "c", "d"]
    assert driver.tokens == dict.fromkeys("abcd", letters(2))


def test_abort() -> None:
    driver = Driver(MockEngine(max_num_seqs=2))
    for request_id in "abcd":
        driver.add(request_id, max_tokens=5)
    driver.step()
    driver.engine.abort_requests(["a", "c", "unknown"])
    driver.engine.abort_requests(["a"])
    driver.run()
    assert driver.tokens == {"a": letters(1), "b": letters(5), "d": letters(5)}
    assert driver.finished == {"b": "length", "d": "length"}


def test_a_request_that_only_the_loop_dropped() -> None:
    driver = Driver(MockEngine())
    driver.add("a", max_tokens=3)
    driver.add("b", max_tokens=3)
    driver.batch.close("a")
    driver.run()
    assert driver.tokens == {"b": letters(3)}


def test_max_tokens_none() -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        Driver(MockEngine()).add("a", max_tokens=None)
    driver = Driver(MockEngine(max_model_len=10))
    driver.add("a", prompt=4, max_tokens=None)
    driver.add("b", prompt=8, max_tokens=5)
    with pytest.raises(PromptTooLongError, match="10 tokens"):
        driver.add("c", prompt=10)
    driver.run()
    assert driver.tokens == {"a": letters(6), "b": letters(2)}


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("said", [0, 1, 25, 26, 27, 59])
def test_a_resumed_request_goes_on_as_it_would_have(said: int, tokens_per_step: int) -> None:
    driver = Driver(MockEngine(max_model_len=62, tokens_per_step=tokens_per_step))
    assert driver.engine.info().exact_resume
    driver.add("another", max_tokens=40)
    driver.step()
    driver.add("limited", prompt=1 + said, said=said, max_tokens=60 - said)
    driver.add("by length", prompt=2 + said, said=said, max_tokens=None)
    driver.run()
    assert driver.tokens == {"another": letters(40)} | dict.fromkeys(("limited", "by length"), letters(60)[said:])


def test_start_after() -> None:
    driver = Driver(MockEngine(start_after=3))
    driver.add("a", max_tokens=2)
    driver.add("b", max_tokens=2)
    assert not driver.engine.has_work()
    driver.engine.abort_requests(["a"])
    driver.add("c", max_tokens=1)
    assert driver.engine.has_work()
    driver.run()
    assert driver.tokens == {"b": letters(2), "c": letters(1)}
    driver.add("d", max_tokens=1)
    assert driver.engine.has_work()


class Clock:
    """Stands in for the module `time`: sleeping takes no time but the clock goes on."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def test_pace_does_not_drift_and_starts_anew_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("outboard.engines.mock.time", clock)
    driver = Driver(MockEngine(step_ms=20))
    driver.add("a", max_tokens=6)
    times = []
    for _ in range(6):
        driver.step()
        times.append(round(clock.now - 100, 6))
        clock.now += 0.05 if len(times) == 2 else 0.001
    assert times == [0.02, 0.04, 0.09, 0.091, 0.1, 0.12]
    clock.now = 200.0
    driver.add("b", max_tokens=1)
    driver.run()
    assert clock.now == pytest.approx(200.02)


def test_window(fifo: tuple[str, int]) -> None:
    path, fd = fifo
    engine = MockEngine(window=2, ack_path=path)
    driver = Driver(engine)
    driver.add("a", max_tokens=6)
    assert [driver.step() for _ in range(3)] == [1, 1, 0]
    assert engine.has_work()
    os.write(fd, b"\0")
    assert [driver.step() for _ in range(2)] == [1, 0]
    os.write(fd, b"\0\0")
    assert [driver.step() for _ in range(3)] == [1, 1, 0]
    os.write(fd, b"\0")
    driver.run()
    assert driver.tokens == {"a": letters(6)}
    engine.shutdown()


def test_a_stopped_window_can_be_left(fifo: tuple[str, int]) -> None:
    engine = MockEngine(window=1, ack_path=fifo[0])
    driver = Driver(engine)
    driver.add("a", max_tokens=6)
    driver.step()
    start = time.monotonic()
    assert driver.step() == 0
    assert time.monotonic() - start < 1
    engine.abort_requests(["a"])
    assert not engine.has_work()
    engine.shutdown()


def test_info_and_tokenizer() -> None:
    info = MockEngine(vocab_size=1000, max_model_len=9, max_num_seqs=3).info()
    assert (info.vocab_size, info.max_model_len, info.max_num_seqs) == (1000, 9, 3)
    assert isinstance(MockEngine.tokenizer({}), ByteTokenizer)


@pytest.mark.parametrize(
    "options",
    [
        {"step_ms": -1},
        {"tokens_per_step": 0},
        {"max_num_seqs": 0},
        {"vocab_size": 100},
        {"max_model_len": 1},
        {"window": 1},
        {"window": -1, "ack_path": "acks"},
        {"ack_path": "acks"},
        {"start_after": -1},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(EngineOptionError, match=next(iter(options))):
        MockEngine(**options)
