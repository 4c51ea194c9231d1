"""The real model through a child process: counts and order; text of one prompt alone."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from outboard import (
    AsyncLLM,
    InvalidRequestError,
    ModelFileError,
    PromptTooLongError,
    RequestOutput,
    SamplingParams,
    UtilityNotFoundError,
)
from outboard.engines.models import resolve_model

pytestmark = [pytest.mark.openvino, pytest.mark.xdist_group("openvino"), pytest.mark.timeout(180)]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def runner() -> Iterator[tuple[asyncio.Runner, AsyncLLM]]:
    """One loop and one engine for all tests here: loading takes seconds."""
    resolve_model(None)
    with asyncio.Runner() as loop:
        llm = AsyncLLM("openvino")
        loop.run(llm.start())
        yield loop, llm
        loop.run(llm.shutdown())


async def last_of(llm: AsyncLLM, prompt: object, params: SamplingParams) -> RequestOutput:
    return [output async for output in llm.generate(prompt, params)][-1]  # type: ignore[arg-type]


async def idle(llm: AsyncLLM) -> None:
    async with asyncio.timeout(20):
        while llm.client.scheduler_stats.running or llm.client.scheduler_stats.waiting:
            await asyncio.sleep(0.01)


def test_one_prompt(runner: tuple[asyncio.Runner, AsyncLLM]) -> None:
    loop, llm = runner

    async def main() -> None:
        output = await last_of(llm, "The capital of France is", GREEDY)
        assert output.outputs[0].text.startswith(" Paris")
        assert len(output.outputs[0].token_ids) == 12
        assert output.outputs[0].finish_reason == "length"
        assert output.metrics is not None
        assert output.metrics.queue_time is not None
        again = await last_of(llm, list(output.prompt_token_ids or ()), GREEDY)
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        chat = await last_of(
            llm,
            [{"role": "user", "content": "What is the capital of France?"}],
            SamplingParams(max_tokens=40, temperature=0.0),
        )
        assert "Paris" in chat.outputs[0].text
        assert chat.outputs[0].finish_reason == "stop"
        assert "<|im_end|>" not in chat.outputs[0].text
        assert llm.engine_info.max_model_len == 8192
        assert llm.engine_info.vocab_size == 49152

    loop.run(main())


def test_64_at_once(runner: tuple[asyncio.Runner, AsyncLLM]) -> None:
    loop, llm = runner

    async def one(i: int) -> None:
        params = SamplingParams(max_tokens=3 + i % 6, temperature=1.0, seed=i, ignore_eos=True, output_kind="delta")
        count = 0
        async for output in llm.generate(f"Number {i}:", params):
            count += len(output.outputs[0].token_ids)
        assert count == 3 + i % 6
        assert output.outputs[0].finish_reason == "length"

    async def main() -> None:
        await asyncio.gather(*(one(i) for i in range(64)))
        await idle(llm)

    loop.run(main())


def test_64_that_join_at_random_times_with_a_third_aborted(runner: tuple[asyncio.Runner, AsyncLLM]) -> None:
    loop, llm = runner
    rng = random.Random(3)

    async def one(i: int) -> str:
        await asyncio.sleep(rng.random() * 2)
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        seen: list[int] = []
        async for output in llm.generate(f"Count to {i}:", params, request_id=f"r{i}"):
            completion = output.outputs[0]
            assert completion.token_ids[: len(seen)] == seen  # cumulative: in order, nothing lost
            seen = completion.token_ids
            if i % 3 == 0 and len(seen) >= 2 and completion.finish_reason is None:
                await llm.abort(f"r{i}")
        assert completion.finish_reason is not None
        assert len(seen) == 8 or completion.finish_reason == "abort"
        return completion.finish_reason

    async def main() -> None:
        reasons = await asyncio.gather(*(one(i) for i in range(64)))
        assert reasons.count("abort") >= 15
        assert reasons.count("length") >= 64 - 22
        await idle(llm)
        assert llm.client.scheduler_stats.kv_cache_usage == 0

    loop.run(main())


def test_bad_input_leaves_the_engine_unharmed(runner: tuple[asyncio.Runner, AsyncLLM]) -> None:
    loop, llm = runner

    async def main() -> None:
        with pytest.raises(InvalidRequestError, match=r"49152.*0 to 49151"):
            await anext(llm.generate([1, 49152]))
        with pytest.raises(PromptTooLongError, match="8192"):
            await anext(llm.generate([1] * 8192))
        with pytest.raises(PromptTooLongError, match="characters"):
            await anext(llm.generate("x" * 10_000_000))
        with pytest.raises(InvalidRequestError, match="empty"):
            await anext(llm.generate(""))
        many = await last_of(llm, "x", SamplingParams(logprobs=20))
        assert many.outputs[0].finish_reason == "error"
        assert "logprobs" in (many.outputs[0].error or "")
        with pytest.raises(UtilityNotFoundError, match="get_metrics"):
            await llm.client.call_utility_async("nope")
        assert (await llm.client.call_utility_async("get_metrics"))["requests"] >= 0
        params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=0)
        output = await last_of(llm, "The capital of France is", params)
        assert len(output.outputs[0].logprobs or ()) == 3
        stream = llm.generate("Once upon a time", SamplingParams(max_tokens=500, ignore_eos=True))
        await anext(stream)
        del stream
        gc.collect()
        await idle(llm)

    loop.run(main())


def test_a_missing_or_truncated_model(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with resolve_model(None).open("rb") as whole:
        cut.write_bytes(whole.read(5_000_000))

    async def main() -> None:
        for path in ("/no/such/model.gguf", str(cut)):
            with pytest.raises(ModelFileError, match=path):
                await AsyncLLM("openvino", options={"model": path}).start()

    asyncio.run(main())
