"""Notices the death of an engine core on the event loop, and tells it only once all that it had sent is taken."""

from __future__ import annotations

import asyncio
from typing import Protocol

from outboard.errors import EngineDeadError
from outboard.launch.process import EngineProcess
from outboard.protocol.messages import ErrorReport
from outboard.transport.reader import SocketReader

__all__ = ["EXIT_GRACE", "LONGEST", "QUIET", "EngineMonitor", "death_of"]

# What a dead engine core had sent may still be on its way: wait until its socket is quiet for 20 ms, at most 200 ms.
QUIET = 0.020
LONGEST = 0.200
# An engine core that said ENGINE_CORE_DEAD gets this long to end by itself, so that its exit code can be told.
EXIT_GRACE = 0.500


class Failing(Protocol):
    """Who is told: counts what it received, and ends what waits."""

    received: int

    def fail(self, cause: EngineDeadError) -> None: ...


class EngineMonitor:
    """Watches one engine-core process; holds no reference to the client.

    Args:
        process: its sentinel is watched.
        reader, receiver: what it had sent comes through these.
        rank, incarnation: named in the error.
    """

    def __init__(
        self, process: EngineProcess, reader: SocketReader, receiver: Failing, rank: int, incarnation: int
    ) -> None:
        self._process = process
        self._sentinel = process.sentinel
        self._reader = reader
        self._receiver = receiver
        self._rank = rank
        self._incarnation = incarnation
        self._report: ErrorReport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts watching on `loop`. Where the process has ended already, tells so before it returns."""
        self._loop = loop
        if self._process.poll() is not None:
            while self._reader.drain(1):
                pass
            self._tell()
        else:
            loop.add_reader(self._sentinel, self._on_exit)

    def detach(self) -> None:
        """Stops watching. Idempotent. Call it on the loop, or where none runs."""
        loop, self._loop = self._loop, None
        if self._timer is not None:
            self._timer.cancel()
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._sentinel)

    def on_dead(self, report: ErrorReport) -> None:
        """The engine core has said that it is about to end: its exit follows, or is waited for no longer."""
        self._report = report
        if self._loop is not None:
            self._timer = self._loop.call_later(EXIT_GRACE, self._tell)

    def _on_exit(self) -> None:
        loop = self._loop
        assert loop is not None  # the reader was on it
        loop.remove_reader(self._sentinel)
        if self._timer is not None:
            self._timer.cancel()
        self._deadline = loop.time() + LONGEST
        self._wait_for_quiet(loop, self._receiver.received)

    def _wait_for_quiet(self, loop: asyncio.AbstractEventLoop, received: int) -> None:
        self._timer = loop.call_later(QUIET, self._look_again, loop, received)

    def _look_again(self, loop: asyncio.AbstractEventLoop, before: int) -> None:
        if self._receiver.received != before and loop.time() < self._deadline:
            self._wait_for_quiet(loop, self._receiver.received)
        else:
            self._tell()

    def _tell(self) -> None:
        self._receiver.fail(death_of(self._process, self._rank, self._incarnation, self._report))


def death_of(process: EngineProcess, rank: int, incarnation: int, report: ErrorReport | None = None) -> EngineDeadError:
    """What to tell of an engine core that died while running.

    Args:
        report: what it said itself on its way out, if it left nothing on its report page.
    """
    error = process.death("running", EngineDeadError, rank=rank, incarnation=incarnation)
    if report is not None and not error.remote_type:
        error.remote_type, error.remote_message, error.remote_traceback = report.type, report.message, report.traceback
    return error
