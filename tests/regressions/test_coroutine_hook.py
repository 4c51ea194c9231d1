"""A coroutine hook: its end is unnoticed, a death overtakes what waits for it, and its task is left pending."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from typing import Any

from outboard import AsyncMPClient, EngineConfig, EngineCoreRequest, EngineDeadError, SamplingParams


class Hooked(AsyncMPClient):
    async def process_engine_outputs(self, outputs: Any) -> None:
        await asyncio.sleep(0.02)


def test_cancelling_all_tasks_surfaces() -> None:
    async def main() -> str:
        client = await Hooked.launch("echo")
        try:
            me = asyncio.current_task()
            for task in asyncio.all_tasks():
                if task is not me:
                    task.cancel()
            await asyncio.sleep(0)
            try:
                client.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[1]))
                await asyncio.wait_for(client.get_output_async(), 2)
                return "message"
            except TimeoutError:
                return "still waiting"
            except EngineDeadError:
                return "EngineDeadError"
        finally:
            await asyncio.to_thread(client.shutdown, 1)

    assert asyncio.run(main()) == "EngineDeadError"


def test_what_arrived_before_the_death_can_be_read() -> None:
    async def main() -> tuple[int, int]:
        client = await Hooked.launch(EngineConfig(engine="echo", options={"step_ms": 5}))
        try:
            params = SamplingParams(max_tokens=100)
            client.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[1] * 100, sampling_params=params))
            while client.stats()["received"] < 30:
                await asyncio.sleep(0.01)
            received = client.stats()["received"]
            os.kill(client.core_engines[0].pid, signal.SIGKILL)
            count = 0
            try:
                while True:
                    await asyncio.wait_for(client.get_output_async(), 5)
                    count += 1
            except EngineDeadError:
                return received, count
        finally:
            await asyncio.to_thread(client.shutdown, 1)

    received, count = asyncio.run(main())
    assert count >= received


def test_a_dropped_client_leaves_no_pending_task() -> None:
    async def main() -> list[str]:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        client = await Hooked.launch("echo")
        del client
        for _ in range(20):
            gc.collect()
            await asyncio.sleep(0.05)
        return complaints

    assert asyncio.run(main()) == []
