"""A request id that is no str, and parameters that are no SamplingParams, are not refused before they are sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outboard import AsyncLLM, InvalidRequestError


@pytest.mark.parametrize("kwargs", [{"request_id": 5}, {"sampling_params": {"max_tokens": 3}}])
def test_wrongly_typed_arguments(kwargs: dict[str, Any]) -> None:
    async def main() -> None:
        async with AsyncLLM("echo") as llm:
            async for _ in llm.generate("hi", **kwargs):
                pass

    with pytest.raises((InvalidRequestError, TypeError)):
        asyncio.run(main())
