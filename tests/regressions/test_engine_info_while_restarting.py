"""What an engine core reported of itself is known while the next incarnation starts: `core_engines` was empty then."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from outboard import AsyncLLM, EngineConfig, EngineState, FaultConfig, RestartPolicy
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_engine_info_while_the_next_incarnation_starts(run: Run) -> None:
    async def main() -> None:
        config = EngineConfig(
            engine="outboard.testing:FaultyEngine",
            options={"slow_start": 0.5},
            faults=FaultConfig(restart=RestartPolicy.on_failure(backoff=0.01)),
        )
        async with AsyncLLM(config) as llm:
            before = llm.engine_info
            starting = asyncio.Event()
            llm.client.subscribe(lambda status: starting.set() if status.incarnation == 1 else None)
            os.kill(llm.client.core_engines[0].pid, signal.SIGKILL)
            await starting.wait()
            assert llm.client.engine_status[0].state is EngineState.RESTARTING
            assert llm.engine_info == before
            assert [engine.rank for engine in llm.client.core_engines] == [0]
            await llm.wait_for_state(EngineState.READY)
            assert llm.engine_info == before

    run(main())
