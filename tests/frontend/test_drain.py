"""`AsyncLLM.drain`: what runs may end, within a bound; nothing new comes in."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from faulty import DyingEngine
from outboard import (
    AsyncLLM,
    ClientClosedError,
    EngineConfig,
    EngineDeadError,
    FaultConfig,
    InvalidRequestError,
    OutboardError,
    RequestOutput,
    SamplingParams,
)
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.engines.mock import MockEngine
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")

ENDLESS = SamplingParams(max_tokens=100_000, output_kind="delta", detokenize=False)


class SlowStart(MockEngine):
    """Is not ready for a long time."""

    def __init__(self) -> None:
        time.sleep(1000)


class SlowStop(MockEngine):
    """Does not stop for a long time."""

    def shutdown(self) -> None:
        time.sleep(1000)


class Reader:
    """Reads a stream to its end, which it keeps."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams) -> None:
        self.tokens = 0
        self.reason: str | None = None
        self.first = asyncio.Event()
        self._stream = llm.generate([1, 2, 3], params)
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for output in self._stream:
            self.tokens += len(output.outputs[0].token_ids)
            self.reason = output.outputs[0].finish_reason
            self.first.set()


def of(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, output_kind="delta", detokenize=False)


def on_mock(run: Run, body: Any, engine: Any = "mock", shutdown_timeout: float = 10.0, **options: Any) -> None:
    faults = FaultConfig(shutdown_timeout=shutdown_timeout)

    async def main() -> None:
        async with AsyncLLM(EngineConfig(engine=engine, options={"step_ms": 10.0, **options}, faults=faults)) as llm:
            await body(llm)

    run(main())


def test_requests_end_by_themselves_and_new_ones_are_refused(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def body(llm: AsyncLLM) -> None:
        unsent = llm.generate([1], of(5))
        readers = [Reader(llm, of(tokens)) for tokens in (40, 60, 80)]
        await asyncio.gather(*(reader.first.wait() for reader in readers))
        drain = asyncio.ensure_future(llm.drain())
        await asyncio.sleep(0)
        for stream in (unsent, llm.generate([1], of(5))):
            with pytest.raises(ClientClosedError, match="shutting down"):
                await anext(stream)
        with pytest.raises(ClientClosedError, match="shutting down"):
            await llm.submit([1], of(5), lambda output: None)
        assert (await llm.get_stats())["requests"] == 3
        assert not drain.done()
        assert await drain
        await asyncio.gather(*(reader.task for reader in readers))
        assert [(reader.tokens, reader.reason) for reader in readers] == [(n, "length") for n in (40, 60, 80)]
        with pytest.raises(ClientClosedError):
            await llm.check_health()

    with caplog.at_level(logging.WARNING):
        on_mock(run, body)
    assert not caplog.records


def test_what_does_not_end_in_time_ends_with_abort(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        reader = Reader(llm, ENDLESS)
        unread = llm.generate([1], ENDLESS)
        await anext(unread)
        called: list[RequestOutput | OutboardError] = []
        await llm.submit([1], ENDLESS, called.append)
        await reader.first.wait()
        began = time.monotonic()
        assert await llm.drain(0.3) is False
        assert 0.3 <= time.monotonic() - began < 3
        await reader.task
        assert reader.reason == "abort"
        rest = [output async for output in unread]
        assert rest[-1].finished
        assert rest[-1].outputs[0].finish_reason == "abort"
        assert len(rest[-1].outputs[0].token_ids) > 1
        assert isinstance(called[-1], RequestOutput)
        assert called[-1].finished

    on_mock(run, body)


def test_the_default_bound_is_shutdown_timeout(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        reader = Reader(llm, ENDLESS)
        await reader.first.wait()
        began = time.monotonic()
        assert await llm.drain() is False
        assert 0.4 <= time.monotonic() - began < 3
        await reader.task

    on_mock(run, body, shutdown_timeout=0.4)


def test_it_may_be_called_again_and_at_once(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        reader = Reader(llm, of(30))
        await reader.first.wait()
        assert await asyncio.gather(llm.drain(), llm.drain()) == [True, True]
        assert await llm.drain()
        await llm.shutdown()
        assert await llm.drain(0)
        await reader.task

    on_mock(run, body)

    async def one_has_less_patience(llm: AsyncLLM) -> None:
        reader = Reader(llm, ENDLESS)
        await reader.first.wait()
        assert await asyncio.gather(llm.drain(), llm.drain(0.1)) == [False, False]
        assert await llm.drain() is False
        await reader.task

    on_mock(run, one_has_less_patience)


def test_nothing_was_started(run: Run) -> None:
    async def main() -> None:
        llm = AsyncLLM("mock")
        assert await llm.drain()
        with pytest.raises(ClientClosedError):
            await llm.start()

    run(main())


def test_during_start_up_it_stops_that(run: Run) -> None:
    async def main() -> None:
        llm = AsyncLLM(SlowStart)
        starting = asyncio.ensure_future(llm.start())
        done, _ = await asyncio.wait([starting], timeout=0.5)
        assert not done
        began = time.monotonic()
        await llm.drain()
        assert time.monotonic() - began < 3
        with pytest.raises(ClientClosedError):
            await starting

    run(main())


def test_a_shutdown_forces(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        reader = Reader(llm, ENDLESS)
        await reader.first.wait()
        drain = asyncio.ensure_future(llm.drain())
        await asyncio.sleep(0)
        await llm.shutdown()
        with pytest.raises(ClientClosedError):
            await reader.task
        assert await drain is False

    on_mock(run, body)


def test_a_shutdown_of_no_time_kills_an_engine_that_does_not_stop(run: Run) -> None:
    async def main() -> None:
        llm = AsyncLLM(SlowStop)
        await llm.start()
        drain = asyncio.ensure_future(llm.drain())
        done, _ = await asyncio.wait([drain], timeout=0.5)
        assert not done  # it waits in the engine's shutdown
        began = time.monotonic()
        await llm.shutdown(0)
        assert await drain
        assert time.monotonic() - began < 3

    run(main())


def test_cancelling_it_ends_the_waiting_alone(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        reader = Reader(llm, of(50))
        await reader.first.wait()
        drain = asyncio.ensure_future(llm.drain())
        await asyncio.sleep(0.05)
        drain.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drain
        with pytest.raises(ClientClosedError, match="shutting down"):
            await anext(llm.generate([1]))
        await reader.task
        assert (reader.tokens, reader.reason) == (50, "length")
        assert await llm.is_paused() is False  # it runs
        assert await llm.drain()

    on_mock(run, body)


def test_a_death_is_told(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        reader = Reader(llm, ENDLESS)
        await reader.first.wait()
        with pytest.raises(EngineDeadError, match="SIGKILL") as caught:
            await llm.drain()
        assert not isinstance(caught.value, ClientClosedError)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await reader.task
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.drain()

    on_mock(run, body, DyingEngine, how="sigkill", step=50)


class HeldTokenizer(ByteTokenizer):
    """Encodes once it may."""

    began = threading.Event()
    may_go_on = threading.Event()

    def encode(self, text: str) -> list[int]:
        self.began.set()
        assert self.may_go_on.wait(20)
        if text.startswith("bad"):
            raise InvalidRequestError("a bad prompt")
        return super().encode(text)


class HeldEngine(MockEngine):
    """A prompt for it is encoded once the test says so."""

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> HeldTokenizer:
        return HeldTokenizer()


@pytest.mark.parametrize("in_time", [True, False])
def test_a_request_whose_prompt_is_being_encoded_is_in_flight(run: Run, in_time: bool) -> None:
    HeldTokenizer.began.clear()
    HeldTokenizer.may_go_on.clear()

    async def body(llm: AsyncLLM) -> None:
        async def read() -> list[RequestOutput]:
            return [output async for output in llm.generate("x" * 5000, of(10))]

        called: list[RequestOutput | OutboardError] = []
        reading = asyncio.ensure_future(read())
        submitting = asyncio.ensure_future(llm.submit("x" * 5000, of(10), called.append))
        assert await asyncio.to_thread(HeldTokenizer.began.wait, 20)
        drain = asyncio.ensure_future(llm.drain(20 if in_time else 0.2))
        if in_time:
            await asyncio.wait([drain], timeout=0.2)
            assert not drain.done()
            HeldTokenizer.may_go_on.set()
            assert await drain
        else:
            assert await drain is False
            HeldTokenizer.may_go_on.set()
        outputs = await reading
        await submitting
        for last in (outputs[-1], called[-1]):
            assert isinstance(last, RequestOutput)
            assert last.finished
            assert last.outputs[0].finish_reason == ("length" if in_time else "abort")

    on_mock(run, body, HeldEngine)


def test_a_request_that_turns_out_to_be_bad_has_ended(run: Run) -> None:
    HeldTokenizer.began.clear()
    HeldTokenizer.may_go_on.clear()

    async def body(llm: AsyncLLM) -> None:
        reading = asyncio.ensure_future(anext(llm.generate("bad" * 5000)))
        assert await asyncio.to_thread(HeldTokenizer.began.wait, 20)
        drain = asyncio.ensure_future(llm.drain(20))
        await asyncio.sleep(0)
        HeldTokenizer.may_go_on.set()
        with pytest.raises(InvalidRequestError):
            await reading
        async with asyncio.timeout(5):
            assert await drain

    on_mock(run, body, HeldEngine)
