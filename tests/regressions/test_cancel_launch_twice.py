"""Cancelling `launch` twice, or all tasks, returns before the process is gone."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil

from outboard import AsyncMPClient, EngineCore


class SlowLoad(EngineCore):
    def __init__(self) -> None:
        time.sleep(8)

    def add_request(self, request: Any) -> None: ...
    def abort_requests(self, request_ids: Any) -> None: ...
    def has_work(self) -> bool:
        return False

    def step(self, outputs: Any) -> None: ...


def _children() -> set[psutil.Process]:
    """Zombies too: one that waits for its parent is not gone."""
    return set(psutil.Process().children(recursive=True))


def test_cancelled_twice() -> None:
    async def main() -> set[psutil.Process]:
        before = _children()
        task = asyncio.ensure_future(AsyncMPClient.launch(SlowLoad))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return _children() - before

    assert not asyncio.run(main())


def test_cancelled_with_all_other_tasks() -> None:
    async def main() -> set[psutil.Process]:
        before = _children()
        task = asyncio.ensure_future(AsyncMPClient.launch(SlowLoad))
        await asyncio.sleep(0.5)
        for other in asyncio.all_tasks():
            if other is not asyncio.current_task():
                other.cancel()
        await asyncio.wait([task])
        return _children() - before

    assert not asyncio.run(main())
