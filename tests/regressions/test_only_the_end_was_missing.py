"""A request that had all its tokens but not its end, as its engine core died: to resume it broke off, others hung."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from outboard import AsyncLLM, EngineConfig, FaultConfig, OutputBatch, RestartPolicy, SamplingParams
from outboard.engines.mock import MockEngine
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")


class EndlessEngine(MockEngine):
    """Says all tokens of a request, and never that it has ended."""

    def add_request(self, request) -> None:  # type: ignore[no-untyped-def]
        self.limits = {**getattr(self, "limits", {}), request.request_id: request.sampling_params.max_tokens}

    def abort_requests(self, request_ids) -> None:  # type: ignore[no-untyped-def]
        pass

    def has_work(self) -> bool:
        return any(getattr(self, "limits", {}).values())

    def step(self, outputs: OutputBatch) -> None:
        for request_id, left in self.limits.items():
            outputs.add(request_id, [97] * left)
        self.limits = dict.fromkeys(self.limits, 0)


def test_a_request_whose_end_alone_was_lost_ends_and_so_do_the_others(run: Run) -> None:
    async def main() -> None:
        config = EngineConfig(
            engine=EndlessEngine,
            faults=FaultConfig(restart=RestartPolicy.on_failure(backoff=0.01), in_flight="resume"),
        )
        async with AsyncLLM(config) as llm:

            async def read(so_far: list[int]) -> str | None:
                reason = None
                params = SamplingParams(max_tokens=3, output_kind="delta", detokenize=False)
                async for output in llm.generate([1], params):
                    so_far += output.outputs[0].token_ids
                    reason = output.outputs[0].finish_reason
                return reason

            got: list[list[int]] = [[], []]
            readers = [asyncio.create_task(read(one)) for one in got]
            async with asyncio.timeout(10):
                while got != [[97] * 3] * 2:
                    await asyncio.sleep(0.001)
                os.kill(llm.client.core_engines[0].pid, signal.SIGKILL)
                assert await asyncio.gather(*readers) == ["length"] * 2
            assert got == [[97] * 3] * 2

    run(main())
