"""An `abort` or `aclose` while the prompt is being encoded, or before the first read, is lost: the request runs."""

from __future__ import annotations

import asyncio
import time

from outboard import AsyncLLM
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.engines.echo import EchoEngine


class SlowTokenizer(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        time.sleep(0.4)
        return super().encode(text)


class SlowEcho(EchoEngine):
    @classmethod
    def tokenizer(cls, options: object) -> SlowTokenizer:
        return SlowTokenizer()


def test_aclose_while_the_prompt_is_encoded() -> None:
    async def main() -> int:
        async with AsyncLLM(SlowEcho, options={"step_ms": 5}) as llm:
            stream = llm.generate("x" * 5000, request_id="a")
            reader = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.1)
            await stream.aclose()
            await llm.abort("a")
            await asyncio.wait([reader], timeout=3)
            reader.exception()
            return llm.client.stats()["requests"]

    assert asyncio.run(main()) == 0


def test_a_closed_stream_starts_nothing() -> None:
    async def main() -> int:
        async with AsyncLLM("echo") as llm:
            stream = llm.generate("abc")
            await stream.aclose()
            return sum([len(output.outputs[0].token_ids) async for output in stream])

    assert asyncio.run(main()) == 0
