"""An engine core that dies is started again, and what it was at goes on, or ends in a way that tells so."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from outboard import (
    AsyncLLM,
    AsyncMPClient,
    EngineConfig,
    EngineCoreRequest,
    EngineDeadError,
    EngineRestartedError,
    EngineRestartingError,
    EngineState,
    FaultConfig,
    RestartPolicy,
    SamplingParams,
    SyncMPClient,
)
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")

ALPHABET = [97 + i % 26 for i in range(5000)]


def mock(policy: str = "resubmit", restarts: int = 3, backoff: float = 0.05, **options: Any) -> EngineConfig:
    """The mock engine, which says a fixed sequence, started again when it dies."""
    queue = options.pop("max_queued", 1000)
    return EngineConfig(
        engine="mock",
        options=options or {"step_ms": 2.0},
        faults=FaultConfig(
            restart=RestartPolicy.on_failure(restarts, backoff=backoff, max_backoff=max(backoff, 1.0)),
            in_flight=policy,  # type: ignore[arg-type]
            max_queued=queue,
        ),
    )


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)


async def read(llm: AsyncLLM, count: int, so_far: list[int] | None = None) -> list[int]:
    got = [] if so_far is None else so_far
    async for output in llm.generate([1], tokens(count)):
        got += output.outputs[0].token_ids
    return got


def kill(llm: AsyncLLM | AsyncMPClient | SyncMPClient) -> None:
    client = llm.client if isinstance(llm, AsyncLLM) else llm
    os.kill(client.core_engines[0].pid, signal.SIGKILL)


def test_after_a_kill_the_next_request_succeeds_within_two_seconds(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(mock(backoff=0.1)) as llm:
            assert await read(llm, 5) == ALPHABET[:5]
            before = llm.client.core_engines[0]
            started = time.monotonic()
            kill(llm)
            await llm.wait_for_state(EngineState.RESTARTING)
            assert await read(llm, 5) == ALPHABET[:5]
            assert time.monotonic() - started < 2
            after = llm.client.core_engines[0]
            assert (after.incarnation, before.incarnation) == (1, 0)
            assert after.pid != before.pid
            await llm.check_health()

    run(main())


def test_streams_and_calls_of_a_killed_engine_all_end_at_once(run: Run) -> None:
    async def main() -> None:
        config = EngineConfig(
            engine="faulty:DyingEngine",
            options={"step_ms": 2.0, "when": "never"},
            faults=FaultConfig(restart=RestartPolicy.on_failure(), in_flight="fail"),
        )
        async with AsyncLLM(config) as llm:
            streams = [asyncio.create_task(read(llm, 100_000)) for _ in range(100)]
            calls = [asyncio.create_task(llm.client.call_utility_async("never")) for _ in range(20)]
            while llm.client.stats()["requests"] < 100:
                await asyncio.sleep(0.01)
            pid = llm.client.core_engines[0].pid
            started = time.monotonic()
            kill(llm)
            ends = await asyncio.gather(*streams, *calls, return_exceptions=True)
            assert time.monotonic() - started < 1
            for end in ends:
                assert isinstance(end, EngineRestartedError) and end.retryable
                assert (end.rank, end.pid, end.incarnation, end.signal) == (0, pid, 0, "SIGKILL")
            assert len({id(end) for end in ends}) == 120  # an instance each
            assert await read(llm, 3) == ALPHABET[:3]

    run(main())


def test_requests_without_a_token_are_sent_anew(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(mock(max_num_seqs=2, step_ms=5.0)) as llm:
            first = [asyncio.create_task(read(llm, 100_000)) for _ in range(2)]
            while llm.client.scheduler_stats.running < 2:
                await asyncio.sleep(0.01)
            waiting = [asyncio.create_task(read(llm, 3)) for _ in range(10)]
            while llm.client.stats()["requests"] < 12:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # so that the first two have tokens
            kill(llm)
            for task in first:
                with pytest.raises(EngineRestartedError):
                    await task
            assert await asyncio.gather(*waiting) == [ALPHABET[:3]] * 10

    run(main())


def test_requests_go_on_behind_their_tokens(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(mock("resume", step_ms=1.0)) as llm:
            got: list[list[int]] = [[] for _ in range(20)]
            tasks = [asyncio.create_task(read(llm, 600, one)) for one in got]
            for _ in range(2):
                at = len(got[0])
                while len(got[0]) < at + 50:
                    await asyncio.sleep(0.01)
                kill(llm)
                await llm.wait_for_state(EngineState.RESTARTING)
                if _ == 0:
                    await llm.wait_for_state(EngineState.READY)
                    # A second death would exceed max_resubmits=1: those requests end, as the next loop shows.
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for one, end in zip(got, ends, strict=True):
                assert one == ALPHABET[: len(one)]  # no gap, no repeat
                assert isinstance(end, EngineRestartedError) or len(one) == 600

    run(main())


def test_a_resumed_stream_is_whole_and_says_so(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(mock("resume", step_ms=1.0)) as llm:
            got: list[int] = []
            resumed: tuple[int, ...] = ()
            async for output in llm.generate([1], tokens(400)):
                got += output.outputs[0].token_ids
                assert output.metrics is not None
                if len(got) > 100 and not resumed and llm.client.core_engines[0].incarnation == 0:
                    kill(llm)
                    await llm.wait_for_state(EngineState.RESTARTING)
                resumed = output.metrics.resumed_at
            assert got == ALPHABET[:400]
            assert len(resumed) == 1 and 100 < resumed[0] < 400
            assert llm.engine_info.exact_resume

    run(main())


def test_echo_is_resumed_exactly(run: Run) -> None:
    async def main() -> None:
        config = EngineConfig(
            engine="echo",
            options={"step_ms": 2.0},
            faults=FaultConfig(restart=RestartPolicy.on_failure(backoff=0.02), in_flight="resume"),
        )
        prompt = [i % 256 for i in range(300)]
        async with AsyncLLM(config) as llm:
            got: list[int] = []
            async for output in llm.generate(prompt, SamplingParams(max_tokens=300, output_kind="delta")):
                if not got:
                    kill(llm)
                    await llm.wait_for_state(EngineState.RESTARTING)
                got += output.outputs[0].token_ids
            assert got == prompt

    run(main())


def test_a_request_that_kills_every_engine_ends(run: Run) -> None:
    async def main() -> None:
        config = EngineConfig(
            engine="outboard.testing:FaultyEngine",
            options={"die_in": "add_request", "way": "_exit"},
            faults=FaultConfig(restart=RestartPolicy.on_failure(10, backoff=0.01), in_flight="resubmit"),
        )
        async with AsyncLLM(config) as llm:
            with pytest.raises(EngineRestartedError, match="exit code 7"):
                await read(llm, 3)
            status = await llm.wait_for_state(EngineState.READY)
            assert status.incarnation == 2  # it was sent anew once

    run(main())


def test_with_the_budget_spent_the_end_is_for_ever(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with AsyncLLM(mock("fail", restarts=1)) as llm:
            assert await read(llm, 2) == ALPHABET[:2]
            kill(llm)
            await llm.wait_for_state(EngineState.RESTARTING)
            await llm.wait_for_state(EngineState.READY)
            tasks = [asyncio.create_task(read(llm, 100_000)) for _ in range(1000)]
            while llm.client.stats()["requests"] < 1000:
                await asyncio.sleep(0.01)
            kill(llm)
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                assert type(end) is EngineDeadError and not end.retryable
                assert end.incarnation == 1
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await read(llm, 1)
            with pytest.raises(EngineDeadError):
                await llm.check_health()

    with caplog.at_level(logging.WARNING, "outboard"):
        run(main())
    told = [record for record in caplog.records if "SIGKILL" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING, logging.ERROR]  # once each, not a thousand times


def test_requests_wait_for_the_restart_up_to_a_bound(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(mock(backoff=0.5, max_queued=5)) as llm:
            await read(llm, 1)
            kill(llm)
            await llm.wait_for_state(EngineState.RESTARTING)
            waiting = [asyncio.create_task(read(llm, 3)) for _ in range(5)]
            await asyncio.sleep(0)
            while llm.client.stats()["requests"] < 5:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineRestartingError, match="max_queued") as caught:
                await read(llm, 3)
            assert caught.value.retryable
            with pytest.raises(EngineRestartedError):  # calls fail at once
                await llm.client.call_utility_async("get_stats")
            with pytest.raises(EngineRestartedError):
                await llm.check_health()
            waiting[0].cancel()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert isinstance(results[0], asyncio.CancelledError)
            assert results[1:] == [ALPHABET[:3]] * 4

    run(main())


def test_a_restart_that_fails_in_start_up_is_tried_again_until_the_budget_is_spent(
    run: Run, short_tmp: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "fragile.py"
    engine.write_text(
        "import os\n"
        "from outboard.engines.mock import MockEngine\n"
        "class Fragile(MockEngine):\n"
        "    def __init__(self, broken: str) -> None:\n"
        "        super().__init__(step_ms=2.0)\n"
        "        if os.path.exists(broken):\n"
        "            os._exit(9)\n"
    )
    broken = tmp_path / "broken"
    config = EngineConfig(
        engine=f"{engine}:Fragile",
        options={"broken": broken},
        faults=FaultConfig(restart=RestartPolicy.on_failure(3, backoff=0.01)),
    )

    async def main() -> None:
        async with AsyncLLM(config) as llm:
            await read(llm, 1)
            states: list[tuple[int, EngineState]] = []
            llm.client.subscribe(lambda status: states.append((status.incarnation, status.state)))
            broken.touch()
            kill(llm)
            await llm.wait_for_state(EngineState.RESTARTING)
            with pytest.raises(EngineDeadError, match=r"start-up: exit code 9"):
                await read(llm, 1)
            assert states[-1] == (3, EngineState.DEAD)
            assert [incarnation for incarnation, _ in states] == sorted(incarnation for incarnation, _ in states)

    run(main())


def test_outputs_of_lost_requests_come_as_errors_where_messages_are_read(run: Run) -> None:
    async def main() -> None:
        client = await AsyncMPClient.launch(mock("fail"))
        try:
            client.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling_params=tokens(100_000)))
            while not (await client.get_output_async()).handles:
                pass
            kill(client)
            while True:
                message = await client.get_output_async()
                ended = [output for output in message.outputs if output.finish_reason]
                if ended:
                    break
            assert (ended[0].request_id, ended[0].finish_reason) == ("a", "error")
            assert "SIGKILL" in (ended[0].error or "")
            client.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling_params=tokens(2)))
            got: list[int] = []
            while len(got) < 2:
                for output in (await client.get_output_async()).outputs:
                    got += output.new_token_ids
            assert got == ALPHABET[:2]
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())


def test_the_blocking_client_is_restarted_too() -> None:
    client = SyncMPClient(mock("resume"))
    try:
        client.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling_params=tokens(300)))
        got: list[int] = []
        killed = False
        while len(got) < 300:
            for output in client.get_output(timeout=20).outputs:
                assert output.finish_reason in (None, "length")
                got += output.new_token_ids
            if len(got) > 20 and not killed:
                kill(client)
                killed = True
        assert got == ALPHABET[:300]
        assert client.core_engines[0].incarnation == 1
    finally:
        client.shutdown()


def test_a_shutdown_during_a_restart(run: Run) -> None:
    async def main() -> None:
        llm = AsyncLLM(mock(backoff=30.0))
        async with llm:
            await read(llm, 1)
            kill(llm)
            await llm.wait_for_state(EngineState.RESTARTING)
            waiting = asyncio.create_task(read(llm, 1))
            while not llm.client.stats()["requests"]:
                await asyncio.sleep(0.001)
            started = time.monotonic()
        assert time.monotonic() - started < 5
        with pytest.raises(EngineDeadError):
            await waiting

    run(main())
