"""A utility result that encodes but does not decode leaves its caller waiting for ever."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest

from outboard import AsyncMPClient, EngineCore, OutboardError, utility


@dataclasses.dataclass(frozen=True)
class Key:
    a: int = 1


class Odd(EngineCore):
    def add_request(self, request: Any) -> None: ...
    def abort_requests(self, request_ids: Any) -> None: ...
    def has_work(self) -> bool:
        return False

    def step(self, outputs: Any) -> None: ...

    @utility
    def keyed(self) -> Any:
        return {Key(): 1}

    @utility
    def extension(self) -> Any:
        return msgspec.msgpack.Ext(5, b"x")


@pytest.mark.parametrize("method", ["keyed", "extension"])
def test_the_call_ends(method: str) -> None:
    async def main() -> str:
        client = await AsyncMPClient.launch(Odd)
        try:
            await asyncio.wait_for(client.call_utility_async(method), 3)
            return "result"
        except TimeoutError:
            return "still waiting"
        except OutboardError as error:
            return type(error).__name__
        finally:
            await asyncio.to_thread(client.shutdown, 1)

    assert asyncio.run(main()) != "still waiting"
