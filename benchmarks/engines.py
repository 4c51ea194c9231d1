"""Engines for measurements."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from outboard.engine.core import EngineCore, OutputBatch, Tokenizer, utility
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.engines.mock import MockEngine
from outboard.protocol.messages import EngineCoreRequest

__all__ = ["GatedMock", "OneToken"]


class GatedMock(MockEngine):
    """`mock` that tells CPU times, begins a round once so many requests are there, and can take and give tensors.

    Args:
        step_ms: as of `mock`.
    """

    def __init__(self, step_ms: float = 0.0) -> None:
        super().__init__(step_ms=step_ms)
        self._gate = 0
        self._open = True
        self._inside = 0
        self._step_cpu = 0.0
        self._total = 0
        self._result: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def add_request(self, request: EngineCoreRequest) -> None:
        self._total += 1
        if request.inputs is not None:
            request.inputs[:: 1 << 12].any()  # the tensor is here, each page of it
        super().add_request(request)

    def has_work(self) -> bool:
        inside = len(self._running) + len(self._waiting)
        self._open = inside > 0 and (self._open or inside >= self._gate)
        return self._open

    def step(self, outputs: OutputBatch) -> None:
        if self._result is not None:
            for request_id in list(self._waiting):
                del self._waiting[request_id]
                outputs.add(request_id, (97,), "length", result=self._result)
            return
        if self._step_seconds:
            self._pace()
        pace, self._step_seconds = self._step_seconds, 0.0
        began = time.thread_time()
        super().step(outputs)
        self._step_cpu += time.thread_time() - began
        self._step_seconds = pace
        if not self._running and not self._waiting:
            self._open = not self._gate

    @utility
    def nothing(self) -> int:
        """Does nothing."""
        return 1

    @utility
    def set_up(self, gate: int, pace: float, tensor_bytes: int = 0) -> int:
        """Work begins with so many requests, at a step every `pace` seconds; ends come with so many bytes."""
        self._gate, self._open = gate, not gate
        self._step_seconds, self._deadline = pace, None
        self._result = np.zeros(tensor_bytes, np.uint8) if tensor_bytes else None
        return 1

    @utility
    def state(self) -> dict[str, float]:
        """CPU seconds of the process, those of `step`, requests so far and now."""
        running = len(self._running) + len(self._waiting)
        return {
            "cpu": time.process_time(),
            "step_cpu": self._step_cpu,
            "added": self._total,
            "running": running,
        }


class OneToken(EngineCore):
    """Gives each request one token, and then says nothing more: its stream stays open until it is aborted."""

    def __init__(self) -> None:
        self._new: dict[str, None] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        self._new[request.request_id] = None

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._new.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._new)

    def step(self, outputs: OutputBatch) -> None:
        for request_id in self._new:
            outputs.add(request_id, (97,))
        self._new.clear()

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> Tokenizer:
        return ByteTokenizer()
