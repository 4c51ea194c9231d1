"""An engine with load of all kinds: tokens at a set pace, arrays that come back, calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from outboard import EngineCoreRequest, OutputBatch, utility
from outboard.engines.mock import MockEngine


class MixedEngine(MockEngine):
    """As `mock`; a request with inputs is answered with those."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._arrays: dict[str, Any] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        if request.inputs is None:
            super().add_request(request)
        else:
            self._arrays[request.request_id] = request.inputs

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        super().abort_requests(request_ids)
        for request_id in request_ids:
            self._arrays.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._arrays) or super().has_work()

    def step(self, outputs: OutputBatch) -> None:
        while self._arrays:
            request_id, inputs = self._arrays.popitem()
            outputs.add(request_id, result=inputs, finish_reason="stop")
        if super().has_work():
            super().step(outputs)

    @utility
    def echo(self, value: Any) -> Any:
        return value

    @utility
    def never(self) -> Future[None]:
        return Future()

    @utility
    def pid(self) -> int:
        return os.getpid()
