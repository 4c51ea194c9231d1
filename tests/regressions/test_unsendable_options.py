"""Options that msgpack does not know, and a Path in sys.path, end in a bare TypeError out of the handshake."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outboard import AsyncLLM, ConfigError, EngineConfig


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("openvino", {"model": Path("/no/such/model.gguf")}),
        ("echo", {"max_num_seqs": {1, object()}}),
        ("openvino", {"model": "a\udcffb"}),
    ],
)
def test_an_option_that_cannot_be_sent(engine: str, options: dict[str, Any]) -> None:
    async def main() -> None:
        async with AsyncLLM(engine, options=options):
            pass

    with pytest.raises(ConfigError):
        asyncio.run(main())


def test_a_numpy_int_as_option_works_or_is_a_config_error() -> None:
    async def main() -> None:
        async with AsyncLLM("echo", options={"max_num_seqs": np.int64(4)}):
            pass

    try:
        asyncio.run(main())
    except ConfigError:
        pass


def test_what_is_no_text_in_sys_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/tmp")])  # the import system ignores it

    async def main() -> None:
        async with AsyncLLM("echo"):
            pass

    asyncio.run(main())


def test_what_is_no_engine() -> None:
    async def main() -> None:
        async with AsyncLLM(EngineConfig(engine=5)):  # type: ignore[arg-type]
            pass

    with pytest.raises(ConfigError):
        asyncio.run(main())
