"""Real sockets, and waiting with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from outboard.transport.sockets import ZmqContext


@pytest.fixture
def context() -> Iterator[ZmqContext]:
    """A context that closes its sockets after the test."""
    sockets: list[Any] = []  # an unreferenced socket would warn that it was not closed

    class Context(zmq.Context):  # type: ignore[type-arg]
        def socket(self, *args: Any, **kwargs: Any) -> Any:
            sockets.append(super().socket(*args, **kwargs))
            return sockets[-1]

    context = Context(io_threads=1)
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
