"""`OutputBatch`: what steps produce, as columns ready for the wire, one set a client."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, get_args

from outboard.protocol.messages import OutputExtras
from outboard.protocol.sampling import FinishReason

__all__ = ["Columns", "OutputBatch", "Part"]

_FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)

_Pick = Callable[[Sequence[int]], Sequence[int]]


class Part:
    """What is to be sent to a client in one message, named as in `EngineCoreOutputs`."""

    __slots__ = ("counts", "extras", "finished", "handles", "tokens")

    handles: list[int]
    tokens: list[int]
    counts: list[int] | None
    finished: list[tuple[int, FinishReason, int | str | None]] | None
    extras: OutputExtras | None

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets what waits."""
        self.handles = []
        self.tokens = []
        self.counts = None
        self.finished = None
        self.extras = None

    def extras_to_fill(self) -> OutputExtras:
        """The rare fields, made with the first of them."""
        if self.extras is None:
            self.extras = OutputExtras(logprobs={}, results={}, errors={}, queue_times={}, num_cached_tokens={})
        return self.extras


class Columns(Part):
    """One client's part of a batch: what waits to be sent to it.

    Attributes:
        open: its requests that have not ended: handle -> id. `clear` leaves them.
    """

    __slots__ = ("open",)

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[int, str] = {}


class OutputBatch:
    """Collects what steps produce, as columns ready for the wire. The busy loop owns it and hands it to `step`.

    Requests that were aborted or have finished are skipped quietly: an engine need not be quicker than its users.

    Args:
        clock: what queue times are taken by, seconds.

    Attributes:
        ended: whether a request has ended; for the busy loop, which resets it.
    """

    __slots__ = (
        "_arrivals",
        "_clock",
        "_columns",
        "_handles",
        "_last_handles",
        "_last_ids",
        "_owner",
        "_parts",
        "ended",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._columns: dict[str, Columns] = {}
        self._handles: dict[str, int] = {}
        self._arrivals: dict[str, float] = {}
        # What `extend` was last given, and whose it is, as a whole or in parts: in a busy engine most steps have the
        # same requests, and often they are of one client.
        self._last_ids: list[str] = []
        self._last_handles: list[int] = []
        self._owner: Columns | None = None
        self._parts: list[tuple[Columns, list[int], _Pick]] = []
        self.ended = False

    # --- for an engine's step ---

    def extend(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Adds one token to each of these requests: the fast way.

        Args:
            request_ids: requests that are in the engine.
            token_ids: one plain int a request, in the same order.
        """
        if len(request_ids) != len(token_ids):
            raise ValueError(f"extend() got {len(request_ids)} request ids but {len(token_ids)} tokens")
        # A comparison of pointers; a lookup each would cost ten times as much.
        if request_ids != self._last_ids and not self._split(request_ids):
            for request_id, token_id in zip(request_ids, token_ids, strict=True):
                self.add(request_id, (token_id,))
            return
        columns = self._owner
        if columns is not None:
            handles, mine = columns.handles, self._last_handles
            if not handles:
                columns.handles = mine  # no copy is made before something is added to it
            elif handles is mine:
                columns.handles = handles + mine
            else:
                handles += mine
            columns.tokens += token_ids
            if columns.counts is not None:
                columns.counts.extend([1] * len(token_ids))
            return
        for columns, handles, pick in self._parts:
            columns.handles += handles
            columns.tokens += pick(token_ids)
            if columns.counts is not None:
                columns.counts.extend([1] * len(handles))

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
        columns = self._columns.get(request_id)
        if columns is None:
            return
        count = len(token_ids)
        if count != 1 and columns.counts is None:
            columns.counts = [1] * len(columns.handles)
        handles = columns.handles
        if handles is self._last_handles:
            handles = columns.handles = handles.copy()
        position = len(handles)
        handles.append(self._handles[request_id])
        columns.tokens.extend(token_ids)
        if columns.counts is not None:
            columns.counts.append(count)
        if finish_reason is not None:
            if columns.finished is None:
                columns.finished = []
            columns.finished.append((position, finish_reason, stop_reason))
            self.ended = True
            self.close(request_id)
        if logprobs:
            columns.extras_to_fill().logprobs[position] = logprobs
        if result is not None:
            columns.extras_to_fill().results[position] = result
        if error is not None:
            columns.extras_to_fill().errors[position] = error
        if num_cached_tokens:
            columns.extras_to_fill().num_cached_tokens[position] = num_cached_tokens

    def scheduled(self, request_id: str) -> None:
        """Says that a request left the waiting queue; its queue time is taken. Only the first call counts."""
        arrival = self._arrivals.pop(request_id, None)
        if arrival is not None:
            self.add(request_id)
            columns = self._columns[request_id]
            columns.extras_to_fill().queue_times[len(columns.handles) - 1] = self._clock() - arrival

    # --- for the busy loop ---

    def open(self, request_id: str, handle: int, columns: Columns) -> None:
        """From now on the engine may produce for this request of the client with these columns."""
        self._columns[request_id] = columns
        self._handles[request_id] = handle
        self._arrivals[request_id] = self._clock()
        columns.open[handle] = request_id

    def close(self, request_id: str) -> None:
        """From now on whatever the engine produces for this request is skipped."""
        columns = self._columns.pop(request_id, None)
        if columns is not None:
            self._arrivals.pop(request_id, None)
            del columns.open[self._handles.pop(request_id)]
            self._last_ids, self._owner, self._parts = [], None, []

    def is_open(self, request_id: str) -> bool:
        """Whether there is such a request, and it has not ended."""
        return request_id in self._columns

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests that have not ended, of all clients."""
        return list(self._columns)

    def __len__(self) -> int:
        """How many requests have not ended."""
        return len(self._columns)

    def _split(self, request_ids: Sequence[str]) -> bool:
        """Finds out whose these requests are; False if not all of them are open."""
        try:
            handles = list(map(self._handles.__getitem__, request_ids))
        except KeyError:
            return False
        self._last_ids, self._owner, self._parts = list(request_ids), None, []
        if not handles:
            return True
        first = self._columns[request_ids[0]]
        if len(first.open) == len(self._columns):  # all requests that there are
            self._last_handles, self._owner = handles, first
            return True
        positions: dict[Columns, list[int]] = {}
        for position, columns in enumerate(map(self._columns.__getitem__, request_ids)):
            positions.setdefault(columns, []).append(position)
        for columns, mine in positions.items():
            self._parts.append((columns, [handles[position] for position in mine], _picker(mine)))
        return True


def _picker(positions: list[int]) -> _Pick:
    """What takes the items at these places out of a sequence."""
    first, last = positions[0], positions[-1]
    if last - first == len(positions) - 1:  # always where there is one, of which itemgetter would not make a sequence
        return itemgetter(slice(first, last + 1))
    return itemgetter(*positions)
