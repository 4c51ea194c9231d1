"""A client's conversation with the launcher about the number of ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import outboard.errors
from outboard.client.notifications import Notifications
from outboard.client.receiver import Counters
from outboard.errors import EngineDeadError, NotificationError, OutboardError, ScaleError, ScaleRolledBackError
from outboard.protocol.control import AbortScale, CommitScale, Scale, ScaleProgress, ScaleRefused, ScaleState

__all__ = ["OnProgress", "Scaling"]

logger = logging.getLogger("outboard.client")

OnProgress = Callable[[ScaleProgress], None]

# Notifications come by another way than progress: one may be that much later, or earlier, than the other, seconds.
_APART = 5.0


class _Wait:
    """Somebody waits for a change of size to come so far."""

    def __init__(self, until: ScaleState, on_progress: OnProgress | None) -> None:
        self.until = until
        self.on_progress = on_progress
        self.future: asyncio.Future[ScaleProgress] = asyncio.get_running_loop().create_future()
        self.error: Exception | None = None  # of a notification


class Scaling:
    """Belongs to the client's event loop.

    Args:
        client_index: of the client.
        tell: sends a message to the launcher.
        counters: of messages.
        only_rank: the one rank that the client has to do with; None: all.
    """

    def __init__(
        self, client_index: int, tell: Callable[[Any], None], counters: Counters, only_rank: int | None = None
    ) -> None:
        self._client_index = client_index
        self._tell = tell
        self._counters = counters
        self._notifications = Notifications(only_rank)
        self._calls = 0
        self._prepared = -1
        self._waits: dict[int, _Wait] = {}  # by call
        self._subscribers: list[OnProgress] = []
        self._hooks = 0  # that run
        self._complete = asyncio.Event()  # set whenever that, or what is missing, has changed

    # --- for the client ---

    def subscribe(self, on_progress: OnProgress) -> Callable[[], None]:
        """Calls `on_progress` with every change of any front end's change of size. Call the result to end that."""
        self._subscribers.append(on_progress)
        return lambda: self._subscribers.remove(on_progress) if on_progress in self._subscribers else None

    async def scale(self, new_size: int, timeout: float, drain: float, on_progress: OnProgress | None) -> None:
        """Changes the number of ranks."""
        call = self._next_call()
        await self._ask(call, Scale(call, new_size, timeout, drain), ScaleState.DONE, on_progress)

    async def prepare(self, new_size: int, timeout: float, drain: float) -> None:
        """Starts the ranks that come; returns when they are ready."""
        call = self._next_call()
        await self._ask(call, Scale(call, new_size, timeout, drain, commit=False), ScaleState.READY, None)
        self._prepared = call

    async def commit(self) -> None:
        """Goes on with what was prepared."""
        call = self._take_prepared()
        await self._ask(call, CommitScale(call), ScaleState.DONE, None)

    async def abort(self) -> None:
        """Takes back what was prepared."""
        call = self._take_prepared()
        await self._ask(call, AbortScale(call), ScaleState.ROLLED_BACK, None)

    # --- for the membership ---

    def on_message(self, message: ScaleProgress | ScaleRefused) -> None:
        """The launcher says how far a change has come, or that there is none."""
        if isinstance(message, ScaleRefused):
            wait = self._waits.pop(message.call, None)
            if wait is not None and not wait.future.done():
                kind = getattr(outboard.errors, message.error, ScaleError)
                wait.future.set_exception(kind(message.reason))
            return
        self._notifications.follow(message)
        self._complete.set()
        wait = self._waits.get(message.call) if message.client_index == self._client_index else None
        listeners = [*self._subscribers, wait.on_progress if wait is not None else None]
        for on_progress in listeners:
            if on_progress is not None:
                try:
                    on_progress(message)
                except Exception:
                    logger.exception("what was to hear of the change of size raised")
        if wait is not None and not wait.future.done():
            ended = message.state in (ScaleState.DONE, ScaleState.ROLLED_BACK)
            # One that is as it is to be has nothing to prepare.
            if ended or message.state is wait.until:
                del self._waits[message.call]
                wait.future.set_result(message)

    def on_notification(self, payload: tuple[str, int], *, hooked: bool) -> None:
        """An engine core has sent one; `hooked`: the client's class is at it."""
        self._hooks += hooked
        try:
            self._notifications.take(*payload)
        except NotificationError as error:
            self._wrong(error)
            return
        self._complete.set()
        asyncio.get_running_loop().call_later(_APART, self._judge)

    def on_hook_done(self, error: Exception | None) -> None:
        """What the client's class does with a notification is done, or went wrong."""
        self._hooks -= 1
        self._complete.set()
        if error is None:
            return
        failure = ScaleError(f"eep_process_engine_core_notification raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._fail_waits(failure)

    def fail(self, cause: EngineDeadError) -> None:
        """The client has ended."""
        waits, self._waits = self._waits, {}
        for wait in waits.values():
            if not wait.future.done():
                wait.future.set_exception(cause.copy())

    # --- inside ---

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    def _take_prepared(self) -> int:
        call, self._prepared = self._prepared, -1
        if call < 0:
            raise ScaleError("nothing is prepared: call prepare_elastic_ep first")
        return call

    async def _ask(self, call: int, message: Any, until: ScaleState, on_progress: OnProgress | None) -> None:
        wait = self._waits[call] = _Wait(until, on_progress)
        self._complete.clear()
        self._tell(message)
        try:
            progress = await wait.future
            if progress.state is ScaleState.DONE and progress.old_size != progress.new_size and not progress.reason:
                await self._see_complete(wait)
        except asyncio.CancelledError:
            self._waits.pop(call, None)
            self._tell(AbortScale(call))
            raise
        if wait.error is not None:
            raise wait.error
        if progress.state is ScaleState.ROLLED_BACK and until is not ScaleState.ROLLED_BACK:
            raise ScaleRolledBackError(f"there are {progress.old_size} ranks still: {progress.reason}")

    async def _see_complete(self, wait: _Wait) -> None:
        """All ranks have said that they know, or are about to."""
        try:
            async with asyncio.timeout(_APART):
                while (self._notifications.missing or self._hooks) and wait.error is None:
                    self._complete.clear()
                    await self._complete.wait()
        except TimeoutError:
            missing = self._notifications.missing
            if not missing:  # only a hook that takes its time
                return
            names = ", ".join(map(str, missing))
            raise NotificationError(
                f"the change of size is done, but nothing was heard of it from rank {names}", missing[0]
            ) from None

    def _judge(self) -> None:
        error = self._notifications.judge()
        if error is not None:
            self._wrong(error)

    def _wrong(self, error: OutboardError) -> None:
        self._counters.drop("notification", str(error))
        self._fail_waits(error)

    def _fail_waits(self, error: Exception) -> None:
        """Fails the change of this client that is under way, if there is one: it is taken back, if it still can be."""
        for call, wait in self._waits.items():
            if wait.error is None:
                wait.error = error
                self._tell(AbortScale(call))
        self._complete.set()
