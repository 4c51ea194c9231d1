"""An `OutputBatch` that also notes what a real one passes over in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outboard.engine.batch import OutputBatch
from outboard.protocol.sampling import FinishReason

__all__ = ["RecordingBatch"]


class RecordingBatch(OutputBatch):
    """Notes outputs for requests that have ended.

    Args:
        clock: what time it is, seconds.

    Attributes:
        strays: ids of requests that something was added for although they had ended or were never there, in order.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.strays: list[str] = []
        super().__init__(clock)

    def extend(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        # Some of them may have ended: then the real one adds them one by one, and so `add` would note them again.
        known = len(self.strays)
        super().extend(request_ids, token_ids)
        del self.strays[known:]
        self.strays += [request_id for request_id in request_ids if not self.is_open(request_id)]

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int] = (),
        finish_reason: FinishReason | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not self.is_open(request_id):
            self.strays.append(request_id)
        super().add(request_id, token_ids, finish_reason, *args, **kwargs)

    def scheduled(self, request_id: str) -> None:
        if not self.is_open(request_id):
            self.strays.append(request_id)
        super().scheduled(request_id)
