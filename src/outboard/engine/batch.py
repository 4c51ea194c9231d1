"""`OutputBatch`: what steps produce, as columns ready for the wire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, get_args

from outboard.protocol.messages import OutputExtras
from outboard.protocol.sampling import FinishReason

__all__ = ["OutputBatch"]

_FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)


class OutputBatch:
    """Collects what steps produce, as columns ready for the wire. The busy loop owns it and hands it to `step`.

    Requests that were aborted or have finished are skipped quietly: an engine need not be quicker than its users.
    """

    __slots__ = (
        "_arrivals",
        "_handles_by_id",
        "_ids_by_handle",
        "_last_handles",
        "_last_ids",
        "counts",
        "extras",
        "finished",
        "handles",
        "tokens",
    )

    handles: list[int]
    tokens: list[int]
    counts: list[int] | None
    finished: list[tuple[int, FinishReason, int | str | None]] | None
    extras: OutputExtras | None

    def __init__(self) -> None:
        self._handles_by_id: dict[str, int] = {}
        self._ids_by_handle: dict[int, str] = {}
        self._arrivals: dict[str, float] = {}
        # What `extend` was last given, and the handles of it: in a busy engine most steps have the same requests.
        self._last_ids: list[str] = []
        self._last_handles: list[int] = []
        self.clear()

    # --- for an engine's step ---

    def extend(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Adds one token to each of these requests: the fast way.

        Args:
            request_ids: requests that are in the engine.
            token_ids: one plain int a request, in the same order.
        """
        if len(request_ids) != len(token_ids):
            raise ValueError(f"extend() got {len(request_ids)} request ids but {len(token_ids)} tokens")
        if request_ids != self._last_ids:  # a comparison of pointers; a lookup each would cost ten times as much
            try:
                self._last_handles = list(map(self._handles_by_id.__getitem__, request_ids))
            except KeyError:
                for request_id, token_id in zip(request_ids, token_ids, strict=True):
                    self.add(request_id, (token_id,))
                return
            self._last_ids = list(request_ids)
        self.handles += self._last_handles
        self.tokens += token_ids
        if self.counts is not None:
            self.counts.extend([1] * len(token_ids))

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int] = (),
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        logprobs: list[dict[int, float]] | None = None,
        result: Any = None,
        error: str | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        """Adds whatever one request produced.

        Args:
            request_id: a request that is in the engine.
            token_ids: its new tokens, plain ints; may be empty.
            finish_reason: set where this ends the request: "stop", "length", "abort" or "error".
            stop_reason: the token or string that stopped it.
            logprobs: one dict a token: token id -> log probability.
            result: output of an engine that is not a language model; any msgpack value. An array is sent from where it
                lies, perhaps later: do not change it afterwards.
            error: why it ended with "error".
            num_cached_tokens: prompt tokens that the prefix cache served.
        """
        if finish_reason is not None and finish_reason not in _FINISH_REASONS:
            raise ValueError(f"finish_reason must be one of {', '.join(_FINISH_REASONS)}, not {finish_reason!r}")
        handle = self._handles_by_id.get(request_id)
        if handle is None:
            return
        count = len(token_ids)
        if count != 1 and self.counts is None:
            self.counts = [1] * len(self.handles)
        position = len(self.handles)
        self.handles.append(handle)
        self.tokens.extend(token_ids)
        if self.counts is not None:
            self.counts.append(count)
        if finish_reason is not None:
            if self.finished is None:
                self.finished = []
            self.finished.append((position, finish_reason, stop_reason))
            self.close(request_id)
        if logprobs:
            self._extras().logprobs[position] = logprobs
        if result is not None:
            self._extras().results[position] = result
        if error is not None:
            self._extras().errors[position] = error
        if num_cached_tokens:
            self._extras().num_cached_tokens[position] = num_cached_tokens

    def scheduled(self, request_id: str) -> None:
        """Says that a request left the waiting queue; its queue time is taken. Only the first call counts."""
        arrival = self._arrivals.pop(request_id, None)
        if arrival is not None:
            self.add(request_id)
            self._extras().queue_times[len(self.handles) - 1] = time.monotonic() - arrival

    # --- for the busy loop ---

    def open(self, request_id: str, handle: int) -> None:
        """From now on the engine may produce for this request."""
        self._handles_by_id[request_id] = handle
        self._ids_by_handle[handle] = request_id
        self._arrivals[request_id] = time.monotonic()

    def close(self, request_id: str) -> None:
        """From now on whatever the engine produces for this request is skipped."""
        self._arrivals.pop(request_id, None)
        handle = self._handles_by_id.pop(request_id, None)
        if handle is not None:
            del self._ids_by_handle[handle]
            self._last_ids, self._last_handles = [], []

    def request_id(self, handle: int) -> str | None:
        """The request with this handle, if it has not ended."""
        return self._ids_by_handle.get(handle)

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._handles_by_id)

    def __len__(self) -> int:
        """How many requests have not ended."""
        return len(self._handles_by_id)

    def clear(self) -> None:
        """Forgets the columns, not the open requests."""
        self.handles = []
        self.tokens = []
        self.counts = None
        self.finished = None
        self.extras = None

    def _extras(self) -> OutputExtras:
        if self.extras is None:
            self.extras = OutputExtras(logprobs={}, results={}, errors={}, queue_times={}, num_cached_tokens={})
        return self.extras
