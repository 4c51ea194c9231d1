"""Helpers that tests import."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, cast

import psutil
import pytest

from outboard.config import Sockets, TransportConfig

Run = Callable[[Awaitable[Any]], Any]

# For tests whose event loop runs nothing of Outboard's, or nothing that tests with loops of both kinds do not run too.
ONE_LOOP = pytest.mark.parametrize("run", ["asyncio"], indirect=True)

# What carries the data in tests that do not choose; set the environment variable to test the other way.
SOCKETS = cast(Sockets, os.environ.get("OUTBOARD_TEST_SOCKETS", TransportConfig().sockets))


def children() -> list[psutil.Process]:
    """Living processes that this one has started, at any depth."""
    return [child for child in psutil.Process().children(recursive=True) if is_alive(child)]


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended, reaped or not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
