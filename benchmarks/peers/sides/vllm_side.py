"""vLLM's side of `benchmarks.peers.vllm`: runs in vLLM's environment, takes jobs as lines of JSON, answers with lines.

It imports nothing of Outboard. Its jobs are those of `benchmarks.peers.sides.outboard_side`, with the same answers.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from vllm_model import MODEL, prepare_environment  # noqa: E402 - of the directory that was just named

prepare_environment()

Answer = dict[str, float]


class Side:
    """Two engines, one under the bare client and one under `AsyncLLM`."""

    def __init__(self, directory: str) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.core_client import AsyncMPClient
        from vllm_engine import IdleExecutor

        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        arguments = AsyncEngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=1024,
        )
        self.client = AsyncMPClient(arguments.create_engine_config(), IdleExecutor, False)
        self.llm = AsyncLLM(arguments.create_engine_config(), IdleExecutor, log_stats=False, log_requests=False)
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

    def close(self) -> None:
        self.llm.shutdown(timeout=2)
        self.client.shutdown(timeout=2)

    async def utility(self, calls: int) -> Answer:
        took = []
        for _ in range(calls):
            began = time.perf_counter()
            await self.client.call_utility_async("bench_nothing")
            took.append(time.perf_counter() - began)
        return {"p50_us": statistics.median(took) * 1e6}

    async def columns(self, streams: int, tokens: int, pace: float, objects: bool) -> Answer:
        """`objects` makes no difference here: there is nothing else."""
        client = self.client
        await client.call_utility_async("bench_set", streams, pace, 0)
        requests = [self._request(32, tokens) for _ in range(streams)]
        for request in requests[:-1]:
            await client.add_request_async(request)
        await self._until(client, "running", streams - 1)
        before = await client.call_utility_async("bench_state")
        cpu, began, messages, count, left = time.process_time(), time.perf_counter(), 0, 0, streams
        await client.add_request_async(requests[-1])
        while left:
            message = await client.get_output_async()
            messages += 1
            for output in message.outputs:
                count += len(output.new_token_ids)
                left -= output.finish_reason is not None
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        after = await client.call_utility_async("bench_state")
        assert count == streams * tokens
        return _per_token(count, messages, cpu, wall, before, after)

    async def streams(self, streams: int, tokens: int, pace: float) -> Answer:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        core = self.llm.engine_core
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
        )
        await core.call_utility_async("bench_set", streams, pace, 0)
        wakes = 0

        async def read() -> int:
            nonlocal wakes
            count = 0
            prompt = {"prompt_token_ids": list(range(3, 35))}
            async for output in self.llm.generate(prompt, params, uuid.uuid4().hex):
                count += len(output.outputs[0].token_ids)
                wakes += 1
            return count

        readers = [asyncio.ensure_future(read()) for _ in range(streams - 1)]
        await self._until(core, "running", streams - 1)
        before = await core.call_utility_async("bench_state")
        cpu, began = time.process_time(), time.perf_counter()
        counts = await asyncio.gather(*readers, read())
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        after = await core.call_utility_async("bench_state")
        assert sum(counts) == streams * tokens
        return _per_token(sum(counts), wakes, cpu, wall, before, after)

    async def requests(self, count: int, prompt: int) -> Answer:
        client = self.client
        await client.call_utility_async("bench_set", count + 1, 0.0, 0)
        requests = [self._request(prompt, 1) for _ in range(count)]
        before = await client.call_utility_async("bench_state")
        cpu, began = time.process_time(), time.perf_counter()
        for request in requests:
            await client.add_request_async(request)
        after = before
        while after["added"] - before["added"] < count:
            after = await client.call_utility_async("bench_state")
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        await client.abort_requests_async([request.request_id for request in requests])
        both = cpu + after["cpu"] - before["cpu"]
        return {"per_cpu_second": count / both, "per_second": count / wall}

    async def tensor(self, size: int, way: str) -> Answer:
        import torch

        client = self.client
        await client.call_utility_async("bench_set", 0, 0.0, 0 if way == "in" else size)
        embeds = torch.ones(size // 4 // 4096, 4096, dtype=torch.float32) if way == "in" else None
        request = self._request(32, 1, embeds)
        cpu, began = time.process_time(), time.perf_counter()
        await client.add_request_async(request)
        message = await client.get_output_async()
        if way == "out":
            result = message.outputs[0].pooling_output
            assert result.nbytes == size and not result[:: 1 << 10].any()  # a number of each page
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        await client.call_utility_async("bench_set", 0, 0.0, 0)
        return {"gb_per_second": size / wall / 1e9, "client_ms": cpu * 1000}

    async def idle(self, seconds: float) -> Answer:
        state = [await one.call_utility_async("bench_state") for one in (self.client, self.llm.engine_core)]
        cpu = time.process_time()
        await asyncio.sleep(seconds)
        cpu = time.process_time() - cpu
        after = [await one.call_utility_async("bench_state") for one in (self.client, self.llm.engine_core)]
        engine = sum(b["cpu"] - a["cpu"] for a, b in zip(state, after, strict=True)) / 2
        return {"client_share": cpu / seconds, "engine_share": engine / seconds}

    @staticmethod
    async def _until(client: Any, what: str, count: int) -> None:
        while (await client.call_utility_async("bench_state"))[what] < count:
            await asyncio.sleep(0.001)

    @staticmethod
    def _request(prompt: int, tokens: int, embeds: Any = None) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        return EngineCoreRequest(
            request_id=f"cmpl-{uuid.uuid4().hex}-0",
            prompt_token_ids=None if embeds is not None else [3 + i % 500 for i in range(prompt)],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            prompt_embeds=embeds,
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


async def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        side = Side(directory)
        print(json.dumps({"ready": time.perf_counter() - began}), flush=True)
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                job = json.loads(line)
                answer = await side.works[job.pop("work")](**job)
                print(json.dumps(answer), flush=True)
        finally:
            side.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["uvloop"]:
        import uvloop

        uvloop.run(main())
    else:
        asyncio.run(main())
