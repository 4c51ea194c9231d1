"""Waking many tasks at once: one callback on the loop instead of one a task.

To wake a task by a future of its own costs a future, a handle and a turn of the loop's queue, more than all else that
happens to a token. Here one callback, in the loop's next turn, steps the tasks of a batch one after the other; that is
when, and in which order, futures would have woken them. A `Waiter` speaks the protocol by which an asyncio task awaits
a future (`_asyncio_future_blocking`). It carries nothing: a task takes its data once it runs, so nothing is lost when
it is cancelled in the turn that wakes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any

__all__ = ["Waiter", "WakeBatch"]


class WakeBatch:
    """The tasks that the next turn of the loop will step, in order. Belongs to the loop's thread."""

    __slots__ = ("_loop", "_woken")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._woken: list[Waiter] = []

    def add(self, woken: list[Waiter]) -> None:
        """Has the tasks stepped that have waited here; of each the callback is in `Waiter.woken` now."""
        if not self._woken:
            self._loop.call_soon(self._run)
        self._woken += woken

    def _run(self) -> None:
        all_woken, self._woken = self._woken, []
        position = 0
        try:
            for position, waiter in enumerate(all_woken, 1):  # noqa: B007 - used below
                callback = waiter.woken
                waiter.woken = None
                waiter.run(callback, waiter)
        finally:
            if position < len(all_woken):  # KeyboardInterrupt or SystemExit came out of a task: the others wait still
                self.add(all_woken[position:])


class Waiter:
    """What one task at a time awaits, any number of times. Belongs to the loop's thread.

    Attributes:
        callback: steps the task that waits; None while none does, or once it has been woken.
        woken: the same, once it has been woken and until it is stepped.
        run: runs the callback in that task's context.
        result: called by the task when it is stepped; raises `CancelledError` after `cancel`. Else it is `bool`, which
            does nothing without the price of a Python frame.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_batch",
        "_cancel_arguments",
        "_loop",
        "callback",
        "result",
        "run",
        "woken",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, batch: WakeBatch) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop  # the task compares it with its own
        self._batch = batch
        self._cancel_arguments: tuple[Any, ...] = ()
        self.callback: Callable[[Any], object] | None = None
        self.woken: Callable[[Any], object] | None = None
        self.run: Callable[..., object]
        self.result: Callable[[], object] = bool

    def wake(self) -> None:
        """Wakes the task that waits, if one does, in the loop's next turn."""
        callback = self.callback
        if callback is not None:
            self.callback = None
            self.woken = callback
            self._batch.add([self])

    def __await__(self) -> Generator[Waiter, None, None]:
        self._asyncio_future_blocking = True
        yield self

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context) -> None:
        """Called by the task that begins to wait."""
        self.callback = callback
        self.run = context.run

    def cancel(self, msg: Any = None) -> bool:
        """Called by a task that waits and is cancelled; False if it has been woken already: then it raises itself."""
        if self.callback is None:
            return False
        self._cancel_arguments = () if msg is None else (msg,)
        self.result = self._raise_cancelled
        self.wake()
        return True

    def _raise_cancelled(self) -> None:
        self.result = bool
        raise asyncio.CancelledError(*self._cancel_arguments)
