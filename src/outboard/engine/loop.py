"""The busy loop of an engine core, as a state machine that knows neither sockets nor threads.

    RUNNING --stop--> STOPPING --all requests aborted, outputs flushed--> STOPPED

Everything that happens comes through one queue, so that front ends that come and go, requests, aborts, utility calls,
deferred results and signals have one order.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Any

from outboard.engine.client import Client
from outboard.engine.controls import Controls
from outboard.engine.core import EngineCore, OutputBatch
from outboard.engine.events import (
    BadCall,
    BadRequest,
    ClientJoined,
    ClientLeft,
    CoordinatorJoined,
    DeferredResult,
    Stop,
    Writable,
)
from outboard.engine.load_reports import LoadReporter, Mouth
from outboard.engine.outgoing import describe
from outboard.engine.scaling import Scaling
from outboard.engine.utilities import UtilityCalls
from outboard.errors import InvalidRequestError
from outboard.protocol.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreRequest,
    ErrorReport,
    LeaveRank,
    SchedulerStats,
    UtilityCall,
)
from outboard.protocol.progress import FROZEN, IDLE, ProgressPage
from outboard.protocol.scaling import (
    DrainRank,
    Quiesce,
    Reconfigure,
    ResumeRank,
)

__all__ = ["BusyLoop"]

logger = logging.getLogger("outboard.engine")

# How often a busy engine is asked for its load, seconds; also whenever a request ends, and once when it is idle.
_STATS_INTERVAL = 0.010
# How long the last outputs may take to leave after a stop, seconds.
_FLUSH_BOUND = 1.0


class _State(Enum):
    RUNNING = auto()
    STOPPING = auto()
    STOPPED = auto()


class BusyLoop:
    """Feeds an engine from a queue and sends what its steps produce to whom it belongs.

    Args:
        engine: the engine core; its `progress` writes to the page from now on.
        inbox: what happens (events.py). Filled by the input thread, by signal handlers (a `SimpleQueue` may be put to
            from one) and by deferred results.
        page: where to give signs of life.
        rank: stamped on every message.
        incarnation: of this engine core; for a coordinator.
        say: sends a message to the launcher.
        token: the session's secret, which goes with it.
    """

    def __init__(
        self,
        engine: EngineCore,
        inbox: SimpleQueue[Any],
        page: ProgressPage,
        *,
        rank: int = 0,
        incarnation: int = 0,
        say: Callable[[Any], None] = lambda message: None,
        token: str = "",
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._page = page
        self._rank = rank
        self._clients: dict[int, Client] = {}  # by epoch
        self._batch = OutputBatch()
        self._controls = self._make_controls()
        self._calls = calls = UtilityCalls(engine, self._controls.utilities, inbox)
        self._scaling = scaling = Scaling(rank, token, say, self._clients.values(), calls.answer, self._batch)
        engine.progress = page.sign  # type: ignore[method-assign]
        self._state = _State.RUNNING
        self._idle = True
        self._retry_after: float | None = None  # while some client takes nothing
        self._stats = SchedulerStats()  # the engine's own may change in its hands
        self._stats_due = 0.0
        self._coordinator: Mouth | None = None
        self._loads = LoadReporter(rank, incarnation)
        self._load_after: float | None = None  # while the coordinator is to be told of a load later
        self._stop_by = 0.0
        self._events: dict[type, Callable[[Any], None]] = {
            tuple: self._on_messages,
            ClientJoined: self._on_joined,
            ClientLeft: self._on_left,
            CoordinatorJoined: self._on_coordinator,
            DeferredResult: self._on_deferred,
            Stop: self._on_stop,
            DrainRank: scaling.drain,
            Quiesce: self._on_quiesce,
            Reconfigure: self._on_reconfigure,
            ResumeRank: self._on_resume,
            Writable: lambda event: None,  # each turn tries to send anyway
        }
        self._items: dict[type, Callable[[Client, Any], None]] = {
            AddRequest: self._add,
            AbortRequests: self._abort,
            UtilityCall: calls.call,
            BadRequest: self._refuse,
            BadCall: calls.refuse,
            LeaveRank: scaling.left,
        }

    def _make_controls(self) -> Controls:
        return Controls(self._engine, self._batch, self._admit)

    def run(self) -> None:
        """Runs until stopped. An exception of the engine's `step` passes through: its state is then unknown."""
        while self._state is not _State.STOPPED:
            self.turn()

    def turn(self, timeout: float | None = None) -> None:
        """One round: take what has come (wait for it if there is nothing else to do), step, send.

        Args:
            timeout: how long to wait, seconds; None: until something comes.
        """
        controls = self._controls
        if self._idle:
            self._wait(timeout)
        elif not self._inbox.empty():
            self._take(self._inbox.get_nowait())
        busy = self._advance()
        now = time.monotonic()
        if controls.paused:
            controls.after_step()
        if not busy or self._batch.ended or now >= self._stats_due:
            self._report_stats(now, busy)
        retry_after = None
        for client in self._clients.values():
            if not client.outgoing.flush(now):
                wait = client.outgoing.retry_after
                retry_after = wait if retry_after is None else min(wait, retry_after)
        self._retry_after = retry_after
        if retry_after is None:
            self._scaling.look()
        self._idle = not busy
        if busy:
            return
        self._page.alive(FROZEN if self._is_frozen else IDLE)
        if self._stopping and (now > self._stop_by or retry_after is None):
            self._state = _State.STOPPED

    def _advance(self) -> bool:
        """Steps, if there is work; whether to go on without waiting for something to come."""
        if self._state is not _State.RUNNING or self._controls.frozen or not self._engine.has_work():
            return False
        self._engine.step(self._batch)
        self._page.stepped()
        return True

    @property
    def _is_frozen(self) -> bool:
        """Whether no step is to be expected."""
        return self._controls.frozen

    @property
    def _stopping(self) -> bool:
        return self._state is not _State.RUNNING

    def report_death(self, report: ErrorReport) -> None:
        """Tells every client, as the last, what ends this engine core."""
        for client in self._clients.values():
            client.outgoing.report_death(report)

    def close(self, linger_ms: int) -> None:
        """Closes all ports; what they hold may take so long to leave, all together."""
        deadline = time.monotonic() + linger_ms / 1000
        for client in self._clients.values():
            client.port.close(max(0, math.ceil((deadline - time.monotonic()) * 1000)))
        self._clients.clear()
        if self._coordinator is not None:
            self._coordinator.close()

    # --- input ---

    def _wait(self, timeout: float | None) -> None:
        """Takes what comes, or returns when it is time to try again to send."""
        for after in (self._retry_after, self._load_after):
            if after is not None:
                timeout = after if timeout is None else min(timeout, after)
        try:
            event = self._inbox.get(timeout=timeout)
        except Empty:
            event = None
        self._page.alive()  # whatever comes now may take long
        if event is not None:
            self._take(event)

    def _take(self, event: Any) -> None:
        """Handles this event and all that wait behind it."""
        inbox = self._inbox
        while True:
            self._events[type(event)](event)
            if inbox.empty():
                break
            event = inbox.get_nowait()
        self._calls.send()  # before a step, which may take long

    def _on_messages(self, messages: tuple[int, list[Any]]) -> None:
        epoch, items = messages
        client = self._clients.get(epoch)
        if client is None:  # it has left
            return
        for item in items:
            self._page.took(client.slot)
            self._calls.send_before(item)
            if item is not None:
                self._items[type(item)](client, item)

    def _on_joined(self, joined: ClientJoined) -> None:
        self._clients[joined.epoch] = Client(joined, self._batch, self._engine.abort_requests, self._rank)
        self._page.clear(joined.slot)

    def _on_left(self, left: ClientLeft) -> None:
        client = self._clients.pop(left.epoch, None)
        if client is None:
            return
        self._calls.forget(client)
        client.port.close(0)
        self._drop(list(client.columns.open.values()))

    def _on_deferred(self, deferred: DeferredResult) -> None:
        client = self._clients.get(deferred.epoch)
        if client is not None:
            self._calls.answer_deferred(client, deferred)

    def _on_coordinator(self, joined: CoordinatorJoined) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
        self._coordinator = joined.mouth
        self._loads.joined()

    def _on_stop(self, stop: Stop) -> None:
        if self._state is _State.RUNNING:
            self._state = _State.STOPPING
            self._stop_by = time.monotonic() + _FLUSH_BOUND
            self._scaling.stopping()
        if open_requests := self._batch.open_requests:
            self._engine.abort_requests(open_requests)
            for request_id in open_requests:
                self._batch.add(request_id, finish_reason="abort")

    # --- changes of size; ranks that do not step together need no rest for them ---

    def _on_quiesce(self, message: Quiesce) -> None:
        self._scaling.quiet(message.version)

    def _on_reconfigure(self, message: Reconfigure) -> None:
        self._scaling.reconfigured(message.version)

    def _on_resume(self, message: ResumeRank) -> None:
        pass

    # --- requests ---

    def _add(self, client: Client, message: AddRequest) -> None:
        if message.handle in client.columns.open:
            logger.warning("dropped a request: its handle %d is in use", message.handle)
            return
        try:
            request = message.to_request()
        except ValueError as error:  # the prompt ends inside a token
            self._refuse(client, BadRequest(message.handle, describe(error)))
            return
        self._batch.open(request.request_id, message.handle, client.columns)
        if self._state is not _State.RUNNING:
            self._batch.add(request.request_id, finish_reason="abort")
        elif self._controls.paused:
            self._controls.held[request.request_id] = request
        else:
            self._admit(request)

    def _admit(self, request: EngineCoreRequest) -> None:
        try:
            self._engine.add_request(request)
        except InvalidRequestError as error:
            self._batch.add(
                request.request_id, finish_reason="error", stop_reason="invalid_request", error=describe(error)
            )
        except Exception as error:
            logger.exception("add_request failed for request %r", request.external_req_id)
            self._batch.add(request.request_id, finish_reason="error", error=describe(error))

    def _refuse(self, client: Client, item: BadRequest) -> None:
        if item.handle in client.columns.open:
            return
        request_id = f"refused-{client.epoch:016x}-{item.handle}"
        self._batch.open(request_id, item.handle, client.columns)
        self._batch.add(request_id, finish_reason="error", error=item.reason)

    def _abort(self, client: Client, message: AbortRequests) -> None:
        known = client.columns.open
        self._drop([known[handle] for handle in dict.fromkeys(message.handles) if handle in known])

    def _drop(self, request_ids: list[str]) -> None:
        """Forgets open requests; nobody is told."""
        held = self._controls.held
        running = []
        for request_id in request_ids:
            self._batch.close(request_id)
            if held.pop(request_id, None) is None:
                running.append(request_id)
        if running:
            self._engine.abort_requests(running)

    # --- load ---

    def _report_stats(self, now: float, busy: bool) -> None:
        """To the coordinator, or to all clients at intervals and when idle; to those that are sent something anyway."""
        self._batch.ended = False
        stats = self._controls.stats()
        if stats != self._stats:
            self._stats = copy.copy(stats)
        everyone = not busy or now >= self._stats_due
        if everyone:
            self._stats_due = now + _STATS_INTERVAL
        if self._coordinator is not None:
            self._load_after = self._loads.report(now, self._stats, self._by_client, self._coordinator)
            everyone = False
        for client in self._clients.values():
            if everyone or client.columns.handles:
                client.outgoing.report(self._stats)

    def _by_client(self) -> dict[int, int]:
        """Open requests by client index."""
        return {one.client_index: len(one.columns.open) for one in self._clients.values() if one.columns.open}
