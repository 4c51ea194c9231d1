"""SIGINT and SIGTERM for whoever runs an `AsyncLLM`: the first one drains it, a second one stops it at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from outboard.errors import ClientClosedError

__all__ = ["CUT", "ShutdownSignals", "Stoppable"]

CUT = 3  # exit status: requests were still running when the drain's time was over

OnSignal = Callable[[signal.Signals], None]


class Stoppable(Protocol):
    """What signals stop: an `AsyncLLM`, or a server around one."""

    async def drain(self, timeout: float | None = None) -> bool:
        """Lets what runs end, in bounded time, and shuts down; whether all ended by itself."""

    async def shutdown(self, timeout: float | None = None) -> None:
        """Shuts down; with a timeout of 0 at once, also while it drains."""


class ShutdownSignals:
    """Takes SIGINT and SIGTERM for the length of an `async with`; afterwards they go where they went before.

        llm = AsyncLLM("openvino")
        async with ShutdownSignals(llm) as signals, llm:
            await signals.wait()  # or whatever is to be done
        sys.exit(signals.exit_status)

    The first signal drains: new requests are refused, those in flight have `timeout` seconds to end, then the engine
    core is stopped. During start-up it stops that. A second signal ends all at once. A third one, or a second one that
    finds the event loop blocked (in a write to a pipe that nobody reads, say), raises `SystemExit` wherever the program
    is.

    Leaving the block waits until what a signal began has been done. No task is cancelled: the block ends by itself, or
    by the `ClientClosedError` that it gets from the engine, which goes no further. Enter it before the engine is
    started, and in the main thread: Python allows handlers nowhere else. A signal that was ignored is taken, too.

    Args:
        llm: what to drain and to shut down.
        timeout: seconds that requests get; None: as `drain` has it.
        on_drain: called on the loop with the first signal, as the drain begins; may be set later.
        on_force: called on the loop with the second.

    Raises, when the block is left:
        EngineDeadError: the engine core died while it was drained.

    Attributes:
        received: the signals so far.
    """

    # Not `loop.add_signal_handler`: what a loop had before cannot be put back through its interface, and while the loop
    # is blocked its handlers never run. A handler of Python's own runs on asyncio's loop and on uvloop at once.

    def __init__(
        self,
        llm: Stoppable,
        *,
        timeout: float | None = None,
        on_drain: OnSignal | None = None,
        on_force: OnSignal | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        self.on_drain = on_drain
        self.on_force = on_force
        self.received: list[signal.Signals] = []
        self._llm = llm
        self._timeout = timeout
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._taken = 0
        self._began = asyncio.Event()
        self._drain: asyncio.Task[bool] | None = None
        self._force: asyncio.Task[None] | None = None
        self._interrupted = False
        self._wake_fds: tuple[int, int] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._begin_to_wake(self._loop)
        for number in self._signals:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            await self._finish()
        finally:
            for number, handler in self._before.items():
                if handler is not None:  # None: not of Python's making
                    signal.signal(number, handler)
            self._before.clear()
            self._stop_waking()
        if self._drain is None:
            return False
        self._interrupted = isinstance(error, ClientClosedError)
        failure = None if self._drain.cancelled() else self._drain.exception()
        if failure is not None and (error is None or self._interrupted):
            raise failure
        return self._interrupted

    async def wait(self) -> None:
        """Waits for a signal, and until what it began has been done."""
        await self._began.wait()
        await self._finish()

    @property
    def exit_status(self) -> int:
        """What the program should end with, once the block has been left.

        0: no signal came, or all requests ended by themselves. 128 + the signal's number: it stopped the start-up, or a
        second one ended all at once. `CUT`: requests were ended because their time was over.
        """
        if self._force is not None:
            return 128 + self.received[1]
        if self._drain is None:
            return 0
        if self._interrupted:
            return 128 + self.received[0]
        return 0 if not self._drain.cancelled() and self._drain.result() else CUT

    # --- inside ---

    def _begin_to_wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Has a signal wake the loop: the system may give it to any thread, and then the main one sleeps on."""
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        if before >= 0:  # the loop has one of its own
            signal.set_wakeup_fd(before)
            os.close(read_fd)
            os.close(write_fd)
            return
        self._wake_fds = read_fd, write_fd
        loop.add_reader(read_fd, _read_all, read_fd)

    def _stop_waking(self) -> None:
        if self._wake_fds is None:
            return
        assert self._loop is not None  # it was entered
        signal.set_wakeup_fd(-1)
        self._loop.remove_reader(self._wake_fds[0])
        for fd in self._wake_fds:
            os.close(fd)
        self._wake_fds = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between any two instructions: only asks the loop."""
        assert self._loop is not None  # there was a loop before there was a handler
        self.received.append(signal.Signals(number))
        self._loop.call_soon_threadsafe(self._take)
        if len(self.received) > min(2, self._taken + 1):
            raise SystemExit(128 + number)

    def _take(self) -> None:
        assert self._loop is not None
        if not self._before:
            return  # the block was left just then: all has ended
        self._taken += 1
        if self._taken == 1:
            self._drain = self._loop.create_task(self._llm.drain(self._timeout))
            self._began.set()
            callback = self.on_drain
        elif self._taken == 2:
            self._force = self._loop.create_task(self._llm.shutdown(0))
            callback = self.on_force
        else:
            return
        if callback is not None:
            callback(self.received[self._taken - 1])

    async def _finish(self) -> None:
        await asyncio.sleep(0)  # a signal may have asked the loop just now
        while running := [task for task in (self._drain, self._force) if task is not None and not task.done()]:
            await asyncio.wait(running)


def _read_all(fd: int) -> None:
    try:
        os.read(fd, 4096)
    except BlockingIOError:
        pass
