"""`message.outputs` raises in an output sink, which ends the client."""

from __future__ import annotations

import asyncio
from typing import Any

from outboard import AsyncMPClient, EngineCoreOutputs, EngineCoreRequest


def test_outputs_can_be_read_in_a_sink() -> None:
    async def main() -> list[Any]:
        client = await AsyncMPClient.launch("echo")
        seen: list[Any] = []

        def sink(message: Any) -> None:
            if isinstance(message, EngineCoreOutputs):
                seen.extend((output.request_id, output.new_token_ids) for output in message.outputs)

        try:
            client.set_output_sink(sink)
            client.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[1]))
            for _ in range(100):
                await asyncio.sleep(0.01)
            client.validate_alive()
            return [entry for entry in seen if entry[1]]
        finally:
            await asyncio.to_thread(client.shutdown, 1)

    assert asyncio.run(main()) == [("a", [1])]
