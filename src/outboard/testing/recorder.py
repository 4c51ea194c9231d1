"""An `OutputBatch` that also notes what a real one passes over in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outboard.engine.core import OutputBatch
from outboard.protocol.sampling import FinishReason

__all__ = ["RecordingBatch"]


class RecordingBatch(OutputBatch):
    """Notes outputs for requests that have ended, and takes queue times by a clock of choice.

    Args:
        clock: what time it is, seconds.

    Attributes:
        strays: ids of requests that something was added for although they had ended or were never there, in order.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.strays: list[str] = []
        self._clock = clock
        self._opened: dict[str, float] = {}
        super().__init__()

    def open(self, request_id: str, handle: int) -> None:
        super().open(request_id, handle)
        self._opened[request_id] = self._clock()

    def close(self, request_id: str) -> None:
        super().close(request_id)
        self._opened.pop(request_id, None)

    def extend(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        # Some of them may have ended: then the real one adds them one by one, and so `add` would note them again.
        known = len(self.strays)
        super().extend(request_ids, token_ids)
        del self.strays[known:]
        self.strays += [request_id for request_id in request_ids if request_id not in self._opened]

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int] = (),
        finish_reason: FinishReason | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if request_id not in self._opened:
            self.strays.append(request_id)
        super().add(request_id, token_ids, finish_reason, *args, **kwargs)

    def scheduled(self, request_id: str) -> None:
        opened = self._opened.get(request_id)
        if opened is None:
            self.strays.append(request_id)
        before = len(self.handles)
        super().scheduled(request_id)
        if opened is not None and len(self.handles) > before and self.extras is not None:
            self.extras.queue_times[len(self.handles) - 1] = self._clock() - opened
