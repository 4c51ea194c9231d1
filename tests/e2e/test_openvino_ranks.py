"""Two ranks of a real language model, each on its share of the CPUs, under one client."""

from __future__ import annotations

import asyncio

import pytest

from outboard import AsyncLLM, DPLBAsyncMPClient, EngineConfig, ParallelConfig, SamplingParams

pytest.importorskip("openvino_genai")
pytestmark = [
    pytest.mark.openvino,
    pytest.mark.xdist_group("openvino"),
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("nothing_left"),
]


def test_two_ranks_serve_a_mixed_load() -> None:
    async def main() -> None:
        config = EngineConfig(engine="openvino", parallel=ParallelConfig(data_parallel_size=2))
        async with AsyncLLM(config) as llm:
            assert isinstance(llm.client, DPLBAsyncMPClient)

            async def one(index: int) -> tuple[int, int]:
                params = SamplingParams(max_tokens=4 + index % 9, temperature=0.0, ignore_eos=True)
                prompt = f"{index} is a number, and" * (1 + index % 4)
                last = [output async for output in llm.generate(prompt, params)][-1]
                assert last.finished
                return len(last.outputs[0].token_ids), params.max_tokens or 0

            tasks = [asyncio.create_task(one(index)) for index in range(24)]
            while llm.client.stats()["requests"] < 24:
                await asyncio.sleep(0.005)
            counts = llm.client.lb_engines
            assert abs(counts[0] - counts[1]) <= 2
            assert all(got == wanted for got, wanted in await asyncio.gather(*tasks))
            stats = await llm.client.call_utility_all_async("get_stats")
            assert [one["requests"] for one in stats] == [0, 0]

    asyncio.run(main())
