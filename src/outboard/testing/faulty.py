"""`FaultyEngine`: `mock`, until it is told to misbehave."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal

from outboard.engine.core import OutputBatch, utility
from outboard.engines.mock import MockEngine
from outboard.protocol.messages import EngineCoreRequest, EngineInfo, SchedulerStats
from outboard.testing.faults import HangKind, Way, die, hang

__all__ = ["FaultyEngine", "Phase"]

Phase = Literal[
    "never",
    "constructor",
    "info",
    "add_request",
    "abort_requests",
    "has_work",
    "step",
    "scheduler_stats",
    "utility",
    "shutdown",
]

_LINE = 80  # bytes of a line of noise, newline included


class FaultyEngine(MockEngine):
    """Misbehaves on command; otherwise it is `MockEngine`. By reference: "outboard.testing:FaultyEngine".

    Args:
        die_in: the phase to die in, that is the method of this name; "utility" is every call of `ping`.
        way: how to die: "exception", "sys_exit", "_exit", "sigkill", "sigsegv" or "abort"; see `faults.die`.
        hang_in: the phase to hang in; it goes on afterwards. In the phase of `die_in` it hangs first.
        hang_kind: "sleep", "spin" or "gil" (holding the GIL in native code); see `faults.hang`.
        hang_seconds: how long a hang takes.
        at_step: the step, counted from 1, in which `die_in="step"` and `hang_in="step"` do it; earlier ones work.
        slow_start: seconds that the constructor sleeps before anything else.
        noise: bytes written to stderr by the constructor and by every step, in lines of 80.
        step_ms, tokens_per_step, max_num_seqs, max_model_len: as `mock` has them.
    """

    def __init__(
        self,
        die_in: Phase = "never",
        way: Way = "exception",
        hang_in: Phase = "never",
        hang_kind: HangKind = "sleep",
        hang_seconds: float = 3600.0,
        at_step: int = 1,
        slow_start: float = 0.0,
        noise: int = 0,
        step_ms: float = 0.0,
        tokens_per_step: int = 1,
        max_num_seqs: int = 4096,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__(step_ms, tokens_per_step, max_num_seqs, max_model_len=max_model_len)
        self._die_in, self._way = die_in, way
        self._hang_in, self._hang_kind, self._hang_seconds = hang_in, hang_kind, hang_seconds
        self._at_step = at_step
        self._steps = 0
        self._noise = noise
        self._held: list[bytearray] = []
        self._flood: tuple[int, int] | None = None  # results for each request in the next step, bytes of each
        self._garbage = False  # whether the next step sends what cannot be encoded
        time.sleep(slow_start)
        self.make_noise(noise)
        self._enter("constructor")

    def add_request(self, request: EngineCoreRequest) -> None:
        self._enter("add_request")
        super().add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._enter("abort_requests")
        super().abort_requests(request_ids)

    def has_work(self) -> bool:
        self._enter("has_work")
        return super().has_work()

    def step(self, outputs: OutputBatch) -> None:
        self._steps += 1
        if self._steps == self._at_step:
            self._enter("step")
        self.make_noise(self._noise)
        if self._flood is not None:
            count, size = self._flood
            self._flood = None
            for request_id in outputs.open_requests:
                for _ in range(count):
                    outputs.add(request_id, result=bytes(size))
        if self._garbage:
            self._garbage = False
            for request_id in outputs.open_requests:
                outputs.add(request_id, result=object())
        super().step(outputs)

    def info(self) -> EngineInfo:
        self._enter("info")
        return super().info()

    def scheduler_stats(self) -> SchedulerStats:
        self._enter("scheduler_stats")
        return super().scheduler_stats()

    def shutdown(self) -> None:
        self._enter("shutdown")
        super().shutdown()

    @utility
    def ping(self) -> str:
        """Returns "pong", unless `die_in` or `hang_in` is "utility"."""
        self._enter("utility")
        return "pong"

    @utility
    def die(self, way: Way) -> None:
        """Dies now. By "exception" only this call fails, as that of any utility."""
        die(way)

    @utility
    def hang(self, kind: HangKind, seconds: float) -> None:
        """Hangs now; then the call returns."""
        hang(kind, seconds)

    @utility
    def never(self) -> Future[None]:
        """A call that is never answered; the engine goes on."""
        return Future()

    @utility
    def garbage(self) -> object:
        """A result that cannot be encoded."""
        return object()

    @utility
    def garbage_outputs(self) -> None:
        """In the next step every request gets a result that cannot be encoded."""
        self._garbage = True

    @utility
    def flood(self, count: int, size: int) -> None:
        """In the next step every request gets `count` results of `size` bytes, on top of its tokens."""
        self._flood = (count, size)

    @utility
    def allocate(self, size: int) -> int:
        """Takes so many bytes of memory, really written to, and keeps them; 0 frees all. Returns what is held."""
        if size:
            self._held.append(bytearray(b"\x01") * size)
        else:
            self._held.clear()
        return sum(map(len, self._held))

    @utility
    def make_noise(self, size: int) -> None:
        """Writes so many bytes to stderr, in lines of 80."""
        if size:
            text = ("x" * (_LINE - 1) + "\n") * (size // _LINE + 1)
            sys.stderr.write(text[: size - 1] + "\n")
            sys.stderr.flush()

    def _enter(self, phase: Phase) -> None:
        if phase == self._hang_in:
            hang(self._hang_kind, self._hang_seconds)
        if phase == self._die_in:
            die(self._way)
