"""Everything that happens to a message between the socket and those who wait for it.

Nothing in here refers to the client except weakly: the event loop holds the reader, the reader holds this, and the
client can still be dropped.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from outboard.client.pending import PendingTable, _process_utility_output
from outboard.client.resources import Resources
from outboard.errors import ClientClosedError, EngineDeadError, ProtocolError
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.messages import (
    EEP_NOTIFICATION_CALL_ID,
    EngineCoreDead,
    EngineCoreOutputs,
    SchedulerStats,
    UtilityOutput,
)
from outboard.protocol.tensors import Buffer

__all__ = ["OutputSink", "Receiver"]

logger = logging.getLogger("outboard.client")

OutputSink = Callable[[EngineCoreOutputs | EngineDeadError], None]
OutputHook = Callable[[Any, EngineCoreOutputs], Awaitable[None] | None]
NotificationHook = Callable[[Any, Any], Awaitable[None]]


class Receiver:
    """Checks, decodes and hands on the messages of one engine core.

    A message goes, in this order, through the epoch and sequence checks, to the utility call that it answers, through
    `process_engine_outputs`, and to the sink or `outputs_queue`. A failure goes the same last step, and is sticky.

    Args:
        client: held weakly; for its hooks.
        pending: what waits.
        outputs_queue: where messages go while there is no sink; `None` in it means that there will be no more.
        epoch: of this client and its engine core.
        resources: told of an ENGINE_CORE_DEAD message, and of a failure: the engine core is then of no more use.

    Attributes:
        failure: the error that ended everything; None while all is well.
        reading: a future that owns the reader; cancelling it cancels reading. None until attached.
        scheduler_stats: the latest load that the engine core reported.
        received: messages taken from the socket, good or bad.
        dropped: how many messages were dropped, by reason.
    """

    def __init__(
        self,
        client: Any,
        pending: PendingTable,
        outputs_queue: asyncio.Queue[EngineCoreOutputs | None],
        epoch: int,
        resources: Resources,
    ) -> None:
        self._client = weakref.ref(client)
        self._pending = pending
        self._queue = outputs_queue
        self._epoch = epoch
        self._resources = resources
        self._decoder: MsgpackDecoder[EngineCoreOutputs | EngineCoreDead] = MsgpackDecoder(
            EngineCoreOutputs | EngineCoreDead
        )
        self._expected = 0
        self._sink: Callable[[], OutputSink | None] | None = None
        self._notification_hook: NotificationHook | None = _hook(client, "eep_process_engine_core_notification")
        self._output_hook: OutputHook | None = _hook(client, "process_engine_outputs")
        # A coroutine function as hook: messages wait here for the one task that awaits it for each.
        self._hook_queue: asyncio.Queue[EngineCoreOutputs] | None = (
            asyncio.Queue() if inspect.iscoroutinefunction(self._output_hook) else None
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: EngineDeadError | None = None
        self.reading: asyncio.Future[None] | None = None
        self.scheduler_stats = SchedulerStats()
        self.received = 0
        self.dropped: Counter[str] = Counter()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes `reading`, and the task of an asynchronous hook if there is one."""
        self.reading = loop.create_future()
        self.reading.add_done_callback(self._on_reading_done)
        if self._hook_queue is not None:
            self._start_task(loop, self._run_hook(self._hook_queue))

    def _on_reading_done(self, reading: asyncio.Future[None]) -> None:
        if reading.cancelled():
            self.fail(EngineDeadError("reading was cancelled: output_queue_task was"))

    def detach(self) -> None:
        """Cancels the tasks of hooks."""
        for task in list(self._tasks):
            task.cancel()

    def set_sink(self, sink: OutputSink | None) -> None:
        """Gives every message to `sink` from now on, those that wait in the queue first; None: to the queue again."""
        if sink is None:
            self._sink = None
            return
        self._sink = weakref.WeakMethod(sink) if inspect.ismethod(sink) else lambda: sink
        while not self._queue.empty():
            message = self._queue.get_nowait()
            if message is not None:
                self._deliver(message)
        if self.failure is not None:
            self._deliver(self.failure.copy())

    @property
    def has_sink(self) -> bool:
        return self._sink is not None

    # --- a message's way ---

    def on_message(self, body: Buffer, aux: Sequence[Buffer]) -> None:
        """Takes one message from the socket."""
        self.received += 1
        if self.failure is not None:
            return
        try:
            message = self._decoder.decode(body, aux)
        except ProtocolError as error:
            self._drop("undecodable", str(error))
            return
        if message.epoch != self._epoch:
            self._drop("other epoch", f"its epoch is {message.epoch:x}, this client's {self._epoch:x}")
        elif isinstance(message, EngineCoreDead):
            self._resources.on_engine_dead(message.report)
        elif message.sequence < self._expected:
            self._drop("repeated", f"number {message.sequence} came again")
        elif message.sequence > self._expected:
            self.fail(
                EngineDeadError(
                    f"messages {self._expected} to {message.sequence - 1} of the engine core were lost; "
                    "its outputs would have gaps, so it is given up",
                    rank=message.engine_index,
                )
            )
        elif self._well_formed(message):
            self._expected += 1
            self._accept(message)
        else:
            self._drop("undecodable", "its columns do not fit together")
            self._expected += 1

    @staticmethod
    def _well_formed(message: EngineCoreOutputs) -> bool:
        handles = len(message.handles)
        if message.counts is None:
            fits = len(message.tokens) == handles
        else:
            fits = len(message.counts) == handles and sum(message.counts) == len(message.tokens)
            fits = fits and min(message.counts, default=0) >= 0
        return fits and all(0 <= position < handles for position, _, _ in message.finished or ())

    def _accept(self, message: EngineCoreOutputs) -> None:
        if message.utility_output is not None:
            self._on_utility_output(message.utility_output)
        if message.scheduler_stats is not None:
            self.scheduler_stats = message.scheduler_stats
        elif not message.handles:
            return
        if self._sink is None:
            get = self._pending.request_ids.get
            message.request_ids = [get(handle) for handle in message.handles]
        if message.finished:
            self._pending.end_finished(message)
        if self._output_hook is None:
            self._deliver(message)
        elif self._hook_queue is not None:
            self._hook_queue.put_nowait(message)
        else:
            try:
                self._output_hook(self._client(), message)
            except Exception as error:
                self._hook_failed(error)
            else:
                self._deliver(message)

    def _deliver(self, message: EngineCoreOutputs | EngineDeadError) -> None:
        if self._sink is not None:
            sink = self._sink()
            if sink is not None:
                self._call_sink(sink, message)
        else:
            self._queue.put_nowait(message if isinstance(message, EngineCoreOutputs) else None)

    def _call_sink(self, sink: OutputSink, message: EngineCoreOutputs | EngineDeadError) -> None:
        try:
            sink(message)
        except Exception as error:
            logger.exception("the output sink raised")
            self.fail(_caused(f"the output sink raised {type(error).__name__}: {error}", error))

    def _drop(self, reason: str, detail: str) -> None:
        if not self.dropped[reason]:
            logger.warning("dropped a message on the output socket (%s): %s; more are only counted", reason, detail)
        self.dropped[reason] += 1

    # --- utility outputs and notifications ---

    def _on_utility_output(self, output: UtilityOutput) -> None:
        if output.call_id != EEP_NOTIFICATION_CALL_ID:
            _process_utility_output(output, self._pending.utility_results)
        elif output.result:
            client = self._client()
            if self._notification_hook is None or client is None:
                self._drop("unexpected notification", repr(output.result))
            elif not _is_notification(output.result):
                self._drop("malformed notification", repr(output.result))
            else:
                self._start_task(
                    asyncio.get_running_loop(), self._notify(self._notification_hook, client, output.result)
                )

    @staticmethod
    async def _notify(hook: NotificationHook, client: Any, data: Any) -> None:
        try:
            await hook(client, tuple(data))
        except Exception:
            logger.exception("eep_process_engine_core_notification raised for %r", data)

    async def _run_hook(self, queue: asyncio.Queue[EngineCoreOutputs]) -> None:
        while self.failure is None:
            message = await queue.get()
            try:
                await self._output_hook(self._client(), message)  # type: ignore[misc]
            except Exception as error:
                self._hook_failed(error)
            else:
                self._deliver(message)

    def _hook_failed(self, error: Exception) -> None:
        self.fail(_caused(f"process_engine_outputs raised {type(error).__name__}: {error}", error))

    def _start_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any) -> None:
        task = loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the end ---

    def fail(self, cause: EngineDeadError) -> None:
        """Ends everything that waits, now and for ever after. Only the first cause counts."""
        if self.failure is not None:
            return
        self.failure = cause
        if not isinstance(cause, ClientClosedError):
            self._resources.give_up()
        if self.reading is not None:
            if self.reading.get_loop().is_closed():
                return  # nobody can wait any more, and a future of a closed loop cannot be set
            if not self.reading.done():
                self.reading.set_result(None)
        self._pending.fail_all(cause)
        self._deliver(cause.copy())


def _caused(reason: str, cause: Exception) -> EngineDeadError:
    error = EngineDeadError(reason)
    error.__cause__ = cause
    return error


def _hook(client: Any, name: str) -> Any:
    """A hook of the client's class: a function of (client, data), be it a staticmethod or not. None: not defined."""
    return getattr(type(client), name, None)


def _is_notification(payload: Any) -> bool:
    return (
        isinstance(payload, (list, tuple))
        and len(payload) == 2
        and isinstance(payload[0], str)
        and isinstance(payload[1], int)
    )
