"""Helpers that tests import."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import psutil

Run = Callable[[Awaitable[Any]], Any]


def children() -> list[psutil.Process]:
    """Living processes that this one has started, at any depth."""
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
