"""The coordinator's end, and its return: nobody's requests know of it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import pytest

from outboard import (
    AsyncLLM,
    DPLBAsyncMPClient,
    EngineConfig,
    EngineCoreRequest,
    EngineState,
    FaultConfig,
    ParallelConfig,
    RestartPolicy,
    SamplingParams,
    launch_engines,
)
from outboard.launch.group import EngineGroup
from support import Run, children

pytestmark = pytest.mark.usefixtures("nothing_left")

ALPHABET = [97 + i % 26 for i in range(5000)]


def config(engine: str = "mock", ranks: int = 3, front_ends: int = 2, **options: Any) -> EngineConfig:
    return EngineConfig(
        engine=engine,
        options=options or {"step_ms": 2.0},
        parallel=ParallelConfig(data_parallel_size=ranks, client_count=front_ends),
    )


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(15):
        while not (value := condition()):
            await asyncio.sleep(0.005)
        return value


async def read(llm: AsyncLLM, count: int) -> list[int]:
    got: list[int] = []
    async for output in llm.generate([1], SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)):
        got += output.outputs[0].token_ids
    return got


def dplb(llm: AsyncLLM) -> DPLBAsyncMPClient:
    assert isinstance(llm.client, DPLBAsyncMPClient)
    return llm.client


def hears(llm: AsyncLLM) -> int:
    """The incarnation of the coordinator whose publications this front end has last heard."""
    return dplb(llm)._table._version[0]


async def kill_coordinator(group: EngineGroup, *llms: AsyncLLM) -> None:
    """Kills it, and waits until its successor is heard by all."""
    facts = await until(lambda: (group.stats()["coordinator"] or {}).get("pid") and group.stats()["coordinator"])
    os.kill(facts["pid"], signal.SIGKILL)
    for llm in llms:
        await until(lambda llm=llm: hears(llm) == facts["incarnation"] + 1)


@pytest.mark.parametrize("engine", ["mock", "lockstep_mock"])
def test_killed_under_load_no_request_fails(run: Run, engine: str) -> None:
    async def main() -> None:
        group = await asyncio.to_thread(launch_engines, config(engine))
        try:
            async with (
                AsyncLLM(addresses=group.addresses, client_index=0) as one,
                AsyncLLM(addresses=group.addresses, client_index=1) as other,
            ):
                counts = [100 + 37 * index % 900 for index in range(60)]
                tasks = [asyncio.create_task(read(llm, count)) for count in counts for llm in (one, other)]
                await until(lambda: hears(one) == 0)
                for _ in range(2):
                    await kill_coordinator(group, one, other)
                    more = [asyncio.create_task(read(llm, 30)) for llm in (one, other)]
                    assert await asyncio.gather(*more) == [ALPHABET[:30]] * 2
                assert await asyncio.gather(*tasks) == [ALPHABET[:count] for count in counts for _ in range(2)]
                assert not one.client.stats()["dropped"]
                if engine == "lockstep_mock":
                    await until(lambda: not dplb(one).engines_running and not dplb(other).engines_running)
        finally:
            await asyncio.to_thread(group.shutdown)
        assert group.stats()["coordinator"]["incarnation"] == 2

    run(main())


def test_killed_while_a_lockstep_group_rests(run: Run) -> None:
    """Its successor hears from all, and waves go on where they were; also one that begins before it is there."""

    async def main() -> None:
        group = await asyncio.to_thread(launch_engines, config("lockstep_mock", front_ends=1))
        try:
            async with AsyncLLM(addresses=group.addresses) as llm:
                client = dplb(llm)
                for _ in range(3):
                    before = client.current_wave
                    assert await read(llm, 20) == ALPHABET[:20]
                    await until(lambda before=before: client.current_wave > before and not client.engines_running)
                    # The successor wakes the ranks until it has heard of all: that may be a wave without a step.
                    await kill_coordinator(group, llm)
                for _ in range(3):
                    facts = group.stats()["coordinator"]
                    os.kill(facts["pid"], signal.SIGKILL)
                    assert await read(llm, 20) == ALPHABET[:20]  # sent while there is none
                    await until(lambda facts=facts: hears(llm) == facts["incarnation"] + 1)
                async with asyncio.timeout(15):
                    places: set[Any] = set()
                    while places != {("idle", client.current_wave)} or client.engines_running:
                        stats = await client.call_utility_all_async("get_stats")
                        places = {(one["phase"], one["wave"]) for one in stats}
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


@pytest.mark.parametrize("then", ["resumed", "a rank killed, then resumed"])
def test_killed_while_a_lockstep_group_is_paused(run: Run, then: str) -> None:
    async def main() -> None:
        faults = FaultConfig(restart=RestartPolicy.on_failure(1, backoff=0.05), in_flight="resume")
        paused = msgspec.structs.replace(config("lockstep_mock", front_ends=1), faults=faults)
        group = await asyncio.to_thread(launch_engines, paused)
        try:
            async with AsyncLLM(addresses=group.addresses) as llm:
                client = dplb(llm)
                tasks = [asyncio.create_task(read(llm, 300)) for _ in range(6)]
                await until(lambda: client.engines_running)
                await client.call_utility_async("pause_generation", "keep", timeout=10)
                await kill_coordinator(group, llm)
                await until(lambda: client._membership.coordination.waves.paused)
                if then != "resumed":
                    os.kill(client.core_engines[1].pid, signal.SIGKILL)
                    await until(lambda: [one.incarnation for one in client.core_engines] == [1, 1, 1])
                    async with asyncio.timeout(10):
                        for rank in range(3):
                            await client.wait_for_state(EngineState.READY, rank=rank)
                    await until(lambda: client._membership.coordination.waves.group == 1)
                await asyncio.sleep(0.1)
                assert not any(task.done() for task in tasks)
                await client.call_utility_async("resume_generation", timeout=10)
                assert await asyncio.gather(*tasks) == [ALPHABET[:300]] * 6
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


def test_front_ends_hear_of_each_others_load(run: Run) -> None:
    """One loads a rank; the other, which has sent nothing, avoids it."""

    async def main() -> None:
        group = await asyncio.to_thread(launch_engines, config(ranks=2, step_ms=20.0))
        try:
            async with (
                AsyncLLM(addresses=group.addresses, client_index=0) as one,
                AsyncLLM(addresses=group.addresses, client_index=1) as other,
            ):
                for index in range(20):
                    request = EngineCoreRequest(request_id=f"r{index}", prompt_token_ids=[1], data_parallel_rank=0)
                    request.sampling_params.max_tokens = 5000
                    one.client.add_request(request)
                await until(lambda: dplb(other)._table.loads[0] >= 20)
                tasks = [asyncio.create_task(read(other, 5)) for _ in range(8)]
                await until(lambda: other.client.stats()["requests"] == 8)
                assert dplb(other).lb_engines == {0: 0, 1: 8}
                await asyncio.gather(*tasks)
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


def test_no_message_of_load_alone_where_there_is_a_coordinator(run: Run) -> None:
    async def main() -> None:
        group = await asyncio.to_thread(launch_engines, config())
        try:
            async with (
                AsyncLLM(addresses=group.addresses, client_index=0) as one,
                AsyncLLM(addresses=group.addresses, client_index=1) as idle,
            ):
                await until(lambda: hears(one) == hears(idle) == 0)
                before = idle.client.stats()["received"]
                await asyncio.gather(*(read(one, 100) for _ in range(30)))
                await until(lambda: sum(dplb(idle)._table.loads) == 0)
                assert idle.client.stats()["received"] == before
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


def test_a_client_that_is_dropped_ends_all_of_it(run: Run) -> None:
    """What follows the coordinator holds no client."""

    async def main() -> None:
        client = await DPLBAsyncMPClient.launch(config("lockstep_mock", front_ends=1))
        waves = client._membership.coordination.waves
        await until(lambda: waves.group == 0)
        dropped = weakref.ref(client)
        del client
        gc.collect()
        assert dropped() is None
        await until(lambda: not children())

    run(main())


def test_it_ends_with_the_launcher(short_tmp: Any) -> None:
    group = launch_engines(config())
    process = psutil.Process(group.stats()["coordinator"]["pid"])
    assert "outboard.dp.coordinator" in process.cmdline()
    group.shutdown()
    assert not process.is_running()
