"""What is on its way to a reader: the dispatcher adds to it, the stream takes from it.

The dispatcher's table holds slots, the user holds the `RequestStream`: so a stream that nobody holds any more can abort
its request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outboard.errors import OutboardError
from outboard.frontend.outputs import RequestMetrics, RequestOutput
from outboard.frontend.text import TextState
from outboard.frontend.waiter import Waiter
from outboard.protocol.sampling import FinishReason

if TYPE_CHECKING:
    from outboard.frontend.stream import RequestStream

__all__ = ["OnOutput", "OnText", "RequestState", "Slot"]

OnOutput = Callable[[RequestOutput | OutboardError], None]
OnText = Callable[[str], None]


class Slot:
    """One completion on its way from the dispatcher to the stream.

    Attributes:
        handle: of its request to the engine core; -1 if it was never sent.
        index: 0 to n - 1.
        request: what the completions of one request share.
        token_ids: tokens that were not taken; an int: one, as nearly always, which its reader makes a list of; an empty
            list: something else is to be taken; None: nothing is.
        text: text that was not taken.
        more: whether there is more to take than tokens and text: log probabilities, a result, the end.
        logprobs: log probabilities that were not taken.
        results: (result, bytes) that were not taken; results do not merge.
        waiter: whom to wake on anything new; None where the reader waits for the end only, or is called back.
        text_state: its detokenization; None with `detokenize=False`.
        fresh: tokens of the current message, where they are to be detokenized.
        direct: whether the dispatcher must do more for it than add the token and wake: detokenize, call back, or note
            that this is the first token.
        on_text: called with each further text, in place of `on_output`, while there is nothing else to tell; set once
            there was a first output.
        open: whether more is to come; not before it is sent, nor after its end.
        taken: how many tokens were taken.
        finish_reason, stop_reason, error: set at the end.
    """

    __slots__ = (
        "direct",
        "error",
        "finish_reason",
        "fresh",
        "handle",
        "index",
        "logprobs",
        "more",
        "on_text",
        "open",
        "request",
        "result_bytes",
        "results",
        "stop_reason",
        "taken",
        "text",
        "text_state",
        "token_ids",
        "waiter",
    )

    def __init__(self, request: RequestState, index: int, text_state: TextState | None) -> None:
        self.request = request
        self.index = index
        self.handle = -1
        self.token_ids: list[int] | int | None = None
        self.text = ""
        self.more = False
        self.logprobs: list[dict[int, float]] | None = None
        self.results: deque[tuple[Any, int]] | None = None
        self.result_bytes = 0
        self.waiter: Waiter | None = None
        self.text_state = text_state
        self.fresh: list[int] = []
        self.direct = True
        self.on_text: OnText | None = None
        self.open = False
        self.taken = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None

    def absorb_fresh(self) -> None:
        """Makes the fresh tokens readable."""
        fresh = self.fresh
        if not fresh:
            return
        request = self.request
        if request.metrics.time_to_first_token is None:
            request.metrics.time_to_first_token = request.age()
        self.direct = self.text_state is not None or request.on_output is not None
        if self.text_state is not None:
            self.on_text = request.on_text
        token_ids = self.token_ids
        if token_ids is None and len(fresh) == 1:
            self.token_ids = fresh.pop()
            return
        self.fresh = []
        if token_ids is None:
            self.token_ids = fresh
        elif isinstance(token_ids, int):
            self.token_ids = [token_ids, *fresh]
        else:
            token_ids += fresh

    def add_logprobs(self, logprobs: list[dict[int, float]]) -> None:
        """Makes the log probabilities of the fresh tokens readable."""
        self.logprobs = (self.logprobs or []) + logprobs
        self.more = True

    def add_result(self, result: Any) -> None:
        """Makes a result readable."""
        if self.results is None:
            self.results = deque()
        size = _size_of(result)
        self.results.append((result, size))
        self.more = True
        self.result_bytes += size
        if self.token_ids is None:
            self.token_ids = []

    @property
    def is_behind(self) -> bool:
        """Whether there is more than one result to read; one alone may have any size."""
        return self.results is not None and len(self.results) > 1

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Marks the end. Wakes nobody."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.more = True
        self.open = False
        if self.token_ids is None:
            self.token_ids = []


class RequestState:
    """What the completions of one request share.

    Attributes:
        request_id: the user's name for it.
        final_only: whether its reader wants to be woken at the end only.
        slots: its completions.
        unfinished: how many of them have not ended; 0 before the request is sent.
        metrics: filled in as it goes on.
        waiter: what its reader awaits; None before it is sent.
        failure: ended the request from outside, such as the engine's death; raised once the slots are empty.
        on_output: called back with each output, instead of a reader that is woken.
        on_text: called back with a text instead, where that says it all.
        stream: keeps the stream alive while there is `on_output`: then nobody else need hold it.
    """

    __slots__ = (
        "_started",
        "failure",
        "final_only",
        "metrics",
        "on_output",
        "on_text",
        "request_id",
        "slots",
        "stream",
        "unfinished",
        "waiter",
    )

    def __init__(self, request_id: str, final_only: bool, on_output: OnOutput | None) -> None:
        self.request_id = request_id
        self.final_only = final_only
        self.waiter: Waiter | None = None
        self.slots: list[Slot] = []
        self.unfinished = 0
        self.metrics = RequestMetrics(arrival_time=time.time())
        self.failure: OutboardError | None = None
        self.on_output = on_output
        self.on_text: OnText | None = None
        self.stream: RequestStream | None = None
        self._started = time.monotonic()

    def age(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self._started

    def fail(self, error: OutboardError) -> None:
        """Ends the request with an error of its own; what had arrived stays readable."""
        self.failure = error
        self.unfinished = 0
        for slot in self.slots:
            slot.open = False
        self.wake()

    def wake(self) -> None:
        """Wakes the reader, if it waits."""
        if self.waiter is not None:
            self.waiter.wake()


def _size_of(value: Any) -> int:
    """Bytes that a result takes, roughly: those of its buffers and texts, and 8 for anything else."""
    if isinstance(value, (list, tuple)):
        return 8 + sum(map(_size_of, value))
    if isinstance(value, dict):
        return 8 + sum(map(_size_of, value.keys())) + sum(map(_size_of, value.values()))
    if isinstance(value, (str, bytes, bytearray)):
        return 8 + len(value)
    return 8 + getattr(value, "nbytes", 0)
