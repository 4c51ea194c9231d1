"""Real sockets, and waiting with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outboard.transport.sockets import ZmqContext, make_context


@pytest.fixture
def context() -> Iterator[ZmqContext]:
    context = make_context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    """Waits until a condition holds; its value."""

    def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, "this did not happen in time"
            time.sleep(0.001)
        return value

    return eventually
