"""The per-request stream: what its reader has not taken yet merges; one waiter, woken by a bare future.

A `Slot` is one completion on its way: the dispatcher adds to it, the stream takes from it. The dispatcher's table holds
slots, the user holds the `RequestStream`: so that a stream that nobody holds any more can abort its request.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, Self

from outboard.errors import EngineDeadError, OutboardError
from outboard.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from outboard.frontend.text import TextState
from outboard.protocol.sampling import FinishReason, SamplingParams

__all__ = ["OnOutput", "RequestState", "RequestStream", "Slot", "Submitter"]

OnOutput = Callable[[RequestOutput | OutboardError], None]


class Submitter(Protocol):
    """What a stream needs of the front end that made it; holding it keeps the client alive."""

    async def submit_stream(self, stream: RequestStream) -> None:
        """Sends the request of a stream and fills in its slots."""

    def abort_slots(self, slots: Sequence[Slot]) -> None:
        """Ends the completions that have not ended, with "abort"."""


class Slot:
    """One completion on its way from the dispatcher to the stream.

    Attributes:
        handle: of its request to the engine core; -1 if it was never sent.
        index: 0 to n - 1.
        request: what the completions of one request share.
        token_ids: tokens that were not taken; an empty list: something else is to be taken; None: nothing is.
        text: text that was not taken.
        more: whether there is more to take than tokens and text: log probabilities, a result, the end.
        logprobs: log probabilities that were not taken.
        results: (result, bytes) that were not taken; results do not merge.
        waiter: the future to wake on anything new. final_waiter: the one to wake at the end.
        text_state: its detokenization; None with `detokenize=False`.
        fresh: tokens of the current message, where they are to be detokenized.
        direct: whether the dispatcher must do more for it than add the token and wake: detokenize, call back, or note
            that this is the first token.
        open: whether more is to come; not before it is sent, nor after its end.
        taken: how many tokens were taken.
        finish_reason, stop_reason, error: set at the end.
    """

    __slots__ = (
        "direct",
        "error",
        "final_waiter",
        "finish_reason",
        "fresh",
        "handle",
        "index",
        "logprobs",
        "more",
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
        self.token_ids: list[int] | None = None
        self.text = ""
        self.more = False
        self.logprobs: list[dict[int, float]] | None = None
        self.results: deque[tuple[Any, int]] | None = None
        self.result_bytes = 0
        self.waiter: asyncio.Future[None] | None = None
        self.final_waiter: asyncio.Future[None] | None = None
        self.text_state = text_state
        self.fresh: list[int] = []
        self.direct = True
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
        self.fresh = []
        request = self.request
        if request.metrics.time_to_first_token is None:
            request.metrics.time_to_first_token = request.age()
        self.direct = self.text_state is not None or request.on_output is not None
        if self.token_ids is None:
            self.token_ids = fresh
        else:
            self.token_ids += fresh

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

    def wake(self) -> None:
        """Wakes whoever waits for something new."""
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def wake_final(self) -> None:
        """Wakes whoever waits for the end only."""
        waiter = self.final_waiter
        if waiter is not None:
            self.final_waiter = None
            if not waiter.done():
                waiter.set_result(None)

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
        slots: its completions.
        unfinished: how many of them have not ended; 0 before the request is sent.
        metrics: filled in as it goes on.
        failure: ended the request from outside, such as the engine's death; raised once the slots are empty.
        on_output: called back with each output, instead of a reader that is woken.
        stream: keeps the stream alive while there is `on_output`: then nobody else need hold it.
    """

    __slots__ = ("_started", "failure", "metrics", "on_output", "request_id", "slots", "stream", "unfinished")

    def __init__(self, request_id: str, on_output: OnOutput | None) -> None:
        self.request_id = request_id
        self.slots: list[Slot] = []
        self.unfinished = 0
        self.metrics = RequestMetrics(arrival_time=time.time())
        self.failure: OutboardError | None = None
        self.on_output = on_output
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
            slot.wake()
            slot.wake_final()


class RequestStream:
    """The outputs of one request, as an async iterator for one reader. Made by `AsyncLLM.generate`.

    The request is sent with the first `__anext__`. What the reader has not taken merges, so a slow reader costs memory
    for its tokens only. Cancelling `__anext__`, `aclose`, `AsyncLLM.abort` and dropping the last reference abort the
    request: what had arrived stays readable, with `finish_reason` "abort" on the last output. An engine's error for
    this request alone is an output too, with `finish_reason` "error" and `error`.

    Raises, from `__anext__`:
        InvalidRequestError: the request cannot be served; nothing was sent.
        SlowReaderError: results that cannot be merged exceeded `stream_buffer_bytes`.
        EngineDeadError: the engine core is gone; what had arrived was returned before.

    Attributes:
        request_id: the user's name for it, or a random one.
        prompt, prompt_token_ids: what was asked; the token ids are there once it is sent.
    """

    __slots__ = (
        "__weakref__",
        "_create_future",
        "_delta",
        "_final_only",
        "_loop",
        "_metrics",
        "_only",
        "_slots",
        "_so_far",
        "_submitter",
        "asked",
        "inputs",
        "params",
        "prompt",
        "prompt_token_ids",
        "request_id",
        "state",
    )

    def __init__(
        self,
        submitter: Submitter,
        request_id: str,
        params: SamplingParams,
        prompt: Any,
        inputs: Any = None,
        on_output: OnOutput | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.prompt: str | None = prompt if isinstance(prompt, str) else None
        self.prompt_token_ids: Sequence[int] | None = None
        self.asked = prompt
        self.inputs = inputs
        self.state = RequestState(request_id, on_output)
        self._submitter = submitter
        self._loop: asyncio.AbstractEventLoop | None = None  # once begun
        self._create_future: Callable[[], asyncio.Future[None]]
        self._only: Slot | None = None  # once begun, where there is one completion and outputs are deltas
        self._slots = self.state.slots
        self._metrics = self.state.metrics
        self._delta = params.output_kind == "delta"
        self._final_only = params.output_kind == "final_only"
        self._so_far: dict[int, CompletionOutput] = {}  # by index, where outputs are not deltas

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        # The hot path: one completion, deltas. One coroutine, one future, two objects a wake.
        slot = self._only
        if slot is None:
            return await self._next()
        while (token_ids := slot.token_ids) is None:
            if not slot.open:
                self._raise_end()
            if slot.waiter is not None:
                raise self._second_reader()
            slot.waiter = waiter = self._create_future()
            try:
                await waiter
            except BaseException as error:
                slot.waiter = None
                if isinstance(error, asyncio.CancelledError):
                    self.abort()
                raise
        if slot.more:
            output = self.take()
            assert output is not None  # there are token ids, if only an empty list of them
            return output
        slot.token_ids = None
        slot.taken += len(token_ids)
        text = slot.text
        if text:
            slot.text = ""
        completion = CompletionOutput(slot.index, text, token_ids)
        return RequestOutput(self.request_id, [completion], False, self.prompt, self.prompt_token_ids, self._metrics)

    async def aclose(self) -> None:
        """Aborts the request, if it has not ended. What had arrived can still be read."""
        self.abort()

    def abort(self) -> None:
        """As `aclose`. Call it on the loop."""
        if self.state.unfinished:
            self._submitter.abort_slots(self._slots)

    def __del__(self) -> None:
        # The garbage collector may come at any time and in any thread: only ask the loop.
        loop = self._loop
        if loop is not None and self.state.unfinished and loop.is_running():
            try:
                loop.call_soon_threadsafe(self._submitter.abort_slots, self._slots)
            except RuntimeError:  # it was closed in between
                pass

    # --- for AsyncLLM and the dispatcher ---

    async def begin(self) -> None:
        """Sends the request."""
        self._loop = asyncio.get_running_loop()
        # What loop.create_future does, without its Python frame.
        self._create_future = functools.partial(asyncio.Future, loop=self._loop)
        try:
            await self._submitter.submit_stream(self)
        except asyncio.CancelledError:
            slot = Slot(self.state, 0, None)
            slot.finish("abort")
            self._slots[:] = [slot]
            raise
        if self._delta and len(self._slots) == 1:
            self._only = self._slots[0]

    def take(self) -> RequestOutput | None:
        """What there is to be read; None if there is nothing yet."""
        state = self.state
        if self._final_only and state.unfinished:
            return None
        outputs = [self._take_slot(slot) for slot in self._slots if slot.token_ids is not None]
        if not outputs:
            return None
        finished = False
        if not state.unfinished and state.failure is None:
            finished = len(self._slots) == 1 or all(slot.token_ids is None for slot in self._slots)
            finished = finished and outputs[-1].finish_reason is not None
            if finished:
                state.metrics.e2e_latency = state.age()
                state.metrics.num_generation_tokens = sum(slot.taken for slot in self._slots)
        return RequestOutput(self.request_id, outputs, finished, self.prompt, self.prompt_token_ids, state.metrics)

    def emit(self) -> None:
        """Calls back with what there is, and with the failure at the end."""
        on_output = self.state.on_output
        assert on_output is not None
        while (output := self.take()) is not None:
            on_output(output)
        if self.state.failure is not None:
            on_output(_fresh(self.state.failure))

    def _take_slot(self, slot: Slot) -> CompletionOutput:
        token_ids = slot.token_ids
        assert token_ids is not None
        slot.token_ids = None
        slot.taken += len(token_ids)
        text, logprobs = slot.text, slot.logprobs
        slot.text, slot.logprobs, slot.more = "", None, False
        output = CompletionOutput(
            slot.index, text, token_ids, slot.finish_reason, slot.stop_reason, logprobs, None, slot.error
        )
        if slot.results:
            output.result, size = slot.results.popleft()
            slot.result_bytes -= size
            if slot.results:  # more to come: the end is told with the last
                slot.token_ids = []
                slot.more = True
                output.finish_reason = output.stop_reason = output.error = None
        return output if self._delta else self._with_earlier(output)

    def _with_earlier(self, output: CompletionOutput) -> CompletionOutput:
        earlier = self._so_far.get(output.index)
        if earlier is not None:
            output.text = earlier.text + output.text
            output.token_ids = earlier.token_ids + output.token_ids
            if earlier.logprobs is not None:
                output.logprobs = earlier.logprobs + (output.logprobs or [])
        self._so_far[output.index] = output
        return output

    async def _next(self) -> RequestOutput:
        """As `__anext__`, for every kind of stream."""
        if self._loop is None:
            await self.begin()
        while (output := self.take()) is None:
            if not self.state.unfinished:
                self._raise_end()
            await self._wait()
        return output

    async def _wait(self) -> None:
        slots = self._slots
        if slots[0].waiter is not None or slots[0].final_waiter is not None:
            raise self._second_reader()
        waiter = self._create_future()
        for slot in slots:
            if self._final_only:
                slot.final_waiter = waiter
            else:
                slot.waiter = waiter
        try:
            await waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            for slot in slots:
                slot.waiter = slot.final_waiter = None

    def _raise_end(self) -> NoReturn:
        if self.state.failure is not None:
            raise _fresh(self.state.failure)
        raise StopAsyncIteration

    def _second_reader(self) -> RuntimeError:
        return RuntimeError(f"request {self.request_id!r} has a reader already; a stream is for one")


def _size_of(value: Any) -> int:
    """Bytes that a result takes, roughly: those of its buffers and texts, and 8 for anything else."""
    if isinstance(value, (list, tuple)):
        return 8 + sum(map(_size_of, value))
    if isinstance(value, dict):
        return 8 + sum(map(_size_of, value.keys())) + sum(map(_size_of, value.values()))
    if isinstance(value, (str, bytes, bytearray)):
        return 8 + len(value)
    return 8 + getattr(value, "nbytes", 0)


def _fresh(error: OutboardError) -> OutboardError:
    """An instance for one raise: a shared one would collect the tracebacks of all."""
    return error.copy() if isinstance(error, EngineDeadError) else type(error)(*error.args)
