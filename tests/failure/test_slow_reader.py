"""A slow reader costs memory for its tokens, and nobody else anything."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from outboard import AsyncLLM, EngineConfig, SamplingParams, TransportConfig
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")

ALPHABET = [97 + i % 26 for i in range(26)]


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)


async def slow_and_fast(seconds: float, pause: float) -> None:
    """One stream at 10,000 tokens/s read once a `pause`, others read at once."""
    total = int(10_000 * seconds)
    config = EngineConfig(engine="mock", options={"step_ms": 1.0, "tokens_per_step": 10})
    async with AsyncLLM(config) as llm:
        engine, here = psutil.Process(llm.client.core_engines[0].pid), psutil.Process()

        async def slow() -> list[int]:
            got: list[int] = []
            async for output in llm.generate([1], params(total)):
                got += output.outputs[0].token_ids
                await asyncio.sleep(pause)
            return got

        async def fast() -> int:
            count = 0
            async for output in llm.generate([1], params(total)):
                count += len(output.outputs[0].token_ids)
            return count

        before = here.memory_info().rss, engine.memory_info().rss
        started = time.monotonic()
        slow_task = asyncio.create_task(slow())
        assert await asyncio.gather(*(fast() for _ in range(3))) == [total] * 3
        fast_took = time.monotonic() - started
        after = here.memory_info().rss, engine.memory_info().rss
        growth = [(b - a) / 2**20 for a, b in zip(before, after, strict=True)]
        print(f"{seconds:g} s of a slow reader: client +{growth[0]:.1f} MiB, engine core +{growth[1]:.1f} MiB")
        assert growth[0] < 32 + total * 40 / 2**20  # a list of ints holds 8 bytes a token; several of them, at the end
        assert growth[1] < 32
        got = await slow_task
        assert got == [97 + i % 26 for i in range(total)]
        assert fast_took < 3 * seconds + 5


def test_a_slow_reader(run: Run) -> None:
    run(slow_and_fast(3.0, 0.2))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_slow_reader_for_half_a_minute() -> None:
    asyncio.run(slow_and_fast(30.0, 1.0))


def test_a_client_that_sleeps_past_the_mark_gets_every_token_and_every_finish(run: Run) -> None:
    """The engine core meets the high-water mark, merges, goes idle, and must still get rid of what it holds."""

    async def main() -> None:
        config = EngineConfig(engine="mock", options={"step_ms": 0.1}, transport=TransportConfig(high_water_mark=5))
        async with AsyncLLM(config) as llm:

            async def read(count: int) -> list[int]:
                got: list[int] = []
                async for output in llm.generate([1], params(count)):
                    got += output.outputs[0].token_ids
                return got

            counts = range(100, 2100, 100)
            tasks = [asyncio.create_task(read(count)) for count in counts]
            while llm.client.stats()["requests"] < len(tasks):
                await asyncio.sleep(0.001)
            time.sleep(1.5)  # the loop is blocked, while all of it is produced
            results = await asyncio.gather(*tasks)
            assert results == [[97 + i % 26 for i in range(count)] for count in counts]

    run(main())
