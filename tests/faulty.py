"""An engine that misbehaves on command, and one with utilities to call."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from outboard import EngineCore, EngineCoreRequest, EngineInfo, OutputBatch, utility
from outboard.engines.echo import EchoEngine
from outboard.engines.mock import MockEngine


def die(how: str) -> None:
    """Ends this process in the given way; says when on the clock that all processes share."""
    print(f"about to die by {how} at {time.monotonic():.3f}", file=sys.stderr, flush=True)
    if how == "exception":
        raise RuntimeError("boom")
    if how == "_exit":
        os._exit(7)
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sigsegv":
        ctypes.string_at(0)
    if how == "abort":
        ctypes.CDLL(None).abort()


class DyingEngine(MockEngine):
    """Dies in the constructor, or in a step, by a way; or holds the GIL in native code."""

    def __init__(self, how: str = "exception", when: str = "step", step: int = 3, step_ms: float = 0.0) -> None:
        super().__init__(step_ms=step_ms)
        self._how = how
        self._die_at = step if when == "step" else -1
        self._steps = 0
        if when == "init":
            die(how)
        if when == "hang":
            time.sleep(1000)

    def step(self, outputs: OutputBatch) -> None:
        self._steps += 1
        if self._steps == self._die_at:
            die(self._how)
        super().step(outputs)

    @utility
    def hold_gil(self, seconds: int) -> None:
        ctypes.PyDLL(None).sleep(seconds)

    @utility
    def never(self) -> Future[None]:
        return Future()


class CallableEngine(EngineCore):
    """Has no requests, only utilities."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        raise ValueError("takes no requests")

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        pass

    def has_work(self) -> bool:
        return False

    def step(self, outputs: OutputBatch) -> None:
        raise AssertionError("has no work")

    def info(self) -> EngineInfo:
        return EngineInfo(max_model_len=77, vocab_size=99, model="callable", extra={"answer": 42})

    @utility
    def echo(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("echo")
        return [list(args), kwargs]

    @utility
    def boom(self) -> None:
        raise LookupError("no such thing")

    @utility
    def unsendable(self) -> object:
        return object()

    @utility
    def never(self) -> Future[None]:
        return Future()

    @utility
    def later(self, seconds: float, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        threading.Timer(seconds, future.set_result, [value]).start()
        return future

    @utility
    def block(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    @utility
    def count(self) -> int:
        return len(self.calls)

    @utility
    def pid(self) -> int:
        return os.getpid()

    @utility
    def move(self, point: Point, by: tuple[int, int]) -> Point:
        assert isinstance(by, tuple)
        return Point(point.x + by[0], point.y + by[1], point.tags)

    @utility
    def line(self, points: list[Point]) -> Line:
        assert all(isinstance(point, Point) for point in points)
        return Line(points)

    @utility
    def line_later(self, points: list[Point]) -> Future[Line]:
        future: Future[Line] = Future()
        future.set_result(Line(points))
        return future

    def not_a_utility(self) -> None:
        raise AssertionError("called from outside")


class ResultsEngine(EngineCore):
    """Answers each request with `count` results of `size` bytes, one a step."""

    def __init__(self, count: int = 10, size: int = 1000) -> None:
        self._left: dict[str, int] = {}
        self._count = count
        self._size = size

    def add_request(self, request: EngineCoreRequest) -> None:
        self._left[request.request_id] = self._count

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._left)

    def step(self, outputs: OutputBatch) -> None:
        for request_id in list(self._left):
            self._left[request_id] -= 1
            left = self._left[request_id]
            outputs.add(
                request_id, result={"left": left, "data": b"x" * self._size}, finish_reason=None if left else "stop"
            )
            if not left:
                del self._left[request_id]


@dataclasses.dataclass
class Point:
    """A dataclass for utility calls."""

    x: int
    y: float
    tags: tuple[str, ...]


class Line(msgspec.Struct):
    """A struct with dataclasses in it."""

    points: list[Point]


class SleepyEngine(EchoEngine):
    """Sleeps; wakes in two parts."""

    def __init__(self, step_ms: float = 0.0) -> None:
        super().__init__(step_ms=step_ms)
        self._asleep: set[str] = set()

    @utility
    def sleep(self, level: int = 1) -> None:
        self._asleep = {"weights", "kv_cache"}

    @utility
    def wake_up(self, tags: list[str] | None = None) -> None:
        self._asleep -= set(tags or ("weights", "kv_cache"))

    @utility
    def is_sleeping(self) -> bool:
        return bool(self._asleep)


class SlowStepEngine(MockEngine):
    """Its steps take as long as it is told, and say that they are alive."""

    def __init__(self) -> None:
        super().__init__(step_ms=0.2)
        self._seconds = 0.0

    def step(self, outputs: OutputBatch) -> None:
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            time.sleep(0.05)
            self.progress()
        super().step(outputs)

    @utility
    def slow_steps(self, seconds: float) -> None:
        self._seconds = seconds

    @utility
    def never(self) -> Future[None]:
        return Future()


class TellingEngine(CallableEngine):
    """Tells what its rank has of its own. Computes on CPUs, it says."""

    cpu_bound = True

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self._name = name

    @utility
    def tell(self) -> list[Any]:
        return [self._name, os.environ.get("OUTBOARD_TEST"), sorted(os.sched_getaffinity(0))]


class NoDummyBatch(MockEngine):
    """Its ranks are to step together, and it does not say how one without work takes part."""

    lockstep = True


class MeddlingEngine(MockEngine):
    """Gets at the connection of its own outputs, which must be a Unix socket."""

    @utility
    def close_outputs(self) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self._outputs().fileno())
        os.close(null)

    @utility
    def write_to_outputs(self, data: bytes) -> None:
        self._outputs().send(data)

    @staticmethod
    def _outputs() -> socket.socket:
        """The other object of the process that has this descriptor closes it."""
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            try:
                found = socket.socket(fileno=int(name))
            except OSError:
                continue
            try:
                if found.family == socket.AF_UNIX and "/out-" in os.fsdecode(found.getpeername()):
                    _KEPT.append(found)
                    return found
            except OSError:
                pass
            found.detach()
        raise AssertionError("no outputs")


_KEPT: list[socket.socket] = []
