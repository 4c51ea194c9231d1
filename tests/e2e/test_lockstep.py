"""Lockstep groups with real processes: ranks that hang where they do not step together."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from outboard import (
    AsyncLLM,
    ConfigError,
    DPAsyncMPClient,
    DPLBAsyncMPClient,
    EngineConfig,
    EngineCoreRequest,
    EngineDeadError,
    EngineRestartedError,
    EngineState,
    FaultConfig,
    ParallelConfig,
    RestartPolicy,
    SamplingParams,
    launch_engines,
)
from support import Run, children

pytestmark = pytest.mark.usefixtures("nothing_left")

ALPHABET = [97 + i % 26 for i in range(5000)]
LLM = AsyncLLM


def lockstep(
    size: int = 3,
    *,
    engine: Any = "lockstep_mock",
    restarts: int = 0,
    faults: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    **options: Any,
) -> EngineConfig:
    return EngineConfig(
        engine=engine,
        options=options or {"step_ms": 1.0},
        parallel=ParallelConfig(data_parallel_size=size, **{"dp_sync_interval": 8, **(parallel or {})}),
        faults=FaultConfig(
            restart=RestartPolicy.on_failure(restarts, backoff=0.05), shutdown_timeout=5.0, **(faults or {})
        ),
    )


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)


async def read(llm: AsyncLLM, count: int) -> list[int]:
    got: list[int] = []
    async for output in llm.generate([1], tokens(count)):
        got += output.outputs[0].token_ids
    return got


def client_of(llm: AsyncLLM) -> Any:
    assert isinstance(llm.client, (DPLBAsyncMPClient, DPAsyncMPClient))
    return llm.client


async def until(condition: Callable[[], Any], timeout: float = 15) -> Any:
    async with asyncio.timeout(timeout):
        while not (value := condition()):
            await asyncio.sleep(0.005)
        return value


def steps(llm: AsyncLLM) -> list[int]:
    """Steps that the engine cores have taken, dummies included, by their progress pages."""
    return [link.stall.progress()[0] for _, link in sorted(client_of(llm)._membership.links.items())]


def pin(llm: AsyncLLM, rank: int, count: int) -> None:
    """A request to this rank whose outputs nobody reads."""
    llm.client.add_request(
        EngineCoreRequest(
            request_id=f"pinned {time.monotonic_ns()}",
            prompt_token_ids=[1],
            sampling_params=tokens(count),
            data_parallel_rank=rank,
        )
    )


async def at_rest(llm: AsyncLLM, size: int = 3) -> list[dict[str, Any]]:
    """Waits until all ranks are idle before the same wave and no step is taken; what they say of themselves."""
    async with asyncio.timeout(15):
        while True:
            stats = await client_of(llm).call_utility_all_async("get_stats")
            if all(one["phase"] == "idle" for one in stats) and len({one["wave"] for one in stats}) == 1:
                break
            await asyncio.sleep(0.01)
    assert len(stats) == size
    before = steps(llm)
    assert len(set(before)) == 1, before  # every one of them together
    await asyncio.sleep(0.1)
    assert steps(llm) == before
    return list(stats)


def test_a_request_to_one_rank_makes_all_step_and_then_all_rest(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(lockstep()) as llm:
            assert steps(llm) == [0, 0, 0]
            for wave, rank in enumerate((1, 0, 2)):
                assert (await at_rest(llm))[0]["wave"] == wave
                before = steps(llm)[0]
                pin(llm, rank, 40)
                await until(lambda: not llm.client.stats()["requests"])
                stats = await at_rest(llm)
                assert stats[0]["wave"] == wave + 1
                taken = steps(llm)[0] - before
                assert 40 <= taken <= 40 + 2 * 8  # dummies up to the next reduction, and to the one that ends it
            waves = client_of(llm)
            await until(lambda: waves.current_wave == 3 and not waves.engines_running)

    run(main())


def test_three_ranks_two_front_ends_fifty_requests_each(run: Run) -> None:
    async def main() -> None:
        group = await asyncio.to_thread(launch_engines, lockstep(parallel={"client_count": 2}))
        try:
            async with (
                AsyncLLM(addresses=group.addresses, client_index=0) as one,
                AsyncLLM(addresses=group.addresses, client_index=1) as other,
            ):
                for _ in range(2):
                    counts = [1 + 7 * index % 90 for index in range(50)]
                    tasks = [asyncio.create_task(read(llm, count)) for count in counts for llm in (one, other)]
                    await until(lambda: client_of(one).engines_running or client_of(one).current_wave)
                    assert await asyncio.gather(*tasks) == [ALPHABET[:count] for count in counts for _ in range(2)]
                    await at_rest(one)
                for llm in (one, other):
                    assert client_of(llm).lb_engines == {0: 0, 1: 0, 2: 0}
                    assert llm.client.stats()["dropped"] == {}
            assert group.stats()["dropped"] == {}
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


def test_requests_now_and_then_while_waves_end_and_begin(run: Run) -> None:
    """Requests of one token to random ranks, as the group comes to rest again and again."""

    async def main() -> None:
        async with AsyncLLM(lockstep(parallel={"dp_sync_interval": 1}, step_ms=0.0)) as llm:
            for index in range(300):
                pin(llm, index * 7 % 3, 1 + index % 3)
                if index % 3 == 0:
                    await until(lambda: not llm.client.stats()["requests"])
            await until(lambda: not llm.client.stats()["requests"])
            stats = await at_rest(llm)
            assert stats[0]["wave"] > 30

    run(main())


# --- pauses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_pause_and_resume(run: Run, mode: str) -> None:
    async def main() -> None:
        async with AsyncLLM(lockstep(step_ms=2.0)) as llm:
            client = client_of(llm)
            tasks = [asyncio.create_task(read(llm, 150)) for _ in range(9)]
            await until(lambda: steps(llm)[0] > 20)
            await client.call_utility_async("pause_generation", mode, timeout=10)
            if mode != "wait":
                assert len(set(steps(llm))) == 1, "answered before all rested"
            stats = await at_rest(llm)
            if mode == "keep":
                assert not any(task.done() for task in tasks)
            assert [one["paused"] for one in stats] == [True] * 3
            late = asyncio.create_task(read(llm, 5))
            before = steps(llm)
            await asyncio.sleep(0.2)
            assert steps(llm) == before
            assert not late.done()
            await client.call_utility_async("resume_generation", timeout=10)
            assert await late == ALPHABET[:5]
            results = await asyncio.gather(*tasks)
            if mode == "abort":
                assert all(result == ALPHABET[: len(result)] for result in results)
                assert max(map(len, results)) < 150
            else:
                assert results == [ALPHABET[:150]] * 9
            assert not any(one["paused"] for one in await at_rest(llm))

    run(main())


def test_one_rank_is_asked_to_pause_and_all_do(run: Run) -> None:
    async def main() -> None:
        group = await asyncio.to_thread(
            launch_engines, lockstep(2, parallel={"client_count": 2, "balancing": "external"}, step_ms=2.0)
        )
        try:
            async with (
                AsyncLLM(addresses=group.addresses, client_index=0) as one,
                AsyncLLM(addresses=group.addresses, client_index=1) as other,
            ):
                task = asyncio.create_task(read(other, 200))
                await until(lambda: steps(other)[0] > 20)
                await client_of(one).call_utility_async("pause_generation", "keep", timeout=10)
                before = await until(lambda: steps(one) == steps(other) and steps(one))
                await asyncio.sleep(0.2)
                assert steps(one) == steps(other) == before
                assert await client_of(other).call_utility_async("is_paused")
                assert not task.done()
                # Over a pause of its own and many resumes by the other one, the last word counts.
                await client_of(other).call_utility_async("resume_generation", timeout=10)
                assert await task == ALPHABET[:200]
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


# --- several front ends ----------------------------------------------------------------------------------------------


def test_external_balancing_follows_waves(run: Run) -> None:
    async def main() -> None:
        group = await asyncio.to_thread(
            launch_engines, lockstep(2, parallel={"client_count": 2, "balancing": "external"})
        )
        try:
            async with (
                AsyncLLM(addresses=group.addresses, client_index=0) as one,
                AsyncLLM(addresses=group.addresses, client_index=1) as other,
            ):
                assert isinstance(one.client, DPAsyncMPClient)
                tasks = [asyncio.create_task(read(one, 300)) for _ in range(5)]
                await until(lambda: client_of(other).engines_running)  # it has sent nothing itself
                assert await asyncio.gather(*tasks) == [ALPHABET[:300]] * 5
                await until(lambda: client_of(other).current_wave == 1 and not client_of(other).engines_running)
                assert await read(other, 30) == ALPHABET[:30]
                await until(lambda: client_of(one).current_wave == 2 and not client_of(one).engines_running)
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


_SCRIPT = """
import asyncio, sys, msgspec
from outboard import DPLBAsyncMPClient, EngineCoreRequest, SamplingParams
from outboard.launch.group import EngineAddresses
addresses = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineAddresses)
async def main():
    client = await DPLBAsyncMPClient.launch(addresses=addresses, client_index=1)
    for index in range(30):
        params = SamplingParams(max_tokens=100000)
        client.add_request(EngineCoreRequest(request_id=f"{index}", prompt_token_ids=[1], sampling_params=params))
    while True:
        await client.get_output_async()
        print("x", flush=True)
asyncio.run(main())
"""


def test_a_front_end_killed_in_a_wave_and_replaced(run: Run) -> None:
    async def main() -> None:
        group = await asyncio.to_thread(launch_engines, lockstep(parallel={"client_count": 2}, step_ms=2.0))
        try:
            async with AsyncLLM(addresses=group.addresses, client_index=0) as one:
                addresses = msgspec.msgpack.encode(group.addresses)
                other = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", _SCRIPT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                assert other.stdin is not None and other.stdout is not None
                other.stdin.write(addresses)
                other.stdin.close()
                assert await other.stdout.readline() == b"x\n"
                task = asyncio.create_task(read(one, 200))
                await until(lambda: one.client.stats()["requests"])
                other.kill()
                await other.communicate()
                assert await task == ALPHABET[:200]
                await at_rest(one)  # what the dead one wanted is wanted no more
                async with AsyncLLM(addresses=group.addresses, client_index=1) as new:
                    assert await asyncio.gather(*(read(new, 40) for _ in range(6))) == [ALPHABET[:40]] * 6
                    await until(lambda: not client_of(new).engines_running and client_of(new).current_wave == 2)
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


# --- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["fail", "resubmit", "resume"])
def test_a_rank_killed_and_all_start_again(run: Run, in_flight: str) -> None:
    async def main() -> None:
        async with AsyncLLM(lockstep(restarts=2, faults={"in_flight": in_flight}, step_ms=2.0)) as llm:
            client = client_of(llm)
            for incarnation in (1, 2):
                pids = [engine.pid for engine in client.core_engines]
                before = steps(llm)[0]
                tasks = [asyncio.create_task(read(llm, 150)) for _ in range(12)]
                await until(lambda before=before: steps(llm)[0] > before + 20)
                os.kill(pids[incarnation], signal.SIGKILL)
                results = await asyncio.gather(*tasks, return_exceptions=True)
                if in_flight == "resume":
                    assert results == [ALPHABET[:150]] * 12
                else:  # all had tokens
                    assert all(isinstance(one, EngineRestartedError) and one.retryable for one in results)
                    assert {one.rank for one in results} == {0, 1, 2}
                    assert sum("was ended with its lockstep group" in str(one) for one in results) == 8
                async with asyncio.timeout(15):
                    for rank in range(3):
                        await client.wait_for_state(EngineState.READY, rank=rank)
                assert [engine.incarnation for engine in client.core_engines] == [incarnation] * 3
                assert not {engine.pid for engine in client.core_engines} & set(pids)
                assert await asyncio.gather(*(read(llm, 30) for _ in range(6))) == [ALPHABET[:30]] * 6
                await at_rest(llm)
            os.kill(client.core_engines[0].pid, signal.SIGKILL)  # the budget is counted once a group: now it is spent
            with pytest.raises(EngineDeadError, match="2 restarts"):
                async with asyncio.timeout(10):
                    await client.wait_for_state(EngineState.READY, EngineState.DEAD, rank=1)
                    while True:
                        await read(llm, 1)

    run(main())


def test_requests_that_had_no_token_are_sent_anew_once(run: Run) -> None:
    """The group is told of as one: nobody's request goes to a rank that is about to be ended."""

    async def main() -> None:
        async with AsyncLLM(lockstep(restarts=1, faults={"in_flight": "resubmit"}, step_ms=300.0)) as llm:
            tasks = [asyncio.create_task(read(llm, 3)) for _ in range(12)]
            await until(lambda: llm.client.stats()["requests"] == 12)
            os.kill(client_of(llm).core_engines[2].pid, signal.SIGKILL)
            assert await asyncio.gather(*tasks) == [ALPHABET[:3]] * 12

    run(main())


def test_all_are_told_of_at_once_and_none_begins_before_all_have_ended(run: Run) -> None:
    """The wardens of two ranks are stopped, so that these take 2 s to end."""

    async def main() -> None:
        async with AsyncLLM(lockstep(restarts=1, faults={"in_flight": "resubmit"}, step_ms=500.0)) as llm:
            client = client_of(llm)
            tasks = [asyncio.create_task(read(llm, 3)) for _ in range(12)]
            await until(lambda: llm.client.stats()["requests"] == 12)
            pids = [engine.pid for engine in client.core_engines]
            left: list[int] = []  # when the first begins again
            client.subscribe(
                lambda status: left.extend(pid for pid in pids if status.incarnation and psutil.pid_exists(pid))
            )
            for pid in pids[:2]:
                keeper = psutil.Process(pid).parent()
                assert keeper is not None
                keeper.suspend()
            os.kill(pids[2], signal.SIGKILL)
            await until(lambda: {one.state for one in client.engine_status} == {EngineState.RESTARTING}, timeout=1)
            assert psutil.pid_exists(pids[0])
            assert await asyncio.gather(*tasks) == [ALPHABET[:3]] * 12
            assert [engine.incarnation for engine in client.core_engines] == [1, 1, 1]
            assert not left

    run(main())


def test_a_rank_that_is_told_to_stop_goes_on_to_the_end_of_the_wave(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(lockstep(step_ms=2.0)) as llm:
            pin(llm, 0, 5000)
            await until(lambda: steps(llm)[0] > 20)
            request = EngineCoreRequest(
                request_id="x", prompt_token_ids=[1], sampling_params=tokens(200), data_parallel_rank=1
            )
            got: list[int] = []

            def take(message: Any) -> None:
                if getattr(message, "engine_index", None) == 1:
                    got.extend(message.tokens)

            llm.client.set_output_sink(take)
            llm.client.add_request(request)
            await until(lambda: got)
            os.kill(client_of(llm).core_engines[0].pid, signal.SIGTERM)
            await until(lambda: llm.client.engine_status[0].death)
            assert got == ALPHABET[:200]
            assert llm.client.engine_status[0].death.exit_code == 0

    run(main())


def test_a_rank_killed_and_no_restart_ends_all(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(lockstep(step_ms=2.0)) as llm:
            tasks = [asyncio.create_task(read(llm, 5000)) for _ in range(6)]
            await until(lambda: steps(llm)[0] > 20)
            os.kill(client_of(llm).core_engines[1].pid, signal.SIGKILL)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, EngineDeadError) for one in results)
            await until(lambda: not [child for child in children() if "outboard.engine" in child.cmdline()])
            with pytest.raises(EngineDeadError):
                await read(llm, 1)

    run(main())


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stopped_rank_ends_the_reduction_of_the_others_with_its_name(run: Run, rank: int) -> None:
    async def main() -> None:
        config = lockstep(parallel={"dp_sync_timeout": 1.0}, step_ms=2.0, barrier_timeout=60.0)
        async with AsyncLLM(config) as llm:
            await at_rest(llm)
            os.kill(client_of(llm).core_engines[rank].pid, signal.SIGSTOP)
            pin(llm, 1, 10)  # the others wait in the reduction that opens a wave
            deaths = await until(lambda: [one.death for one in llm.client.engine_status if one.death is not None])
            assert any(death.remote_type.endswith("ReductionError") for death in deaths)
            assert all(f"rank {rank} did not take part in reduction 1 within 1 s" in death.reason for death in deaths)

    run(main())


def test_a_stopped_rank_is_a_stall_of_those_that_wait_for_it(run: Run) -> None:
    """They wait in a step: that is no sign of life."""

    async def main() -> None:
        config = lockstep(restarts=1, faults={"stall_timeout": 0.6, "stall_action": "restart", "in_flight": "resume"})
        async with AsyncLLM(config) as llm:
            await at_rest(llm)
            client = client_of(llm)
            stalled = []
            client.subscribe(lambda status: stalled.append(status) if status.state is EngineState.STALLED else None)
            os.kill(client.core_engines[2].pid, signal.SIGSTOP)
            assert await read(llm, 20) == ALPHABET[:20]  # by the next incarnation
            assert stalled
            assert [engine.incarnation for engine in client.core_engines] == [1, 1, 1]

    run(main())


def test_an_engine_without_a_dummy_batch_does_not_start(short_tmp: Path) -> None:
    with pytest.raises(ConfigError, match=r"NoDummyBatch has `lockstep = True` but no `execute_dummy_batch"):
        DPLBAsyncMPClient(lockstep(2, engine="faulty:NoDummyBatch", step_ms=1.0))
    assert not children()


@pytest.mark.parametrize("when", ["at rest", "in a wave"])
def test_a_clean_stop(run: Run, when: str) -> None:
    async def main() -> None:
        group = await asyncio.to_thread(launch_engines, lockstep(step_ms=2.0))
        llm = AsyncLLM(addresses=group.addresses)
        await llm.start()
        task = asyncio.create_task(read(llm, 5000)) if when == "in a wave" else None
        if task is not None:
            await until(lambda: steps(llm)[0] > 20)
        started = time.monotonic()
        await asyncio.to_thread(group.shutdown)
        assert time.monotonic() - started < 2
        assert [(one.state, one.death.exit_code) for one in group.engines if one.death] == [
            (EngineState.STOPPED, 0)
        ] * 3
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
        await llm.shutdown()

    run(main())
