"""`submit`: whoever drops the AsyncLLM as well is never told the end; a shutdown inside `on_output` is told twice."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from outboard import AsyncLLM, OutboardError


def test_the_end_is_told_although_nobody_holds_anything() -> None:
    async def main() -> tuple[list[Any], list[str]]:
        seen: list[Any] = []
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))

        async def start() -> None:
            llm = AsyncLLM("echo", options={"step_ms": 20})
            await llm.submit("hello world", None, seen.append)

        await start()
        for _ in range(20):
            gc.collect()
            await asyncio.sleep(0.05)
        return seen, complaints

    seen, complaints = asyncio.run(main())
    assert complaints == []
    assert seen and (isinstance(seen[-1], OutboardError) or seen[-1].finished)


def test_a_shutdown_inside_the_callback_is_told_once() -> None:
    async def main() -> list[Any]:
        seen: list[Any] = []
        llm = AsyncLLM("echo", options={"step_ms": 20})

        def on_output(output: Any) -> None:
            seen.append(output)
            if len(seen) == 1:
                llm.client.shutdown(0)

        await llm.submit("hello world", None, on_output)
        await asyncio.sleep(1)
        return seen

    assert sum(isinstance(output, OutboardError) for output in asyncio.run(main())) == 1
