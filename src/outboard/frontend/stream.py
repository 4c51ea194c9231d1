"""`RequestStream`: the outputs of one request, for one reader; what has not been taken yet merges."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, Self

from outboard.errors import ClientClosedError, EngineDeadError, OutboardError
from outboard.frontend.outputs import CompletionOutput, RequestOutput
from outboard.frontend.slot import OnOutput, RequestState, Slot
from outboard.protocol.sampling import SamplingParams

__all__ = ["RequestStream", "Submitter"]


class Submitter(Protocol):
    """What a stream needs of the front end that made it; holding it keeps the client alive."""

    async def submit_stream(self, stream: RequestStream) -> None:
        """Sends the request of a stream and fills in its slots."""

    def abort_slots(self, slots: Sequence[Slot]) -> None:
        """Ends the completions that have not ended, with "abort"."""


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
        closed: whether it was aborted before it was sent.
    """

    __slots__ = (
        "__weakref__",
        "_delta",
        "_final_only",
        "_loop",
        "_metrics",
        "_only",
        "_slots",
        "_so_far",
        "_submitter",
        "asked",
        "closed",
        "data_parallel_rank",
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
        data_parallel_rank: int | None = None,
        on_output: OnOutput | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.prompt: str | None = prompt if isinstance(prompt, str) else None
        self.prompt_token_ids: Sequence[int] | None = None
        self.asked = prompt
        self.inputs = inputs
        self.data_parallel_rank = data_parallel_rank
        self.closed = False
        self._final_only = params.output_kind == "final_only"
        self.state = RequestState(request_id, self._final_only, on_output)
        self._submitter = submitter
        self._loop: asyncio.AbstractEventLoop | None = None  # once begun
        self._only: Slot | None = None  # once begun, where there is one completion and outputs are deltas
        self._slots = self.state.slots
        self._metrics = self.state.metrics
        self._delta = params.output_kind == "delta"
        self._so_far: dict[int, CompletionOutput] = {}  # by index, where outputs are not deltas

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        # The hot path: one completion, deltas. One coroutine, one wake, two objects.
        slot = self._only
        if slot is None:
            return await self._next()
        while (token_ids := slot.token_ids) is None:
            if not slot.open:
                self._raise_end()
            waiter = slot.waiter
            if waiter is None or waiter.callback is not None:
                raise self._second_reader()
            try:
                await waiter
            except asyncio.CancelledError:
                self.abort()
                raise
        if slot.more:
            output = self.take()
            assert output is not None  # there are token ids, if only an empty list of them
            return output
        slot.token_ids = None
        if isinstance(token_ids, int):
            token_ids = [token_ids]
        slot.taken += len(token_ids)
        text = slot.text
        if text:
            slot.text = ""
        completion = CompletionOutput(slot.index, text, token_ids)
        return RequestOutput(self.request_id, [completion], False, self.prompt, self.prompt_token_ids, self._metrics)

    @property
    def num_generation_tokens(self) -> int:
        """Tokens that were read, or told of by call-backs, so far."""
        return sum(slot.taken for slot in self._slots)

    async def aclose(self) -> None:
        """Aborts the request, if it has not ended. What had arrived can still be read."""
        self.abort()

    def abort(self) -> None:
        """As `aclose`. Call it on the loop."""
        if self.state.unfinished:
            self._submitter.abort_slots(self._slots)
        elif not self._slots:
            self.closed = True  # it has not been sent, and will not be

    def __del__(self) -> None:
        # The garbage collector may come at any time and in any thread: only ask the loop.
        loop = self._loop
        if loop is None or not self.state.unfinished:
            return
        try:
            loop.call_soon_threadsafe(self._submitter.abort_slots, self._slots)
            if self.state.on_output is not None:  # nobody holds the AsyncLLM either
                loop.call_soon_threadsafe(self.state.on_output, ClientClosedError("the AsyncLLM was dropped"))
        except RuntimeError:  # the loop is closed
            pass

    # --- for AsyncLLM and the dispatcher ---

    async def begin(self) -> None:
        """Sends the request."""
        self._loop = asyncio.get_running_loop()
        try:
            if not self.closed:
                await self._submitter.submit_stream(self)
        except asyncio.CancelledError:
            self.closed = True
            raise
        finally:
            if self.closed and not self._slots:
                slot = Slot(self.state, 0, None)
                slot.finish("abort")
                self._slots.append(slot)
        if self._delta and len(self._slots) == 1:
            self._only = self._slots[0]

    def take(self) -> RequestOutput | None:
        """What there is to be read; None if there is nothing yet."""
        state = self.state
        if self._final_only and (state.unfinished or state.failure is not None):
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
                state.metrics.num_generation_tokens = self.num_generation_tokens
        return RequestOutput(self.request_id, outputs, finished, self.prompt, self.prompt_token_ids, state.metrics)

    def emit(self) -> None:
        """Calls back with what there is, and with the failure at the end."""
        on_output = self.state.on_output
        assert on_output is not None
        while (output := self.take()) is not None:
            on_output(output)
        failure, self.state.failure = self.state.failure, None
        if failure is not None:
            on_output(_fresh(failure))

    def _take_slot(self, slot: Slot) -> CompletionOutput:
        token_ids = slot.token_ids
        assert token_ids is not None
        if isinstance(token_ids, int):
            token_ids = [token_ids]
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
        waiter = self.state.waiter
        if waiter is None or waiter.callback is not None:
            raise self._second_reader()
        try:
            await waiter
        except asyncio.CancelledError:
            self.abort()
            raise

    def _raise_end(self) -> NoReturn:
        if self.state.failure is not None:
            raise _fresh(self.state.failure)
        raise StopAsyncIteration

    def _second_reader(self) -> RuntimeError:
        return RuntimeError(f"request {self.request_id!r} has a reader already; a stream is for one")


def _fresh(error: OutboardError) -> OutboardError:
    """An instance for one raise: a shared one would collect the tracebacks of all."""
    return error.copy() if isinstance(error, EngineDeadError) else type(error)(*error.args)
