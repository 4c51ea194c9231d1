"""To dump the stacks of threads that run crashes the process now and then: a report of a stall killed engine cores."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from outboard import AsyncLLM, EngineConfig, EngineState, FaultConfig
from outboard.engine.stacks import STACK_SIGNAL
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")


def config(**options: object) -> EngineConfig:
    return EngineConfig(engine="outboard.testing:FaultyEngine", options=options, faults=FaultConfig(stall_timeout=0.5))


def pending(pid: int) -> int:
    """The signals that a process has got and not yet taken, as a mask."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd"))


def test_a_stopped_process_is_not_asked(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(config()) as llm:
            pid = llm.client.core_engines[0].pid
            os.kill(pid, signal.SIGSTOP)
            call = asyncio.create_task(llm.get_stats())
            await llm.wait_for_state(EngineState.STALLED)
            assert not pending(pid) & 1 << (STACK_SIGNAL - 1)
            os.kill(pid, signal.SIGCONT)
            await call

    run(main())


def test_only_the_thread_that_hangs_is_looked_at(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(config(hang_in="utility", hang_seconds=1.5)) as llm:
            call = asyncio.create_task(llm.client.call_utility_async("ping"))
            status = await llm.wait_for_state(EngineState.STALLED)
            assert status.stall is not None
            assert "in hang" in status.stall.stack and "poller.py" not in status.stall.stack
            assert await call == "pong"

    run(main())
