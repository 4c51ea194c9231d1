"""Outboard's side of `benchmarks.peers.vllm`: takes jobs as lines of JSON, answers with lines; see `vllm_side`."""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from outboard import AsyncLLM, AsyncMPClient, EngineConfig, EngineCoreRequest, SamplingParams, TransportConfig
from outboard.config import Sockets

Answer = dict[str, float]
ENGINE = "benchmarks.engines:GatedMock"


class Side:
    """Two engines, one under the bare client and one under `AsyncLLM`."""

    def __init__(self, client: AsyncMPClient, llm: AsyncLLM) -> None:
        self.client = client
        self.llm = llm
        self._names = 0
        self.works: dict[str, Callable[..., Awaitable[Answer]]] = {
            "utility": self.utility,
            "columns": self.columns,
            "streams": self.streams,
            "requests": self.requests,
            "tensor": self.tensor,
            "idle": self.idle,
        }
        gc.collect()
        gc.freeze()

    async def utility(self, calls: int) -> Answer:
        took = []
        for _ in range(calls):
            began = time.perf_counter()
            await self.client.call_utility_async("nothing")
            took.append(time.perf_counter() - began)
        return {"p50_us": statistics.median(took) * 1e6}

    async def columns(self, streams: int, tokens: int, pace: float, objects: bool) -> Answer:
        """With `objects`, what came is read as one object a request, which vLLM's client always makes."""
        client = self.client
        await client.call_utility_async("set_up", streams, pace)
        requests = [self._request(32, tokens) for _ in range(streams)]
        for request in requests[:-1]:
            await client.add_request_async(request)
        await self._until(client, "running", streams - 1)
        before = await client.call_utility_async("state")
        cpu, began, messages, count, left = time.process_time(), time.perf_counter(), 0, 0, streams
        await client.add_request_async(requests[-1])
        while left:
            message = await client.get_output_async()
            messages += 1
            if objects:
                for output in message.outputs:
                    count += len(output.new_token_ids)
                    left -= output.finish_reason is not None
            else:
                count += len(message.tokens)
                left -= len(message.finished or ())
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        after = await client.call_utility_async("state")
        assert count == streams * tokens
        return _per_token(count, messages, cpu, wall, before, after)

    async def streams(self, streams: int, tokens: int, pace: float) -> Answer:
        client = self.llm.client
        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, output_kind="delta", detokenize=False
        )
        await client.call_utility_async("set_up", streams, pace)
        wakes = 0

        async def read() -> int:
            nonlocal wakes
            count = 0
            async for output in self.llm.generate(list(range(3, 35)), params):
                count += len(output.outputs[0].token_ids)
                wakes += 1
            return count

        readers = [asyncio.ensure_future(read()) for _ in range(streams - 1)]
        await self._until(client, "running", streams - 1)
        before = await client.call_utility_async("state")
        cpu, began = time.process_time(), time.perf_counter()
        counts = await asyncio.gather(*readers, read())
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        after = await client.call_utility_async("state")
        assert sum(counts) == streams * tokens
        return _per_token(sum(counts), wakes, cpu, wall, before, after)

    async def requests(self, count: int, prompt: int) -> Answer:
        client = self.client
        await client.call_utility_async("set_up", count + 1, 0.0)
        requests = [self._request(prompt, 1) for _ in range(count)]
        before = await client.call_utility_async("state")
        cpu, began = time.process_time(), time.perf_counter()
        for request in requests:
            await client.add_request_async(request)
        after = before
        while after["added"] - before["added"] < count:
            after = await client.call_utility_async("state")
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        await client.abort_requests_async([request.request_id for request in requests])
        both = cpu + after["cpu"] - before["cpu"]
        return {"per_cpu_second": count / both, "per_second": count / wall}

    async def tensor(self, size: int, way: str) -> Answer:
        client = self.client
        await client.call_utility_async("set_up", 0, 0.0, 0 if way == "in" else size)
        request = self._request(32, 1)
        if way == "in":
            request.inputs = np.ones(size, np.uint8)
        cpu, began = time.process_time(), time.perf_counter()
        await client.add_request_async(request)
        message = await client.get_output_async()
        while not message.handles:  # it tells of its load alone
            message = await client.get_output_async()
        if way == "out":
            result = message.outputs[0].result
            assert result.nbytes == size and not result[:: 1 << 12].any()  # a byte of each page
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        result = message = None  # type: ignore[assignment]  # its memory is to be free again
        await client.call_utility_async("set_up", 0, 0.0)
        return {"gb_per_second": size / wall / 1e9, "client_ms": cpu * 1000}

    async def idle(self, seconds: float) -> Answer:
        clients = (self.client, self.llm.client)
        before = [await one.call_utility_async("state") for one in clients]
        cpu = time.process_time()
        await asyncio.sleep(seconds)
        cpu = time.process_time() - cpu
        after = [await one.call_utility_async("state") for one in clients]
        engine = sum(b["cpu"] - a["cpu"] for a, b in zip(before, after, strict=True)) / 2
        return {"client_share": cpu / seconds, "engine_share": engine / seconds}

    @staticmethod
    async def _until(client: AsyncMPClient, what: str, count: int) -> None:
        while (await client.call_utility_async("state"))[what] < count:
            await asyncio.sleep(0.001)

    def _request(self, prompt: int, tokens: int) -> EngineCoreRequest:
        self._names += 1
        return EngineCoreRequest(
            request_id=f"cmpl-{self._names:032x}-0",
            prompt_token_ids=[3 + i % 250 for i in range(prompt)],
            sampling_params=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        )


def _per_token(
    tokens: int, wakes: int, cpu: float, wall: float, before: dict[str, Any], after: dict[str, Any]
) -> Answer:
    step = after["step_cpu"] - before["step_cpu"]
    return {
        "tokens_per_second": tokens / wall,
        "client_us_per_token": cpu / tokens * 1e6,
        "client_us_per_message": cpu / wakes * 1e6,
        "engine_us_per_token": (after["cpu"] - before["cpu"] - step) / tokens * 1e6,
        "wakes_per_token": wakes / tokens,
    }


async def main(outputs: Sockets) -> None:
    began = time.perf_counter()
    config = EngineConfig(engine=ENGINE, transport=TransportConfig(sockets=outputs))
    client = await AsyncMPClient.launch(config)
    try:
        async with AsyncLLM(config) as llm:
            side = Side(client, llm)
            print(json.dumps({"ready": time.perf_counter() - began}), flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                job = json.loads(line)
                answer = await side.works[job.pop("work")](**job)
                print(json.dumps(answer), flush=True)
    finally:
        await asyncio.to_thread(client.shutdown)


if __name__ == "__main__":
    chosen: Sockets = "zmq" if "zmq" in sys.argv[1:] else "unix"
    if "uvloop" in sys.argv[1:]:
        import uvloop

        uvloop.run(main(chosen))
    else:
        asyncio.run(main(chosen))
