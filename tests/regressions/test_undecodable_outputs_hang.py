"""An engine that says what the wire does not know (finish_reason="eos", a float token) leaves its reader waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outboard import AsyncLLM, EngineCore, OutboardError, OutputBatch, SamplingParams


class _Once(EngineCore):
    def __init__(self) -> None:
        self.ids: list[str] = []

    def add_request(self, request: Any) -> None:
        self.ids.append(request.request_id)

    def abort_requests(self, request_ids: Any) -> None:
        self.ids = [i for i in self.ids if i not in request_ids]

    def has_work(self) -> bool:
        return bool(self.ids)

    def say(self, outputs: OutputBatch, request_id: str) -> None:
        raise NotImplementedError

    def step(self, outputs: OutputBatch) -> None:
        for request_id in self.ids:
            self.say(outputs, request_id)
        self.ids = []


class WrongReason(_Once):
    def say(self, outputs: Any, request_id: str) -> None:
        outputs.add(request_id, [65], "eos")


class FloatToken(_Once):
    def say(self, outputs: Any, request_id: str) -> None:
        outputs.add(request_id, [65.5], "stop")


class WrongLogprobs(_Once):
    def say(self, outputs: Any, request_id: str) -> None:
        outputs.add(request_id, [65], "stop", logprobs=[-0.5])


@pytest.mark.parametrize("engine", [WrongReason, FloatToken, WrongLogprobs])
def test_what_an_engine_says_wrongly_ends_its_request(engine: type[EngineCore]) -> None:
    async def main() -> str:
        async with AsyncLLM(engine) as llm:
            stream = llm.generate([1], SamplingParams(max_tokens=5))
            try:
                async with asyncio.timeout(3):
                    last = [output async for output in stream][-1]
                    return last.outputs[0].finish_reason or ""
            except TimeoutError:
                return "still waiting"
            except OutboardError as error:
                return type(error).__name__

    assert asyncio.run(main()) in ("error", "EngineDeadError")
