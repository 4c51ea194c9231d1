"""A message larger than `max_message_bytes` vanishes, and whoever waits for it waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from outboard import AsyncLLM, AsyncMPClient, EngineConfig, OutboardError, TransportConfig

CONFIG = EngineConfig(engine="faulty:CallableEngine", transport=TransportConfig(max_message_bytes=1 << 20))


@pytest.mark.parametrize("size", [2 << 20])
def test_a_call_with_too_large_an_argument_ends(size: int) -> None:
    async def main() -> str:
        client = await AsyncMPClient.launch(CONFIG)
        try:
            await asyncio.wait_for(client.call_utility_async("echo", b"x" * size), 3)
            return "result"
        except TimeoutError:
            return "still waiting"
        except OutboardError as error:
            return type(error).__name__
        finally:
            await asyncio.to_thread(client.shutdown, 1)

    assert asyncio.run(main()) != "still waiting"


def test_a_request_with_too_large_inputs_ends() -> None:
    config = EngineConfig(engine="echo", transport=TransportConfig(max_message_bytes=1 << 20))

    async def main() -> str:
        async with AsyncLLM(config) as llm:
            try:
                async with asyncio.timeout(3):
                    return repr([output async for output in llm.generate(inputs=b"x" * (2 << 20))])
            except TimeoutError:
                return "still waiting"
            except OutboardError as error:
                return type(error).__name__

    assert asyncio.run(main()) != "still waiting"
