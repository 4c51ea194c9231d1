"""A stream that is dropped while its loop does not run is never aborted."""

from __future__ import annotations

import asyncio
import gc

from outboard import AsyncLLM, RequestStream, SamplingParams


def test_a_stream_dropped_between_two_runs_of_the_loop() -> None:
    with asyncio.Runner() as runner:
        llm = AsyncLLM("mock", options={"step_ms": 5, "max_model_len": 1_000_000})
        runner.run(llm.start())
        stream = llm.generate([1], SamplingParams(max_tokens=None))

        async def first(stream: RequestStream) -> None:
            await anext(stream)

        runner.run(first(stream))
        del stream
        gc.collect()

        async def requests() -> int:
            await asyncio.sleep(0.3)
            return llm.client.stats()["requests"]

        left = runner.run(requests())
        runner.run(llm.shutdown())
    assert left == 0
