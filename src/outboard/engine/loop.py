"""The busy loop of an engine core, as a state machine that knows neither sockets nor threads.

    RUNNING --stop()--> STOPPING --all requests aborted, outputs flushed--> STOPPED

Everything that happens comes through one queue, so that requests, aborts, utility calls, deferred results and signals
have one order. Outputs leave inline, after each step: a thread for them would wait for the GIL up to a whole switch
interval a message.
"""

from __future__ import annotations

import copy
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from outboard.engine.core import EngineCore, OutputBatch, utility_methods
from outboard.errors import InvalidRequestError, UtilityNotFoundError
from outboard.protocol.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreOutputs,
    ErrorReport,
    OutputExtras,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
)

__all__ = ["UTILITY_NOT_FOUND", "BadRequest", "BusyLoop", "DeferredResult", "OutputPort", "Stop", "error_report"]

logger = logging.getLogger("outboard.engine")

# With outputs that could not leave and nothing else to do, the loop looks again after 1 ms, then less often.
_FIRST_RETRY = 0.001
_LAST_RETRY = 0.020
# How long the last outputs may take to leave after a stop, seconds.
_FLUSH_BOUND = 1.0

# The error type by which a client knows that a utility method does not exist.
UTILITY_NOT_FOUND = f"{UtilityNotFoundError.__module__}.{UtilityNotFoundError.__qualname__}"


Frames = Sequence[Any]


class OutputPort(Protocol):
    """Where outputs leave. Never blocks."""

    def encode(self, message: EngineCoreOutputs) -> Frames:
        """Raises TypeError, ValueError or OverflowError for what cannot be sent."""
        ...

    def writable(self) -> bool:
        """Whether a message would be taken now."""
        ...

    def send(self, frames: Frames) -> bool:
        """False if it is not taken."""
        ...


class BadRequest:
    """In the loop's queue: an ADD that was told apart by its handle but is no valid request."""

    def __init__(self, handle: int, reason: str) -> None:
        self.handle = handle
        self.reason = reason


class DeferredResult:
    """In the loop's queue: the future that a utility method returned is done."""

    def __init__(self, call_id: int, future: Future[Any]) -> None:
        self.call_id = call_id
        self.future = future


class Stop:
    """In the loop's queue: abort everything and end."""


class _State(Enum):
    RUNNING = auto()
    STOPPING = auto()
    STOPPED = auto()


class BusyLoop:
    """Feeds an engine from a queue and sends what its steps produce.

    Args:
        engine: the engine core.
        inbox: what happens: messages and the items above. Filled by the input thread, by signal handlers (a
            `SimpleQueue` may be put to from one) and by deferred results.
        port: where outputs leave.
        rank, epoch: stamped on every message.
    """

    def __init__(
        self, engine: EngineCore, inbox: SimpleQueue[Any], port: OutputPort, *, rank: int = 0, epoch: int = 0
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._port = port
        self._rank = rank
        self._epoch = epoch
        self._batch = OutputBatch()
        self._request_ids: dict[int, str] = {}  # by handle, of requests that have not ended
        self._utilities = {name: getattr(engine, name) for name in utility_methods(engine)}
        self._answers: deque[UtilityOutput] = deque()
        self._state = _State.RUNNING
        self._sequence = 0
        self._stats = SchedulerStats()
        self._stats_sent = SchedulerStats()
        self._refused = False  # whether the port took no more when last asked
        self._retry_after = _FIRST_RETRY
        self._stop_by = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            AddRequest: self._add,
            AbortRequests: self._abort,
            UtilityCall: self._call,
            BadRequest: self._refuse,
            DeferredResult: self._deferred,
            Stop: self._stop,
        }

    def run(self) -> None:
        """Runs until stopped. An exception of the engine's `step` passes through: its state is then unknown."""
        while self._state is not _State.STOPPED:
            self.turn()

    def turn(self) -> None:
        """One round: take what has come (wait for it if there is nothing else to do), step, send."""
        engine = self._engine
        self._take_input(wait=not engine.has_work())
        if self._state is _State.RUNNING and engine.has_work():
            engine.step(self._batch)
        self._flush()
        if self._state is _State.STOPPING and (not self._backlog or time.monotonic() > self._stop_by):
            self._state = _State.STOPPED

    # --- input ---

    def _take_input(self, wait: bool) -> None:
        inbox = self._inbox
        stopping = self._state is _State.STOPPING
        if not (wait or stopping) and inbox.empty():  # the common case in a busy engine, cheaper than an exception
            return
        try:
            if wait or stopping:
                item = inbox.get(timeout=self._retry_after) if self._backlog or stopping else inbox.get()
            else:
                item = inbox.get_nowait()
            while True:
                self._handlers[type(item)](item)
                item = inbox.get_nowait()
        except Empty:
            pass

    def _add(self, message: AddRequest) -> None:
        try:
            request = message.to_request()
        except ValueError as error:  # the prompt ends inside a token
            self._refuse(BadRequest(message.handle, _describe(error)))
            return
        self._batch.open(request.request_id, message.handle)
        if self._state is not _State.RUNNING:
            self._batch.add(request.request_id, finish_reason="abort")
            return
        self._request_ids[message.handle] = request.request_id
        try:
            self._engine.add_request(request)
        except Exception as error:
            if not isinstance(error, InvalidRequestError):
                logger.exception("add_request failed for request %r", message.external_req_id)
            self._batch.add(request.request_id, finish_reason="error", error=_describe(error))

    def _refuse(self, item: BadRequest) -> None:
        request_id = f"refused-{item.handle}"
        self._batch.open(request_id, item.handle)
        self._batch.add(request_id, finish_reason="error", error=item.reason)

    def _abort(self, message: AbortRequests) -> None:
        ids = [self._request_ids.pop(handle) for handle in message.handles if handle in self._request_ids]
        if ids:
            for request_id in ids:
                self._batch.close(request_id)
            self._engine.abort_requests(ids)

    def _stop(self, item: Stop) -> None:
        if self._state is _State.RUNNING:
            self._state = _State.STOPPING
            self._stop_by = time.monotonic() + _FLUSH_BOUND
        if open_requests := self._batch.open_requests:
            self._engine.abort_requests(open_requests)
            for request_id in open_requests:
                self._batch.add(request_id, finish_reason="abort")

    # --- utility calls ---

    def _call(self, call: UtilityCall) -> None:
        method = self._utilities.get(call.method)
        if method is None:
            there = ", ".join(self._utilities) or "none"
            message = f"{type(self._engine).__name__} has no utility method {call.method!r}; it has: {there}"
            self._answer(UtilityOutput(call.call_id, error=ErrorReport(UTILITY_NOT_FOUND, message, "")))
            return
        try:
            result = method(*call.args, **call.kwargs)
        except Exception as error:
            self._answer(UtilityOutput(call.call_id, error=error_report(error)))
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda future: self._inbox.put(DeferredResult(call.call_id, future)))
        else:
            self._answer(UtilityOutput(call.call_id, result))

    def _deferred(self, item: DeferredResult) -> None:
        try:
            answer = UtilityOutput(item.call_id, item.future.result(timeout=0))
        except BaseException as error:  # CancelledError too: whatever ended the future is the caller's
            answer = UtilityOutput(item.call_id, error=error_report(error))
        self._answer(answer)

    def _answer(self, answer: UtilityOutput) -> None:
        """Sends an answer behind all outputs so far, or keeps it with the backlog."""
        self._answers.append(answer)
        self._flush()

    # --- output ---

    @property
    def _backlog(self) -> bool:
        return bool(self._batch.handles or self._answers or self._stats != self._stats_sent)

    def _flush(self) -> None:
        """Sends what there is: the columns, then each answer in a message of its own. What is refused stays."""
        batch = self._batch
        for position, _, _ in batch.finished or ():
            self._request_ids.pop(batch.handles[position], None)
        stats = self._engine.scheduler_stats()
        # A copy: an engine may hand out one object again and again, with other values in it.
        self._stats = SchedulerStats(running=len(batch)) if stats is None else copy.copy(stats)
        while self._backlog:
            # Once refused, ask before encoding again: what is held grows.
            if (self._refused and not self._port.writable()) or not self._port.send(self._encode_next()):
                self._retry_after = min(self._retry_after * 2, _LAST_RETRY) if self._refused else _FIRST_RETRY
                self._refused = True
                return
            self._refused = False
            self._sequence += 1
            self._stats_sent = self._stats
            if batch.handles:
                batch.clear()
            elif self._answers:
                self._answers.popleft()

    def _encode_next(self) -> Frames:
        batch = self._batch
        message = EngineCoreOutputs(self._rank, self._epoch, self._sequence, time.monotonic())
        if self._stats != self._stats_sent:
            message.scheduler_stats = self._stats
        if batch.handles:
            message.handles = batch.handles
            message.tokens = batch.tokens
            message.counts = batch.counts
            message.finished = batch.finished
            message.extras = batch.extras
        elif self._answers:
            message.utility_output = self._answers[0]
        try:
            return self._port.encode(message)
        except _UNSENDABLE as error:
            if batch.handles:
                self._fail_unsendable_results()
                message.handles, message.counts, message.finished = batch.handles, batch.counts, batch.finished
                message.extras = batch.extras
            else:
                message.utility_output = UtilityOutput(self._answers[0].call_id, error=error_report(error))
            return self._port.encode(message)

    def _fail_unsendable_results(self) -> None:
        """Ends each request whose result cannot be sent with an error of its own; the others are untouched."""
        batch = self._batch
        if batch.extras is None:
            return
        batch.extras.errors = {position: _encodable(text) for position, text in batch.extras.errors.items()}
        results = batch.extras.results
        for position, result in list(results.items()):
            try:
                self._port.encode(EngineCoreOutputs(0, 0, 0, 0.0, extras=OutputExtras(results={0: result})))
            except _UNSENDABLE as error:
                del results[position]
                self._fail(batch.handles[position], _describe(error))

    def _fail(self, handle: int, reason: str) -> None:
        """Ends a request with an error, also one that ends with the columns that wait to be sent."""
        batch = self._batch
        request_id = self._request_ids.pop(handle, None)
        if request_id is not None:
            self._engine.abort_requests([request_id])
            batch.add(request_id, finish_reason="error", error=reason)
            return
        for index, (position, _, _) in enumerate(batch.finished or ()):
            if batch.handles[position] == handle and batch.finished is not None and batch.extras is not None:
                batch.finished[index] = (position, "error", None)
                batch.extras.errors[position] = reason


# What encoding raises: an unknown type; a value that holds itself; an int of more than 64 bits.
_UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)


def error_report(error: BaseException) -> ErrorReport:
    """An exception as it travels to the client."""
    cls = type(error)
    return ErrorReport(
        f"{cls.__module__}.{cls.__qualname__}" if cls.__module__ != "builtins" else cls.__qualname__,
        _text_of(error),
        _encodable("".join(traceback.format_exception(error))),
    )


def _describe(error: Exception) -> str:
    text = _text_of(error)
    return text if isinstance(error, InvalidRequestError) else f"{type(error).__name__}: {text}"


def _text_of(error: BaseException) -> str:
    try:
        return _encodable(str(error))
    except Exception as another:  # a broken __str__ must not hide the error, let alone end the engine core
        return f"(its __str__ raised {type(another).__name__})"


def _encodable(text: str) -> str:
    """Without lone surrogates, which names of files may bring."""
    return text.encode(errors="backslashreplace").decode()
