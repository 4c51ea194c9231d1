"""The busy loop of an engine core, as a state machine that knows neither sockets nor threads.

    RUNNING --stop--> STOPPING --all requests aborted, outputs flushed--> STOPPED

Everything that happens comes through one queue, so that requests, aborts, utility calls, deferred results and signals
have one order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Any

from outboard.engine.calls import convert_arguments
from outboard.engine.controls import Controls
from outboard.engine.core import EngineCore, OutputBatch, no_such_utility, utility_methods
from outboard.engine.outgoing import Outgoing, OutputPort, describe, error_report
from outboard.errors import InvalidRequestError, UtilityNotFoundError
from outboard.protocol.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreRequest,
    UtilityCall,
    UtilityOutput,
)

__all__ = ["BadRequest", "BusyLoop", "DeferredResult", "Stop"]

logger = logging.getLogger("outboard.engine")

# How often a busy engine is asked for its load, seconds; also whenever a request ends, and once when it is idle.
_STATS_INTERVAL = 0.010
# How long the last outputs may take to leave after a stop, seconds.
_FLUSH_BOUND = 1.0


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
        self._batch = OutputBatch()
        self._outgoing = Outgoing(port, self._batch, engine.abort_requests, rank=rank, epoch=epoch)
        self._controls = Controls(engine, self._batch, self._admit)
        self._utilities: dict[str, Callable[..., Any]] = {
            **{name: getattr(engine, name) for name in utility_methods(engine)},
            **self._controls.utilities,
        }
        self._state = _State.RUNNING
        self._idle = True
        self._stats_due = 0.0
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

    def turn(self, timeout: float | None = None) -> None:
        """One round: take what has come (wait for it if there is nothing else to do), step, send.

        Args:
            timeout: how long to wait, seconds; None: until something comes.
        """
        engine = self._engine
        controls = self._controls
        if self._idle or not self._inbox.empty():
            self._take_input(timeout)
        busy = self._state is _State.RUNNING and not controls.frozen and engine.has_work()
        if busy:
            engine.step(self._batch)
        if controls.paused:
            controls.after_step()
        now = time.monotonic()
        if not busy or now >= self._stats_due or self._batch.finished:
            self._stats_due = now + _STATS_INTERVAL
            self._outgoing.report(controls.stats())
        self._outgoing.flush(now)
        self._idle = not busy
        if self._state is _State.STOPPING and (not self._outgoing.backlog or now > self._stop_by):
            self._state = _State.STOPPED

    # --- input ---

    def _take_input(self, timeout: float | None) -> None:
        inbox = self._inbox
        if self._state is _State.STOPPING or self._outgoing.backlog:
            retry_after = self._outgoing.retry_after
            timeout = retry_after if timeout is None else min(timeout, retry_after)
        try:
            item = inbox.get(timeout=timeout) if self._idle else inbox.get_nowait()
            self._handlers[type(item)](item)
            while not inbox.empty():
                item = inbox.get_nowait()
                self._handlers[type(item)](item)
        except Empty:
            pass

    def _add(self, message: AddRequest) -> None:
        try:
            request = message.to_request()
        except ValueError as error:  # the prompt ends inside a token
            self._refuse(BadRequest(message.handle, describe(error)))
            return
        self._batch.open(request.request_id, message.handle)
        if self._state is not _State.RUNNING:
            self._batch.add(request.request_id, finish_reason="abort")
        elif self._controls.paused:
            self._controls.held[message.handle] = request
        else:
            self._admit(request)

    def _admit(self, request: EngineCoreRequest) -> None:
        try:
            self._engine.add_request(request)
        except Exception as error:
            if not isinstance(error, InvalidRequestError):
                logger.exception("add_request failed for request %r", request.external_req_id)
            self._batch.add(request.request_id, finish_reason="error", error=describe(error))

    def _refuse(self, item: BadRequest) -> None:
        request_id = f"refused-{item.handle}"
        self._batch.open(request_id, item.handle)
        self._batch.add(request_id, finish_reason="error", error=item.reason)

    def _abort(self, message: AbortRequests) -> None:
        batch = self._batch
        ids = []
        for handle in message.handles:
            request_id = batch.request_id(handle)
            if request_id is not None:
                batch.close(request_id)
                if self._controls.held.pop(handle, None) is None:
                    ids.append(request_id)
        if ids:
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
        try:
            if method is None:
                raise UtilityNotFoundError(no_such_utility(self._engine, call.method, self._controls.utilities))
            args, kwargs = convert_arguments(method, call.args, call.kwargs)
            result = method(*args, **kwargs)
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
        """Sends an answer behind all outputs so far, or keeps it with them."""
        self._outgoing.answer(answer)
        self._outgoing.flush(time.monotonic())
