"""The asyncio client's side of delivery: hooks, output sink, queue.

Nothing in here refers to the client except weakly: the event loop holds the reader, the reader holds this, and the
client can still be dropped.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from outboard.client.delivery import Delivery
from outboard.errors import ClientClosedError, EngineDeadError
from outboard.protocol.messages import EngineCoreOutputs

__all__ = ["AsyncDelivery", "OutputSink"]

logger = logging.getLogger("outboard.client")

# How long messages that wait for a coroutine hook may hold up the news of a death, seconds.
_LONGEST_HOOK = 0.5

OutputSink = Callable[[EngineCoreOutputs | EngineDeadError], None]
OutputHook = Callable[[Any, EngineCoreOutputs], Awaitable[None] | None]
NotificationHook = Callable[[Any, Any], Awaitable[None]]


class AsyncDelivery(Delivery):
    """Hands messages through `process_engine_outputs` to the sink or the queue, all on the event loop.

    Args:
        client: held weakly; for its hooks.
        outputs_queue: where messages go while there is no sink; `None` in it means that there will be no more.
        fail: ends the client, where a hook or the sink raises, or reading is cancelled.

    Attributes:
        reading: a future that owns the reader; cancelling it cancels reading. None until attached.
        on_hook_done: called when `eep_process_engine_core_notification` has ended, with what it raised.
    """

    def __init__(
        self,
        client: Any,
        outputs_queue: asyncio.Queue[EngineCoreOutputs | None],
        fail: Callable[[EngineDeadError], None],
    ) -> None:
        self._fail = fail
        self.on_hook_done: Callable[[Exception | None], None] = lambda error: None
        self._client = weakref.ref(client)
        self._queue = outputs_queue
        self._sink: Callable[[], OutputSink | None] | None = None
        self._notification_hook: NotificationHook | None = _hook(client, "eep_process_engine_core_notification")
        self._output_hook: OutputHook | None = _hook(client, "process_engine_outputs")
        # A coroutine function as hook: messages wait here for the one task that awaits it for each.
        self._hook_queue: asyncio.Queue[EngineCoreOutputs | EngineDeadError] | None = (
            asyncio.Queue() if inspect.iscoroutinefunction(self._output_hook) else None
        )
        self._ids_wanted = True
        self._ended: EngineDeadError | None = None  # told to whoever waited
        self._detached = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.reading: asyncio.Future[None] | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes `reading`, and the task of an asynchronous hook if there is one."""
        self.reading = loop.create_future()
        self.reading.add_done_callback(self._on_reading_done)
        if self._hook_queue is not None:
            task = self._start_task(loop, self._run_hook(self._hook_queue))
            task.add_done_callback(self._on_hook_task_done)

    def _on_reading_done(self, reading: asyncio.Future[None]) -> None:
        if reading.cancelled():
            self._fail(EngineDeadError("reading was cancelled: output_queue_task was"))

    def detach(self) -> None:
        """Cancels the tasks of hooks."""
        self._detached = True
        for task in list(self._tasks):
            task.cancel()

    def set_sink(self, sink: OutputSink | None, request_ids: bool = True) -> None:
        """Gives every message to `sink` from now on, those that wait in the queue first; None: to the queue again."""
        self._ids_wanted = request_ids or sink is None
        if sink is None:
            self._sink = None
            return
        self._sink = weakref.WeakMethod(sink) if inspect.ismethod(sink) else lambda: sink
        waiting = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        for message in waiting:
            if message is None:
                self._queue.put_nowait(None)  # for those who still wait there
            else:
                self._hand_on(message)
        if self._ended is not None:
            self._hand_on(self._ended.copy())

    @property
    def has_sink(self) -> bool:
        return self._sink is not None

    # --- what a delivery's subclass defines ---

    @property
    def needs_ids(self) -> bool:
        return self._ids_wanted

    def deliver(self, message: EngineCoreOutputs) -> None:
        if self._output_hook is None:
            self._hand_on(message)
        elif self._hook_queue is not None:
            self._hook_queue.put_nowait(message)
        else:
            try:
                self._output_hook(self._client(), message)
            except Exception as error:
                self._hook_failed(error)
            else:
                self._hand_on(message)

    def end(self, cause: EngineDeadError) -> None:
        if self._hook_queue is None or isinstance(cause, ClientClosedError) or self.reading is None:
            self._tell_end(cause)
            return
        # Behind what waits for the hook, unless that takes too long.
        self._hook_queue.put_nowait(cause)
        self.reading.get_loop().call_later(_LONGEST_HOOK, self._tell_end, cause)

    def _tell_end(self, cause: EngineDeadError) -> None:
        if self._ended is not None:
            return
        self._ended = cause
        self._queue.put_nowait(None)  # for those that wait there, sink or not
        self._hand_on(cause.copy())

    def can_tell(self) -> bool:
        if self.reading is None:
            return True
        if self.reading.get_loop().is_closed():
            return False  # nobody can wait any more, and a future of a closed loop cannot be set
        if not self.reading.done():
            self.reading.set_result(None)
        return True

    def notify(self, payload: tuple[str, int]) -> bool:
        client = self._client()
        if self._notification_hook is None or client is None:
            return False
        self._start_task(asyncio.get_running_loop(), self._notify(self._notification_hook, client, payload))
        return True

    # --- inside ---

    def _hand_on(self, message: EngineCoreOutputs | EngineDeadError) -> None:
        if self._sink is not None:
            sink = self._sink()
            if sink is not None:
                self._call_sink(sink, message)
        elif isinstance(message, EngineCoreOutputs):
            self._queue.put_nowait(message)

    def _call_sink(self, sink: OutputSink, message: EngineCoreOutputs | EngineDeadError) -> None:
        try:
            sink(message)
        except Exception as error:
            logger.exception("the output sink raised")
            self._fail(_caused(f"the output sink raised {type(error).__name__}: {error}", error))

    async def _notify(self, hook: NotificationHook, client: Any, data: tuple[str, int]) -> None:
        failure = None
        try:
            await hook(client, data)
        except Exception as error:
            logger.exception("eep_process_engine_core_notification raised for %r", data)
            failure = error
        self.on_hook_done(failure)

    async def _run_hook(self, queue: asyncio.Queue[EngineCoreOutputs | EngineDeadError]) -> None:
        while True:
            message = await queue.get()
            if isinstance(message, EngineDeadError):
                self._tell_end(message)
                return
            try:
                await self._output_hook(self._client(), message)  # type: ignore[misc]
            except Exception as error:
                self._hook_failed(error)
                return
            self._hand_on(message)

    def _on_hook_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() and not self._detached:
            self._fail(EngineDeadError("the task of process_engine_outputs was cancelled"))

    def _hook_failed(self, error: Exception) -> None:
        self._fail(_caused(f"process_engine_outputs raised {type(error).__name__}: {error}", error))

    def _start_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any) -> asyncio.Task[None]:
        task = loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _caused(reason: str, cause: Exception) -> EngineDeadError:
    error = EngineDeadError(reason)
    error.__cause__ = cause
    return error


def _hook(client: Any, name: str) -> Any:
    """A hook of the client's class: a function of (client, data), be it a staticmethod or not. None: not defined."""
    return getattr(type(client), name, None)
