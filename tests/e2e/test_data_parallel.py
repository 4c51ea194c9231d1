"""Several engine cores under one client, and several clients over them, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from outboard import (
    AsyncLLM,
    AsyncMPClient,
    ConfigError,
    DPAsyncMPClient,
    DPLBAsyncMPClient,
    EngineConfig,
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    EngineRestartedError,
    EngineStartupError,
    EngineState,
    FaultConfig,
    InvalidRequestError,
    ParallelConfig,
    RankOptions,
    RestartPolicy,
    SamplingParams,
    UtilityError,
    launch_engines,
)
from support import Run, children

pytestmark = pytest.mark.usefixtures("nothing_left")

ALPHABET = [97 + i % 26 for i in range(5000)]


def mock(
    size: int, *, restarts: int = 0, in_flight: Any = "fail", parallel: Any = None, **options: Any
) -> EngineConfig:
    return EngineConfig(
        engine="mock",
        options=options or {"step_ms": 2.0},
        parallel=ParallelConfig(data_parallel_size=size, **(parallel or {})),
        faults=FaultConfig(
            restart=RestartPolicy.on_failure(restarts, backoff=0.05), in_flight=in_flight, shutdown_timeout=5.0
        ),
    )


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)


async def read(llm: AsyncLLM, count: int, request_id: str | None = None) -> list[int]:
    got: list[int] = []
    async for output in llm.generate([1], tokens(count), request_id):
        got += output.outputs[0].token_ids
    return got


def dplb(llm: AsyncLLM) -> DPLBAsyncMPClient:
    assert isinstance(llm.client, DPLBAsyncMPClient)
    return llm.client


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


# --- start and balance -----------------------------------------------------------------------------------------------


def test_ranks_start_together_and_share_the_requests(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(mock(3)) as llm:
            assert [engine.rank for engine in llm.client.core_engines] == [0, 1, 2]
            assert len({engine.pid for engine in llm.client.core_engines}) == 3
            tasks = [asyncio.create_task(read(llm, 40)) for _ in range(60)]
            await until(lambda: llm.client.stats()["requests"] == 60)
            assert dplb(llm).lb_engines == {0: 20, 1: 20, 2: 20}
            assert await asyncio.gather(*tasks) == [ALPHABET[:40]] * 60
            assert dplb(llm).lb_engines == {0: 0, 1: 0, 2: 0}

    run(main())


def test_a_burst_of_four_hundred_spreads_evenly_with_no_news_of_load(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(mock(4, max_num_seqs=100, step_ms=500.0)) as llm:
            tasks = [asyncio.create_task(read(llm, 2)) for _ in range(400)]
            await until(lambda: llm.client.stats()["requests"] == 400)
            counts = dplb(llm).lb_engines.values()
            assert max(counts) - min(counts) <= 2
            await asyncio.gather(*tasks)

    run(main())


def test_one_rank_that_cannot_start_stops_all(short_tmp: Path) -> None:
    config = EngineConfig(
        engine="outboard.testing:FaultyEngine",
        parallel=ParallelConfig(
            data_parallel_size=3,
            rank_options=[RankOptions(), RankOptions(options={"die_in": "constructor", "way": "_exit"})],
        ),
    )
    with pytest.raises(EngineStartupError, match=r"rank 1 .* exit code 7"):
        DPLBAsyncMPClient(config)
    assert not children()


def test_what_ranks_have_of_their_own(run: Run) -> None:
    async def main() -> None:
        cpus = sorted(os.sched_getaffinity(0))
        config = EngineConfig(
            engine="faulty:TellingEngine",
            options={"name": "all"},
            parallel=ParallelConfig(
                data_parallel_size=2,
                rank_options=[
                    RankOptions(options={"name": "first"}, env={"OUTBOARD_TEST": "1"}, cpus=cpus[:1]),
                    RankOptions(env={"OUTBOARD_TEST": "2"}),
                ],
            ),
        )
        client = await DPLBAsyncMPClient.launch(config)
        try:
            first, second = await client.call_utility_all_async("tell")
            assert first == ["first", "1", cpus[:1]]
            assert second[:2] == ["all", "2"]
            assert set(second[2]) < set(cpus) or len(cpus) == 1  # it computes on CPUs, so it got a share
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())


def test_configurations_that_make_no_sense(short_tmp: Path) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size"):
        ParallelConfig(data_parallel_size=0)
    with pytest.raises(ConfigError, match="rank_options"):
        ParallelConfig(rank_options=[RankOptions(), RankOptions()])
    with pytest.raises(ConfigError, match="balancing"):
        ParallelConfig(balancing="none")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no balancing policy 'fastest'.*least_loaded"):
        DPLBAsyncMPClient(mock(2, parallel={"policy": "fastest"}))
    with pytest.raises(ConfigError, match="DPLBAsyncMPClient"):
        AsyncMPClient(mock(2))
    with pytest.raises(ConfigError, match="data_parallel_rank 5"):
        DPAsyncMPClient(mock(2, parallel={"balancing": "external"}), data_parallel_rank=5)
    with pytest.raises(ConfigError, match="CPUs"):
        DPLBAsyncMPClient(mock(2, parallel={"rank_options": [RankOptions(cpus=[100_000])]}))
    assert not children()


def test_make_client_chooses_the_kind(short_tmp: Path) -> None:
    for balancing, kind in (("internal", DPLBAsyncMPClient), ("external", DPAsyncMPClient)):
        client = EngineCoreClient.make_client(True, True, mock(2, parallel={"balancing": balancing}))
        assert type(client) is kind
        client.shutdown()


# --- requests and calls ----------------------------------------------------------------------------------------------


def test_a_pinned_request_goes_to_its_rank_and_an_abort_follows_it(run: Run) -> None:
    async def main() -> None:
        client = await DPLBAsyncMPClient.launch(mock(3))
        try:
            for rank in (2, 2, 0):
                client.add_request(
                    EngineCoreRequest(
                        request_id=f"to {rank}, {time.monotonic_ns()}",
                        prompt_token_ids=[1],
                        sampling_params=tokens(100_000),
                        data_parallel_rank=rank,
                    )
                )
            assert client.lb_engines == {0: 1, 1: 0, 2: 2}
            stats = await client.call_utility_all_async("get_stats")
            assert [one["requests"] for one in stats] == [1, 0, 2]
            with pytest.raises(InvalidRequestError, match="no data_parallel_rank 7"):
                client.add_request(EngineCoreRequest(request_id="x", prompt_token_ids=[1], data_parallel_rank=7))
            await client.abort_requests_async(list(client._pending.handles))
            stats = await client.call_utility_all_async("get_stats")
            assert [one["requests"] for one in stats] == [0, 0, 0]
            assert client.lb_engines == {0: 0, 1: 0, 2: 0}
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())


def test_a_stream_can_be_pinned_too(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(mock(3)) as llm:
            streams = [llm.generate([1], tokens(50), data_parallel_rank=1) for _ in range(3)]
            for stream in streams:
                await anext(stream)
            assert dplb(llm).lb_engines == {0: 0, 1: 3, 2: 0}
            with pytest.raises(InvalidRequestError, match="no data_parallel_rank 3"):
                await anext(llm.generate([1], tokens(5), data_parallel_rank=3))

    run(main())


def test_utility_calls_go_to_all_or_to_one(run: Run) -> None:
    async def main() -> None:
        client = await DPLBAsyncMPClient.launch(
            EngineConfig(engine="faulty:CallableEngine", parallel=ParallelConfig(data_parallel_size=3))
        )
        try:
            pids = [engine.pid for engine in client.core_engines]
            assert await client.call_utility_async("pid") == pids[0]
            assert await client.call_utility_async("pid", rank=2) == pids[2]
            assert await client.call_utility_async("pid", rank="least_loaded") in pids
            assert await client.call_utility_all_async("pid") == pids
            await client.call_utility_async("echo")
            assert await client.call_utility_all_async("count") == [1, 1, 1]
            await client.call_utility_async("echo", rank=1)
            assert await client.call_utility_all_async("count") == [1, 2, 1]
            assert await client.call_utility_consensus_async("echo", 5) == [[5], {}]
            with pytest.raises(UtilityError, match=r"do not agree on 'count'.*\[2, 3, 2\]"):
                await client.call_utility_consensus_async("count")
            with pytest.raises(ValueError, match="no engine core of rank 3"):
                await client.call_utility_async("pid", rank=3)
            with pytest.raises(UtilityError, match="no such thing"):
                await client.call_utility_async("boom")
            assert client.stats()["utility_calls"] == 0
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())


def test_external_balancing_one_front_end_a_rank(run: Run) -> None:
    async def main() -> None:
        group = await asyncio.to_thread(launch_engines, mock(2, parallel={"balancing": "external", "client_count": 2}))
        try:
            llms = [AsyncLLM(addresses=group.addresses, client_index=index) for index in range(2)]
            await asyncio.gather(*(llm.start() for llm in llms))
            pids = [engine.pid for engine in group.engines]
            assert [llm.client.core_engines[0].pid for llm in llms] == pids
            assert await asyncio.gather(*(read(llm, 20) for llm in llms for _ in range(5))) == [ALPHABET[:20]] * 10
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="rank 1"):
                await llms[1].wait_for_state(EngineState.RESTARTING, rank=1)
            assert await read(llms[0], 20) == ALPHABET[:20]  # the other rank is nothing to it
            await asyncio.gather(*(llm.shutdown() for llm in llms))
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


def test_four_ranks_and_three_front_ends_with_two_hundred_requests_each(run: Run) -> None:
    async def main() -> None:
        config = mock(4, parallel={"client_count": 3}, step_ms=1.0)
        group = await asyncio.to_thread(launch_engines, config)
        try:
            llms = [AsyncLLM(addresses=group.addresses, client_index=index) for index in range(3)]
            await asyncio.gather(*(llm.start() for llm in llms))
            counts = [20 + index % 37 for index in range(200)]
            # The same names everywhere: they are the front end's own.
            tasks = [read(llm, count, f"r{index}") for llm in llms for index, count in enumerate(counts)]
            results = await asyncio.gather(*tasks)
            assert results == [ALPHABET[:count] for count in counts] * 3
            for llm in llms:
                assert llm.client.stats()["requests"] == 0
                assert llm.client.stats()["dropped"] == {}
            await asyncio.gather(*(llm.shutdown() for llm in llms))
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


def test_the_same_id_in_two_front_ends_and_one_aborted(run: Run) -> None:
    async def main() -> None:
        group = await asyncio.to_thread(launch_engines, mock(2, parallel={"client_count": 2}))
        try:
            async with (
                AsyncLLM(addresses=group.addresses, client_index=0) as one,
                AsyncLLM(addresses=group.addresses, client_index=1) as other,
            ):
                aborted = asyncio.create_task(read(one, 100_000, "same"))
                stays = asyncio.create_task(read(other, 200, "same"))
                await until(lambda: one.client.stats()["requests"] and other.client.stats()["requests"])
                await one.abort("same")
                assert len(await aborted) < 100_000
                assert await stays == ALPHABET[:200]
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


# --- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [0, 3])
def test_one_of_four_ranks_killed_under_load(run: Run, restarts: int) -> None:
    async def main() -> None:
        async with AsyncLLM(mock(4, restarts=restarts)) as llm:
            client = dplb(llm)
            tasks = [asyncio.create_task(read(llm, 400)) for _ in range(80)]
            await until(lambda: llm.client.stats()["requests"] == 80)
            ranks = Counter(client._pending.ranks.values())
            assert ranks == {0: 20, 1: 20, 2: 20, 3: 20}
            calls = [asyncio.create_task(client.call_utility_async("get_stats", rank=rank)) for rank in range(4)]
            await asyncio.gather(*calls)
            await asyncio.sleep(0.1)
            started = time.monotonic()
            os.kill(client.core_engines[2].pid, signal.SIGKILL)
            await until(lambda: sum(task.done() for task in tasks) == 20)
            assert time.monotonic() - started < 1
            results = await asyncio.gather(*tasks, return_exceptions=True)
            lost = [one for one in results if isinstance(one, EngineRestartedError)]
            assert len(lost) == 20
            assert {(one.rank, one.retryable) for one in lost} == {(2, True)}
            assert [one for one in results if not isinstance(one, Exception)] == [ALPHABET[:400]] * 60
            await llm.check_health()  # degraded or whole, it serves
            if restarts:
                async with asyncio.timeout(3):
                    await client.wait_for_state(EngineState.READY, rank=2)
                more = [asyncio.create_task(read(llm, 50)) for _ in range(8)]
                await until(lambda: llm.client.stats()["requests"] == 8)
                assert client.lb_engines == {0: 2, 1: 2, 2: 2, 3: 2}
                assert await asyncio.gather(*more) == [ALPHABET[:50]] * 8
            else:
                assert client.engine_status[2].state is EngineState.DEAD
                assert await asyncio.gather(*(read(llm, 50) for _ in range(9))) == [ALPHABET[:50]] * 9
                with pytest.raises(EngineDeadError, match="rank 2"):
                    client.add_request(EngineCoreRequest(request_id="x", prompt_token_ids=[1], data_parallel_rank=2))

    run(main())


def test_the_last_rank_to_die_ends_the_client(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(mock(2)) as llm:
            for engine in llm.client.core_engines:
                os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await llm.wait_for_state(EngineState.RESTARTING)
            with pytest.raises(EngineDeadError):
                await read(llm, 1)
            with pytest.raises(EngineDeadError):
                await llm.check_health()

    run(main())


def test_requests_of_a_dead_rank_move_to_another(run: Run) -> None:
    """Those without a token anew, those with tokens behind them; nothing is lost or repeated."""

    async def main() -> None:
        async with AsyncLLM(mock(3, in_flight="resume", max_num_seqs=5, step_ms=2.0)) as llm:
            client = dplb(llm)
            tasks = [asyncio.create_task(read(llm, 150)) for _ in range(30)]
            await until(lambda: llm.client.stats()["requests"] == 30)
            await asyncio.sleep(0.1)
            os.kill(client.core_engines[1].pid, signal.SIGKILL)
            assert await asyncio.gather(*tasks) == [ALPHABET[:150]] * 30
            assert client.lb_engines == {0: 0, 1: 0, 2: 0}

    run(main())


def test_a_stopped_rank_holds_up_nobody_else(run: Run) -> None:
    """Its outbox holds what the socket does not take; sends to others go on, and the loop does not spin."""

    async def main() -> None:
        from outboard import TransportConfig

        config = EngineConfig(
            engine="mock",
            options={"step_ms": 1.0},
            parallel=ParallelConfig(data_parallel_size=2),
            transport=TransportConfig(high_water_mark=5),
        )
        client = await DPLBAsyncMPClient.launch(config)
        llm_tokens: Counter[str] = Counter()
        try:
            pids = [engine.pid for engine in client.core_engines]
            os.kill(pids[1], signal.SIGSTOP)
            for index in range(300):
                client.add_request(
                    EngineCoreRequest(
                        request_id=f"{index}",
                        prompt_token_ids=[1] * 2000,
                        sampling_params=tokens(20),
                        data_parallel_rank=index % 2,
                    )
                )
            here = psutil.Process()
            cpu = sum(here.cpu_times()[:2])
            started = time.monotonic()
            while len(llm_tokens) < 150 or set(llm_tokens.values()) != {20}:
                message = await asyncio.wait_for(client.get_output_async(), 10)
                for output in message.outputs:
                    llm_tokens[output.request_id] += len(output.new_token_ids)
            assert all(int(request_id) % 2 == 0 for request_id in llm_tokens)
            assert client.stats()["outbox"] > 0
            await asyncio.sleep(1)
            assert sum(here.cpu_times()[:2]) - cpu < 0.6 * (time.monotonic() - started)
            os.kill(pids[1], signal.SIGCONT)
            while len(llm_tokens) < 300 or set(llm_tokens.values()) != {20}:
                message = await asyncio.wait_for(client.get_output_async(), 10)
                for output in message.outputs:
                    llm_tokens[output.request_id] += len(output.new_token_ids)
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())
