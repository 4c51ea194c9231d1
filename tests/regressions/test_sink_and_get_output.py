"""`get_output_async` hangs for ever after an engine's death where a sink is, or was, set."""

from __future__ import annotations

import asyncio
import os
import signal

from outboard import AsyncMPClient, EngineDeadError


async def _outcome(waiting: asyncio.Future[object]) -> str:
    try:
        async with asyncio.timeout(2):
            while True:
                await waiting
                return "message"
    except TimeoutError:
        return "still waiting"
    except (EngineDeadError, RuntimeError) as error:
        return type(error).__name__


def test_a_sink_that_is_taken_away_after_the_death() -> None:
    async def main() -> str:
        client = await AsyncMPClient.launch("echo")
        seen: list[object] = []
        try:
            client.set_output_sink(seen.append)
            os.kill(client.core_engines[0].pid, signal.SIGKILL)
            async with asyncio.timeout(2):
                while not any(isinstance(message, EngineDeadError) for message in seen):
                    await asyncio.sleep(0.01)
            client.set_output_sink(None)
            return await _outcome(asyncio.ensure_future(client.get_output_async()))
        finally:
            await asyncio.to_thread(client.shutdown, 1)

    assert asyncio.run(main()) == "EngineDeadError"


def test_a_reader_that_waited_before_the_sink_came() -> None:
    async def main() -> str:
        client = await AsyncMPClient.launch("echo")
        try:
            await asyncio.sleep(0.2)
            while not client.outputs_queue.empty():
                await client.get_output_async()
            waiting = asyncio.ensure_future(client.get_output_async())
            await asyncio.sleep(0.05)
            client.set_output_sink(lambda message: None)
            os.kill(client.core_engines[0].pid, signal.SIGKILL)
            return await _outcome(waiting)
        finally:
            await asyncio.to_thread(client.shutdown, 1)

    assert asyncio.run(main()) in ("EngineDeadError", "RuntimeError")
