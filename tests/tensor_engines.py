"""An engine that takes arrays and gives arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from faulty import CallableEngine
from outboard import EngineCoreRequest, OutputBatch, utility


class TensorEngine(CallableEngine):
    """Answers a request with its inputs. With `torch`, its process has imported torch."""

    def __init__(self, torch: bool = False) -> None:
        super().__init__()
        if torch:
            import torch as _  # noqa: F401
        self._waiting: dict[str, Any] = {}
        self._kept: list[Any] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        self._waiting[request.request_id] = request.inputs

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self, outputs: OutputBatch) -> None:
        while self._waiting:
            request_id, inputs = self._waiting.popitem()
            outputs.add(request_id, result=inputs, finish_reason="stop")

    @utility
    def keep(self, value: Any) -> None:
        self._kept.append(value)

    @utility
    def drop(self) -> list[int]:
        """The sum of each array that was kept."""
        sums = [int(np.asarray(array).sum()) for array in self._kept]
        self._kept.clear()
        return sums

    @utility
    def bfloat16(self, size: int) -> Any:
        import torch

        return [torch.full((size,), 1.5, dtype=torch.bfloat16)]
