"""The connection of the outputs ends, or makes no sense any more, while the engine core lives."""

from __future__ import annotations

import asyncio
import struct
import time

import pytest

from outboard import AsyncMPClient, EngineConfig, EngineCoreRequest, EngineDeadError, SamplingParams, TransportConfig
from outboard.client import link
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left", "as_configured")

UNIX = TransportConfig(sockets="unix", max_message_bytes=1 << 20)


async def end_of(client: AsyncMPClient, method: str, *args: object) -> EngineDeadError:
    """Has the engine core meddle with its outputs, while a request runs; how the client ends."""
    params = SamplingParams(max_tokens=1_000_000, detokenize=False)
    client.add_request(EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params))
    await client.get_output_async()
    with pytest.raises(EngineDeadError) as called:
        await client.call_utility_async(method, *args)
    with pytest.raises(EngineDeadError):
        while True:
            await client.get_output_async()
    return called.value


def test_an_engine_core_that_closes_it_and_goes_on_is_given_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or whoever waits would wait for ever."""
    monkeypatch.setattr(link, "_END_TOLD", 0.3)

    async def main() -> None:
        config = EngineConfig(engine="faulty:MeddlingEngine", options={"step_ms": 1.0}, transport=UNIX)
        client = await AsyncMPClient.launch(config)
        try:
            started = time.monotonic()
            assert "closed its connection" in str(await end_of(client, "close_outputs"))
            assert time.monotonic() - started > 0.25
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())


@pytest.mark.parametrize("sizes", [(1 << 21, 0), (2**64 - 1, 3), (5, 2**40)], ids=str)
def test_what_is_no_message_ends_it_at_once(run: Run, sizes: tuple[int, int]) -> None:
    async def main() -> None:
        config = EngineConfig(engine="faulty:MeddlingEngine", options={"step_ms": 1.0}, transport=UNIX)
        client = await AsyncMPClient.launch(config)
        try:
            error = await end_of(client, "write_to_outputs", struct.pack("<QQ", *sizes) + bytes(64))
            assert "what is no message" in str(error)
            assert client.stats()["dropped"] == {"broken connection": 1}
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())
