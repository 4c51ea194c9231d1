"""`EngineHarness`: an engine core stepped by hand, with no process, no socket and no thread."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outboard.engine.batch import Columns
from outboard.engine.calls import convert_arguments
from outboard.engine.core import EngineCore, no_such_utility, utility_methods
from outboard.errors import InvalidRequestError, UtilityNotFoundError
from outboard.protocol.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from outboard.protocol.sampling import FinishReason, SamplingParams
from outboard.testing.recorder import RecordingBatch

__all__ = ["EngineHarness", "ManualClock", "RequestRecord"]


@dataclass(slots=True)
class RequestRecord:
    """All that a request has produced so far.

    Attributes:
        request: as the engine got it.
        tokens, logprobs, results: in order. A result is the very object that the engine handed over.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on. "abort" too after `harness.abort`.
        stop_reason: the token or string that stopped it.
        error: why it ended with "error".
        exception: what `add_request` raised, where that ended it.
        queue_time: seconds until the engine called `outputs.scheduled`; None before, or if it never does.
        num_cached_tokens: prompt tokens that the prefix cache served.
        first_step, last_step: the steps, counted from 1, that gave the first token or result, and the end.
    """

    request: EngineCoreRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    exception: Exception | None = None
    queue_time: float | None = None
    num_cached_tokens: int = 0
    first_step: int | None = None
    last_step: int | None = None

    @property
    def finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.finish_reason is not None


class ManualClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class EngineHarness:
    """Does with an engine what the busy loop of an engine-core process does, one call at a time.

    What the loop answers to a client is here an exception or an entry of `requests`; an exception of `step` passes
    through, in a process it would end the engine core. Same calls, same outcome: nothing happens in between.

    Args:
        engine: the engine core; the harness does not own it.
        clock: what queue times are taken by, seconds; a `ManualClock` makes them exact.

    Attributes:
        requests: every request so far, by id.
        steps: how often the engine was stepped.
        strays: ids of requests for which the engine added something after their end. A client never sees that; it
            shows that the engine still works on them.
    """

    def __init__(self, engine: EngineCore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.requests: dict[str, RequestRecord] = {}
        self.steps = 0
        self._ids: list[str] = []  # by handle
        self._batch = RecordingBatch(clock)
        self._columns = Columns()
        self._utilities = set(utility_methods(engine))

    @property
    def strays(self) -> list[str]:
        return self._batch.strays

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests that have not ended, in order of arrival."""
        return self._batch.open_requests

    def __getitem__(self, request_id: str) -> RequestRecord:
        """What a request has produced so far."""
        return self.requests[request_id]

    def add(
        self,
        prompt_token_ids: Sequence[int] = (),
        sampling_params: SamplingParams | None = None,
        inputs: Any = None,
        request_id: str | None = None,
    ) -> str:
        """Gives the engine a request and returns its id; see `add_request`."""
        request = EngineCoreRequest(
            request_id=f"request-{len(self._ids)}" if request_id is None else request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=sampling_params or SamplingParams(),
            inputs=inputs,
        )
        return self.add_request(request)

    def add_request(self, request: EngineCoreRequest) -> str:
        """Gives the engine a request and returns its id. The prompt becomes an int32 array, as in a process.

        An exception of the engine's `add_request` ends that request with "error", as in a process; the exception is
        kept in its record.

        Raises:
            ValueError: the id has been used. A client makes every id unique.
        """
        request_id = request.request_id
        if request_id in self.requests:
            raise ValueError(f"there was a request {request_id!r} already; an engine never sees an id twice")
        request.prompt_token_ids = array("i", request.prompt_token_ids)
        request.external_req_id = request.external_req_id or request_id
        record = self.requests[request_id] = RequestRecord(request)
        self._batch.open(request_id, len(self._ids), self._columns)
        self._ids.append(request_id)
        try:
            self.engine.add_request(request)
        except Exception as error:
            self._batch.close(request_id)
            record.exception = error
            record.error = str(error) if isinstance(error, InvalidRequestError) else f"{type(error).__name__}: {error}"
            record.finish_reason = "error"
        return request_id

    def abort(self, *request_ids: str) -> None:
        """Aborts requests. Those that are unknown or have ended are passed on to the engine too: no error for it."""
        for request_id in request_ids:
            record = self.requests.get(request_id)
            if record is not None and not record.finished:
                self._batch.close(request_id)
                record.finish_reason = "abort"
                record.last_step = self.steps
        self.engine.abort_requests(list(request_ids))

    def step(self) -> list[EngineCoreOutput]:
        """One step, if the engine has work; returns what it produced, in order."""
        if not self.engine.has_work():
            return []
        self.steps += 1
        self.engine.step(self._batch)
        columns = self._columns
        outputs = EngineCoreOutputs(
            0,
            0,
            self.steps,
            0.0,
            columns.handles,
            columns.tokens,
            columns.counts,
            columns.finished,
            columns.extras,
            request_ids=[self._ids[handle] for handle in columns.handles],
        ).outputs
        columns.clear()
        for output in outputs:
            self._record(output)
        return outputs

    def run_until_idle(self, max_steps: int = 10_000) -> dict[str, RequestRecord]:
        """Steps until the engine has no work, and returns `requests`.

        Raises:
            AssertionError: it still has work after `max_steps` steps.
        """
        for _ in range(max_steps):
            if not self.engine.has_work():
                return self.requests
            self.step()
        if self.engine.has_work():
            raise AssertionError(f"the engine still has work after {max_steps} steps; {self._describe_open()}")
        return self.requests

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls an `@utility` method of the engine, its arguments converted by its annotations as in a process.

        What the busy loop itself answers (`pause_generation` and the like) is not here. A `Future` is returned as it
        is: step on, then ask it.

        Raises:
            UtilityNotFoundError: there is no such method, or it is not marked.
            UtilityError: an argument does not fit its annotation.
        """
        if method not in self._utilities:
            raise UtilityNotFoundError(no_such_utility(self.engine, method))
        function = getattr(self.engine, method)
        args_, kwargs = convert_arguments(function, list(args), kwargs)
        return function(*args_, **kwargs)

    def stats(self) -> SchedulerStats:
        """The engine's load; if it does not tell, the open requests count as running, as in a process."""
        return self.engine.scheduler_stats() or SchedulerStats(running=len(self._batch))

    def shutdown(self) -> None:
        """Ends the engine as a process does: aborts what is open, then calls its `shutdown`."""
        if open_requests := self.open_requests:
            self.abort(*open_requests)
        self.engine.shutdown()

    def _record(self, output: EngineCoreOutput) -> None:
        record = self.requests[output.request_id]
        record.tokens += output.new_token_ids
        record.logprobs += output.new_logprobs or ()
        if output.result is not None:
            record.results.append(output.result)
        if output.queue_time is not None:
            record.queue_time = output.queue_time
        record.num_cached_tokens = output.num_cached_tokens or record.num_cached_tokens
        if record.first_step is None and (output.new_token_ids or output.result is not None):
            record.first_step = self.steps
        if output.finish_reason is not None:
            record.finish_reason = output.finish_reason
            record.stop_reason = output.stop_reason
            record.error = output.error
            record.last_step = self.steps

    def _describe_open(self) -> str:
        waiting = self.open_requests
        if not waiting:
            return "all requests have ended: has_work() should be False by now"
        shown = ", ".join(f"{name!r} ({len(self.requests[name].tokens)} tokens)" for name in waiting[:5])
        return f"{len(waiting)} requests have not ended: {shown}{', ...' if len(waiting) > 5 else ''}"
