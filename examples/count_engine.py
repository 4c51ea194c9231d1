"""The smallest engine: it counts down. Run this file, or use its class from the command line:

outboard generate "go" --engine examples/count_engine.py:CountEngine --option start=5
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from outboard import AsyncLLM, EngineCore, EngineCoreRequest, OutputBatch, SamplingParams, Tokenizer
from outboard.engines.byte_tokenizer import ByteTokenizer


class CountEngine(EngineCore):
    """Counts down from `start`, one digit a step, whatever the prompt."""

    def __init__(self, start: int = 9) -> None:
        self.start = start
        self.next: dict[str, int] = {}  # by request

    def add_request(self, request: EngineCoreRequest) -> None:
        self.next[request.request_id] = self.start

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.next.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.next)

    def step(self, outputs: OutputBatch) -> None:
        for request_id, digit in list(self.next.items()):
            outputs.add(request_id, [ord("0") + digit], finish_reason=None if digit else "stop")
            self.next[request_id] -= 1
            if digit == 0:
                del self.next[request_id]

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> Tokenizer:
        return ByteTokenizer()


async def main() -> None:
    async with AsyncLLM(CountEngine, options={"start": 5}) as llm:
        async for output in llm.generate("go", SamplingParams(output_kind="delta")):
            print(output.outputs[0].text, end=" ", flush=True)
    print()


if __name__ == "__main__":
    asyncio.run(main())
