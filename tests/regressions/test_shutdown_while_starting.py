"""`AsyncLLM.shutdown(timeout=0)` waits for a start-up in progress to end, up to 600 s."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from outboard import AsyncLLM, EngineCore


class SlowLoad(EngineCore):
    def __init__(self) -> None:
        time.sleep(8)

    def add_request(self, request: Any) -> None: ...
    def abort_requests(self, request_ids: Any) -> None: ...
    def has_work(self) -> bool:
        return False

    def step(self, outputs: Any) -> None: ...


def test_shutdown_while_starting_is_bounded() -> None:
    async def main() -> float:
        llm = AsyncLLM(SlowLoad)
        starting = asyncio.ensure_future(llm.start())
        await asyncio.sleep(0.5)
        began = time.monotonic()
        await llm.shutdown(timeout=0)
        seconds = time.monotonic() - began
        await asyncio.wait([starting])
        starting.exception()
        return seconds

    assert asyncio.run(main()) < 4
