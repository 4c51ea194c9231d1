"""Failures that are no deaths (reading cancelled, sink or hook raised, a gap) say neither pid nor stderr."""

from __future__ import annotations

import asyncio

import pytest

from outboard import AsyncMPClient, EngineDeadError


def test_a_cancelled_reader_names_the_engine() -> None:
    async def main() -> tuple[int | None, int]:
        client = await AsyncMPClient.launch("echo")
        try:
            assert client.output_queue_task is not None
            client.output_queue_task.cancel()
            with pytest.raises(EngineDeadError) as caught:
                while True:
                    await client.get_output_async()
            return caught.value.pid, client.core_engines[0].pid
        finally:
            await asyncio.to_thread(client.shutdown, 1)

    told, pid = asyncio.run(main())
    assert told == pid
