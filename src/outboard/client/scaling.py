"""A client's conversation with the launcher about the number of ranks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import outboard.errors
from outboard.client.driver import Driver, Timer
from outboard.client.notifications import Notifications
from outboard.client.receiver import Counters
from outboard.errors import (
    ConfigError,
    EngineDeadError,
    NotificationError,
    OutboardError,
    ScaleError,
    ScaleRolledBackError,
    UnsupportedError,
)
from outboard.protocol.scaling import (
    AbortScale,
    CommitScale,
    Scale,
    ScaleProgress,
    ScaleRefused,
    ScaleState,
)

__all__ = ["OnProgress", "Scaling"]

logger = logging.getLogger("outboard.client")

OnProgress = Callable[[ScaleProgress], None]

# Notifications come by another way than progress: one may be that much later, or earlier, than the other, seconds.
_APART = 5.0
# What came and makes no sense when all else is over gets that long to be explained, seconds.
_LAST_WORD = 0.25
# The launcher bounds all that it does: one that says nothing for so much longer is stopped itself, seconds.
_SILENCE = 60.0

_ENDED = (ScaleState.DONE, ScaleState.ROLLED_BACK)
# What a launcher refuses with; anything else is no refusal.
_REFUSALS = (ScaleError, ConfigError, UnsupportedError)


class _Order:
    """A change of size that this client wants.

    Attributes:
        call: names it.
        patience: seconds for which the launcher may say nothing.
        on_progress: is told of every step of it.
        progress: how far it is; None: nothing has been heard.
        refused: why the launcher does not do what it was asked last.
        error: what went wrong here: of a notification, or of what the client's class does with it.
        changed: set with each of these, and whenever anything else is heard.
    """

    def __init__(self, call: int, patience: float, on_progress: OnProgress | None) -> None:
        self.call = call
        self.patience = patience
        self.on_progress = on_progress
        self.progress: ScaleProgress | None = None
        self.refused: OutboardError | None = None
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.progress is not None and self.progress.state in _ENDED


class Scaling:
    """Belongs to the client's event loop.

    Args:
        client_index: of the client.
        tell: sends a message to the launcher.
        counters: of messages.
        linked: whether there is a connection with a rank.
        patience: `ParallelConfig.dp_sync_timeout`; the launcher may wait so long for ranks that step together.
    """

    def __init__(
        self,
        client_index: int,
        tell: Callable[[Any], None],
        counters: Counters,
        linked: Callable[[int], bool],
        patience: float,
    ) -> None:
        self._client_index = client_index
        self._tell = tell
        self._counters = counters
        self._patience = patience + _SILENCE
        self._notifications = Notifications(linked, _APART)
        self._driver: Driver | None = None
        self._timer: Timer | None = None
        self._calls = 0
        self._orders: dict[int, _Order] = {}
        self._prepared: _Order | None = None
        self._subscribers: list[OnProgress] = []
        self._hooks = 0  # that run
        self._failure: EngineDeadError | None = None

    # --- for the client ---

    def subscribe(self, on_progress: OnProgress) -> Callable[[], None]:
        """Calls `on_progress` with every change of any front end's change of size. Call the result to end that."""
        self._subscribers.append(on_progress)
        return lambda: self._subscribers.remove(on_progress) if on_progress in self._subscribers else None

    async def scale(self, new_size: int, timeout: float, drain: float, on_progress: OnProgress | None) -> None:
        """Changes the number of ranks."""
        order = self._new_order(timeout + drain, on_progress)
        await self._ask(order, Scale(order.call, new_size, timeout, drain), ScaleState.DONE)

    async def prepare(self, new_size: int, timeout: float, drain: float) -> None:
        """Starts the ranks that come; returns when they are ready."""
        order = self._new_order(timeout + drain, None)
        await self._ask(order, Scale(order.call, new_size, timeout, drain, commit=False), ScaleState.READY)
        if self._prepared is not None:  # which has ended, or there would be no other
            self._orders.pop(self._prepared.call, None)
        self._orders[order.call] = self._prepared = order

    async def commit(self) -> None:
        """Goes on with what was prepared."""
        order = self._take_prepared()
        await self._ask(order, CommitScale(order.call), ScaleState.DONE)

    async def abort(self) -> None:
        """Takes back what was prepared."""
        order = self._take_prepared()
        try:
            if not order.ended:
                self._tell(AbortScale(order.call))
            await self._reach(order, ScaleState.ROLLED_BACK)
        finally:
            self._orders.pop(order.call, None)

    # --- for the membership ---

    def attach(self, driver: Driver) -> None:
        """Notifications can come from now on."""
        self._driver = driver

    def stop(self) -> None:
        """Judges no more. Idempotent."""
        self._driver = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_message(self, message: ScaleProgress | ScaleRefused) -> None:
        """The launcher says how far a change has come, or that there is none."""
        if isinstance(message, ScaleRefused):
            order = self._orders.get(message.call)
            if order is not None:
                order.refused = _refusal(message)
        else:
            order = self._orders.get(message.call) if message.client_index == self._client_index else None
            self._notifications.follow(message, time.monotonic())
            if order is not None:
                order.progress = message
            for on_progress in [*self._subscribers, order.on_progress if order is not None else None]:
                if on_progress is not None:
                    try:
                        on_progress(message)
                    except Exception:
                        logger.exception("what was to hear of the change of size raised")
        self._wake()

    def on_notification(self, payload: tuple[str, int], *, hooked: bool) -> None:
        """An engine core has sent one; `hooked`: the client's class is at it."""
        self._hooks += hooked
        try:
            self._notifications.take(*payload, time.monotonic())
        except NotificationError as error:
            self._wrong(error)
        if self._notifications.unexplained and self._timer is None and self._driver is not None:
            self._timer = self._driver.call_later(_APART, self._judge)
        self._wake()

    def on_hook_done(self, error: Exception | None) -> None:
        """What the client's class does with a notification is done, or went wrong."""
        self._hooks -= 1
        if error is not None:
            failure = ScaleError(f"eep_process_engine_core_notification raised {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail_orders(failure)
        self._wake()

    def on_death(self, rank: int) -> None:
        """An engine core has ended, and not because it was asked to."""
        self._notifications.excuse(rank)
        self._wake()

    def fail(self, cause: EngineDeadError) -> None:
        """The client has ended."""
        self._failure = cause
        self._wake()

    # --- orders ---

    def _new_order(self, bound: float, on_progress: OnProgress | None) -> _Order:
        self._calls += 1
        order = _Order(self._calls, bound + self._patience, on_progress)
        self._orders[order.call] = order
        return order

    def _take_prepared(self) -> _Order:
        order, self._prepared = self._prepared, None
        if order is None:
            raise ScaleError("nothing is prepared: call prepare_elastic_ep first")
        return order

    async def _ask(self, order: _Order, message: Scale | CommitScale, until: ScaleState) -> None:
        """Asks the launcher, unless all is over already; returns when it has come so far, raises why it will not."""
        try:
            if not order.ended:
                self._tell(message)
            progress = await self._reach(order, until)
            if progress.state is ScaleState.DONE:
                if progress.reason:
                    logger.warning("the change to %d ranks is done; on the way: %s", progress.new_size, progress.reason)
                else:
                    await self._see_complete(order)
        except BaseException:
            if not order.ended and order.refused is None:
                self._tell(AbortScale(order.call))
            raise
        finally:
            self._orders.pop(order.call, None)
        if order.error is not None:
            raise order.error
        if progress.state is ScaleState.ROLLED_BACK:
            raise ScaleRolledBackError(f"there are {progress.old_size} ranks still: {progress.reason}")

    async def _reach(self, order: _Order, until: ScaleState) -> ScaleProgress:
        while True:
            self._check()
            if order.refused is not None:
                raise order.refused
            progress = order.progress
            # What went wrong is raised once it is known what there is now.
            if progress is not None and (order.ended or (progress.state is until and order.error is None)):
                return progress
            try:
                async with asyncio.timeout(order.patience):
                    await self._news(order)
            except TimeoutError:
                raise ScaleError(
                    f"the launcher has said nothing of it for {order.patience:g} s; is its process stopped?"
                ) from None

    async def _see_complete(self, order: _Order) -> None:
        """All ranks have said that they know, or are about to."""
        try:
            async with asyncio.timeout(_APART):
                while (self._missing(order) or self._hooks) and order.error is None:
                    await self._news(order)
                    self._check()
        except TimeoutError:
            missing = self._missing(order)
            if missing:  # else it is only a hook that takes its time
                names = ", ".join(map(str, missing))
                raise NotificationError(
                    f"the change of size is done, but nothing was heard of it from rank {names}", missing[0]
                ) from None
        if self._notifications.unexplained and order.error is None:
            await asyncio.sleep(_LAST_WORD)
            self._give_up(self._notifications.judge())

    async def _news(self, order: _Order) -> None:
        order.changed.clear()
        await order.changed.wait()

    def _wake(self) -> None:
        for order in self._orders.values():
            order.changed.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.copy()

    def _missing(self, order: _Order) -> list[int]:
        return self._notifications.missing(self._client_index, order.call)

    # --- what makes no sense ---

    def _judge(self) -> None:
        self._timer = None
        self._give_up(self._notifications.judge(time.monotonic() - _APART))
        if self._notifications.unexplained and self._driver is not None:
            self._timer = self._driver.call_later(_APART, self._judge)

    def _give_up(self, error: NotificationError | None) -> None:
        if error is not None:
            self._wrong(error)
            self._wake()

    def _wrong(self, error: NotificationError) -> None:
        self._counters.drop("notification", str(error))
        self._fail_orders(error)

    def _fail_orders(self, error: Exception) -> None:
        """Fails the change of this client that is under way, if there is one: it is taken back, if it still can be."""
        for order in self._orders.values():
            if order.error is None:
                order.error = error
                if not order.ended:
                    self._tell(AbortScale(order.call))


def _refusal(message: ScaleRefused) -> OutboardError:
    kind = getattr(outboard.errors, message.error, ScaleError)
    if not (isinstance(kind, type) and issubclass(kind, _REFUSALS)) or issubclass(kind, NotificationError):
        kind = ScaleError
    return kind(message.reason)
