"""Two shutdowns, one in a thread and one on the loop, block each other for `shutdown_timeout`."""

from __future__ import annotations

import asyncio
import threading
import time

from outboard import AsyncMPClient


def test_shutdown_in_a_thread_and_on_the_loop_at_once() -> None:
    async def main() -> float:
        client = await AsyncMPClient.launch("echo")
        thread = threading.Thread(target=client.shutdown)
        began = time.monotonic()
        thread.start()
        time.sleep(0.1)  # the thread has the lock by now, and waits for this loop
        client.shutdown()
        await asyncio.to_thread(thread.join)
        return time.monotonic() - began

    assert asyncio.run(main()) < 5
