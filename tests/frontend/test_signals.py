"""SIGINT and SIGTERM, sent to this very process, while a block takes them."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest
from test_drain import SlowStart, SlowStop

from faulty import DyingEngine
from outboard import AsyncLLM, ClientClosedError, EngineConfig, EngineDeadError, FaultConfig, SamplingParams
from outboard.frontend.signals import CUT, ShutdownSignals
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left", "outer")

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
ENDLESS = SamplingParams(max_tokens=100_000, output_kind="delta", detokenize=False)


@pytest.fixture
def outer() -> Iterator[list[int]]:
    """Handlers from before, which must be back afterwards; the signals that reached them."""
    reached: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        reached.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    yield reached
    after = [signal.signal(number, old) for number, old in zip(numbers, before, strict=True)]
    assert after == [handler, handler]


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def send_elsewhere(number: signal.Signals) -> None:
    """To this process, by a thread that takes it itself."""
    signal.pthread_kill(threading.get_ident(), number)


class Fake:
    """Something to stop, with no process; `drain` ends once `shutdown` is called, or `enough` is set."""

    def __init__(self) -> None:
        self.enough = asyncio.Event()
        self.calls: list[tuple[str, float | None]] = []

    async def drain(self, timeout: float | None = None) -> bool:
        self.calls.append(("drain", timeout))
        await self.enough.wait()
        return len(self.calls) == 1

    async def shutdown(self, timeout: float | None = None) -> None:
        self.calls.append(("shutdown", timeout))
        self.enough.set()


def mock(shutdown_timeout: float = 10.0) -> AsyncLLM:
    faults = FaultConfig(shutdown_timeout=shutdown_timeout)
    return AsyncLLM(EngineConfig(engine="mock", options={"step_ms": 10.0}, faults=faults))


def test_no_signal(run: Run) -> None:
    async def main() -> None:
        fake = Fake()
        async with ShutdownSignals(fake) as signals:
            pass
        assert (signals.exit_status, signals.received, fake.calls) == (0, [], [])
        with pytest.raises(LookupError):
            async with ShutdownSignals(fake):
                raise LookupError
        with pytest.raises(ClientClosedError):  # no signal caused it
            async with ShutdownSignals(fake):
                raise ClientClosedError("closed")

    run(main())


@BOTH
def test_the_first_lets_requests_end(run: Run, number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        llm = mock()
        told: list[signal.Signals] = []
        tokens = 0
        async with ShutdownSignals(llm, on_drain=told.append) as signals, llm:
            params = SamplingParams(max_tokens=50, output_kind="delta", detokenize=False)
            async for output in llm.generate([1], params):
                if not tokens:
                    send(number)
                tokens += len(output.outputs[0].token_ids)
        assert tokens == 50
        assert output.outputs[0].finish_reason == "length"
        assert signals.received == told == [number]
        assert signals.exit_status == 0

    with caplog.at_level(logging.WARNING):
        run(main())
    assert not caplog.records


@BOTH
def test_one_that_another_thread_was_given_wakes_the_loop(run: Run, number: signal.Signals) -> None:
    async def main() -> None:
        fake = Fake()
        fake.enough.set()
        async with asyncio.timeout(20), ShutdownSignals(fake) as signals:
            threading.Timer(0.1, send_elsewhere, [number]).start()
            await signals.wait()  # nothing else goes on in this loop for 20 s
        assert signals.received == [number]

    run(main())


@BOTH
def test_what_takes_too_long_is_cut(run: Run, number: signal.Signals) -> None:
    async def main() -> None:
        llm = mock(shutdown_timeout=0.3)
        reasons = []
        async with ShutdownSignals(llm) as signals, llm:
            async for output in llm.generate([1], ENDLESS):
                if not reasons:
                    send(number)
                reasons.append(output.outputs[0].finish_reason)
        assert reasons[-1] == "abort"
        assert signals.exit_status == CUT

    run(main())


@BOTH
def test_the_second_ends_it_at_once(run: Run, number: signal.Signals) -> None:
    async def main() -> None:
        llm = mock()
        forced: list[signal.Signals] = []
        async with ShutdownSignals(llm, on_force=forced.append) as signals, llm:
            signals.on_drain = lambda received: send(number)
            async for _ in llm.generate([1], ENDLESS):
                if not signals.received:
                    began = time.monotonic()
                    send(signal.SIGINT)
        assert time.monotonic() - began < 3
        assert forced == [number]
        assert signals.received == [signal.SIGINT, number]
        assert signals.exit_status == 128 + number

    run(main())


@BOTH
def test_the_second_kills_an_engine_that_does_not_stop(run: Run, number: signal.Signals) -> None:
    async def main() -> None:
        llm = AsyncLLM(SlowStop)
        async with ShutdownSignals(llm) as signals, llm:
            loop = asyncio.get_running_loop()
            began = time.monotonic()
            send(number)
            loop.call_later(0.5, send, number)
            await signals.wait()
        assert 0.5 <= time.monotonic() - began < 4
        assert signals.exit_status == 128 + number

    run(main())


@BOTH
def test_start_up_is_stopped(run: Run, number: signal.Signals) -> None:
    async def main() -> None:
        llm = AsyncLLM(SlowStart)
        started = False
        async with ShutdownSignals(llm) as signals:
            asyncio.get_running_loop().call_later(0.5, send, number)
            began = time.monotonic()
            async with llm:
                started = True
        assert not started
        assert time.monotonic() - began < 4
        assert signals.exit_status == 128 + number

    run(main())


@BOTH
def test_waiting_for_one_as_a_server_does(run: Run, number: signal.Signals) -> None:
    async def main() -> None:
        llm = mock()
        async with ShutdownSignals(llm) as signals, llm:
            reading = asyncio.ensure_future(anext(llm.generate([1], SamplingParams(max_tokens=20))))
            await asyncio.sleep(0.05)
            asyncio.get_running_loop().call_soon(send, number)
            await signals.wait()
            with pytest.raises(ClientClosedError):
                await llm.check_health()  # all has been done by now
        await reading
        assert signals.exit_status == 0

    run(main())


def test_a_death_while_draining_leaves_the_block(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        llm = AsyncLLM(DyingEngine, options={"how": "sigkill", "step": 20, "step_ms": 10.0})
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async with ShutdownSignals(llm) as signals, llm:
                async for _ in llm.generate([1], ENDLESS):
                    if not signals.received:
                        send(signal.SIGTERM)

        llm = AsyncLLM(DyingEngine, options={"how": "sigkill", "step": 20, "step_ms": 10.0})
        with pytest.raises(EngineDeadError, match="SIGKILL"):  # nobody reads: the drain alone knows
            async with ShutdownSignals(llm) as signals, llm:
                stream = llm.generate([1], ENDLESS)
                await anext(stream)
                send(signal.SIGTERM)
                await signals.wait()
        gc.collect()  # where a task would complain that nobody asked for its exception

    with caplog.at_level(logging.WARNING):
        run(main())
    told = [record for record in caplog.records if record.name == "outboard.launch"]
    assert len(told) == 2  # each death once
    assert caplog.records == told


@BOTH
def test_a_blocked_loop_does_not_keep_the_second_from_ending_it(run: Run, number: signal.Signals) -> None:
    async def main() -> None:
        fake = Fake()
        with pytest.raises(SystemExit) as caught:
            async with ShutdownSignals(fake):
                for seconds in (0.2, 0.4):
                    threading.Timer(seconds, send, [number]).start()
                time.sleep(20)
        assert caught.value.code == 128 + number
        assert fake.calls == [("drain", None), ("shutdown", 0)]

    began = time.monotonic()
    run(main())
    assert time.monotonic() - began < 5


def test_a_third_raises(run: Run) -> None:
    class Stuck(Fake):
        async def shutdown(self, timeout: float | None = None) -> None:
            pass

    async def main() -> None:
        fake = Stuck()
        async with ShutdownSignals(fake, timeout=7) as signals:
            for count in (1, 2):
                send(signal.SIGTERM)
                async with asyncio.timeout(5):
                    while signals._taken < count:
                        await asyncio.sleep(0)
            with pytest.raises(SystemExit):
                send(signal.SIGTERM)
            assert fake.calls == [("drain", 7)]
            fake.enough.set()

    run(main())


def test_outside_of_the_block_they_go_where_they_went_before(run: Run, outer: list[int]) -> None:
    async def main() -> None:
        fake = Fake()
        fake.enough.set()
        send(signal.SIGINT)
        async with ShutdownSignals(fake) as signals:
            send(signal.SIGTERM)
            await signals.wait()
        send(signal.SIGTERM)
        assert outer == [signal.SIGINT, signal.SIGTERM]
        assert signals.received == [signal.SIGTERM]

    run(main())
