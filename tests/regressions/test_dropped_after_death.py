"""A client that is dropped after its engine core has died for ever leaves nothing: its launcher left a descriptor."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections import Counter

import pytest

from outboard import AsyncMPClient, EngineDeadError

pytestmark = pytest.mark.usefixtures("nothing_left")


def descriptors() -> Counter[str]:
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            kinds[os.readlink(f"/proc/self/fd/{fd}").split("[")[0]] += 1  # noqa: PTH115
        except OSError:
            continue
    return kinds


async def kill_and_drop() -> None:
    client = await AsyncMPClient.launch("echo")
    os.kill(client.core_engines[0].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        while True:
            await client.get_output_async()
    async with asyncio.timeout(5):
        while any(thread.name == "outboard-launcher" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)


def test_a_dropped_client_of_a_dead_engine_core_leaves_no_descriptor() -> None:
    asyncio.run(kill_and_drop())  # what a process opens once
    gc.collect()
    before = descriptors()
    for _ in range(3):
        asyncio.run(kill_and_drop())
    deadline = time.monotonic() + 5
    while (more := descriptors() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not more
