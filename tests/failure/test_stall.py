"""A hung engine core is noticed; a slow, idle, paused or sleeping one is not taken for one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from outboard import (
    AsyncLLM,
    EngineConfig,
    EngineRestartedError,
    EngineStalledError,
    EngineState,
    FaultConfig,
    RestartPolicy,
    SamplingParams,
)
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")


def faulty(stall_timeout: float = 1.0, stall_action: str = "report", restarts: int = 0, **options: Any) -> EngineConfig:
    return EngineConfig(
        engine="outboard.testing:FaultyEngine",
        options=options,
        faults=FaultConfig(
            stall_timeout=stall_timeout,
            stall_action=stall_action,  # type: ignore[arg-type]
            restart=RestartPolicy.on_failure(restarts, backoff=0.05),
            shutdown_timeout=2.0,
        ),
    )


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)


async def count(llm: AsyncLLM, wanted: int) -> int:
    got = 0
    async for output in llm.generate([1], tokens(wanted)):
        got += len(output.outputs[0].token_ids)
    return got


async def stalled(llm: AsyncLLM, within: float) -> tuple[float, Any]:
    started = time.monotonic()
    async with asyncio.timeout(within):
        status = await llm.wait_for_state(EngineState.STALLED)
    return time.monotonic() - started, status.stall


def test_a_stopped_engine_with_work_is_stalled_and_comes_back(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(faulty(step_ms=2.0)) as llm:
            reader = asyncio.create_task(count(llm, 1000))
            while llm.client.scheduler_stats.running < 1:
                await asyncio.sleep(0.01)
            pid = llm.client.core_engines[0].pid
            os.kill(pid, signal.SIGSTOP)
            took, report = await stalled(llm, 2.5)
            assert took < 2  # stall_timeout + 1 s
            assert report.process == "stopped"
            assert report.age >= 1
            with pytest.raises(EngineStalledError, match="stopped"):
                await llm.check_health()
            os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(5):
                await llm.wait_for_state(EngineState.READY)
            await llm.check_health()
            assert await reader == 1000

    run(main())


def test_a_stopped_engine_that_was_idle_is_stalled_once_it_is_asked(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(faulty()) as llm:
            assert await count(llm, 3) == 3
            os.kill(llm.client.core_engines[0].pid, signal.SIGSTOP)
            await asyncio.sleep(2)
            assert llm.client.engine_status[0].state is EngineState.READY  # nobody waits for it
            call = asyncio.create_task(llm.get_stats())
            took, report = await stalled(llm, 3)
            assert took < 2.2
            assert report.process == "stopped"
            os.kill(llm.client.core_engines[0].pid, signal.SIGCONT)
            assert (await call)["running"] == 0

    run(main())


@pytest.mark.parametrize(("kind", "process"), [("sleep", "sleeping"), ("spin", "running"), ("gil", "sleeping")])
def test_a_hang_is_told_with_what_the_process_does_and_where_it_is(run: Run, kind: str, process: str) -> None:
    async def main() -> None:
        config = faulty(hang_in="step", hang_kind=kind, hang_seconds=4.0, at_step=5, step_ms=1.0)
        async with AsyncLLM(config) as llm:
            reader = asyncio.create_task(count(llm, 20))
            _, report = await stalled(llm, 3)
            assert report.process == process
            assert report.steps == 4
            assert "hang" in report.stack and "step" in report.stack  # names of functions, from faulthandler
            assert await reader == 20

    run(main())


def test_a_utility_that_blocks_the_loop_is_a_stall(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(EngineConfig(engine="faulty:CallableEngine", faults=FaultConfig(stall_timeout=0.5))) as llm:
            call = asyncio.create_task(llm.client.call_utility_async("block", 3.0))
            _, report = await stalled(llm, 2)
            assert "block" in report.stack
            assert await call == "done"

    run(main())


def test_a_hung_engine_is_killed_and_started_again_where_the_policy_says_so(run: Run) -> None:
    async def main() -> None:
        config = faulty(0.5, "restart", 3, hang_in="step", hang_kind="gil", at_step=5, step_ms=1.0)
        async with AsyncLLM(config) as llm:
            with pytest.raises(EngineRestartedError, match=r"made no progress for .* s, after 4 steps.* killed"):
                await count(llm, 20)
            async with asyncio.timeout(5):
                assert await count(llm, 3) == 3  # step 5 of the next one hangs too
            assert llm.client.core_engines[0].incarnation == 1

    run(main())


def test_what_is_no_hang(run: Run) -> None:
    """Deferred calls, idleness, pauses, a step that says that it is alive, and a blocked loop of our own."""

    async def main() -> None:
        states: list[EngineState] = []
        config = EngineConfig(engine="faulty:SlowStepEngine", faults=FaultConfig(stall_timeout=0.6))
        async with AsyncLLM(config) as llm:
            llm.client.subscribe(lambda status: states.append(status.state))
            never = asyncio.create_task(llm.client.call_utility_async("never"))
            await asyncio.sleep(1.5)  # idle, with a call that is not answered
            await llm.pause_generation("keep")
            held = asyncio.create_task(count(llm, 2))
            await asyncio.sleep(1.5)  # paused, with a request that waits
            await llm.resume_generation()
            assert await held == 2
            assert await llm.client.call_utility_async("slow_steps", 2.0) is None
            assert await count(llm, 1) == 1  # takes 2 s, but calls progress()
            await llm.client.call_utility_async("slow_steps", 0.0)
            reader = asyncio.create_task(count(llm, 3000))
            await asyncio.sleep(0.05)
            time.sleep(1.5)  # our own loop is blocked, while the engine works
            assert await reader == 3000
            never.cancel()
        assert EngineState.STALLED not in states

    run(main())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_long_step_under_a_longer_timeout_and_a_minute_of_idleness() -> None:
    async def main() -> None:
        states: list[EngineState] = []
        config = faulty(30.0, hang_in="step", hang_kind="spin", hang_seconds=10.0)
        async with AsyncLLM(config) as llm:
            llm.client.subscribe(lambda status: states.append(status.state))
            assert await count(llm, 5) == 5
            await asyncio.sleep(60)
            assert await count(llm, 5) == 5
        assert EngineState.STALLED not in states

    asyncio.run(main())
