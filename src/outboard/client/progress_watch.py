"""Looks at the progress of engine cores while something waits for them, and tells the launcher of a hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outboard.client.driver import Driver, Timer
from outboard.client.link import Link
from outboard.client.pending import PendingTable
from outboard.protocol.control import ReportProgress, ReportStall

__all__ = ["ProgressWatch"]

# How often to look, seconds; a look takes some microseconds, and there is none while nothing waits.
_INTERVAL = 0.25
# How long a process may take to dump its stack, seconds.
_STACK_GRACE = 0.2


class ProgressWatch:
    """Belongs to the client's thread.

    Args:
        stall_timeout: `FaultConfig.stall_timeout`, seconds.
        pending: what waits.
        links: by rank.
        tell: sends a message to the launcher.
    """

    def __init__(
        self, stall_timeout: float, pending: PendingTable, links: dict[int, Link], tell: Callable[[Any], None]
    ) -> None:
        self._stall_timeout = stall_timeout
        self._pending = pending
        self._links = links
        self._tell = tell
        self._driver: Driver | None = None
        self._timer: Timer | None = None
        self._suspects: dict[int, bool] = {}  # rank -> whether its stall has been reported, or is about to be

    def attach(self, driver: Driver) -> None:
        """Can look from now on."""
        self._driver = driver

    def arm(self) -> None:
        """Something waits from now on."""
        if self._timer is None and self._driver is not None:
            self._timer = self._driver.call_later(min(_INTERVAL, self._stall_timeout / 4), self._look)

    def forget(self, rank: int) -> None:
        """This engine core has ended."""
        self._suspects.pop(rank, None)

    def stop(self) -> None:
        """Looks no more. Idempotent."""
        self._driver = None
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        driver = self._driver
        if driver is None:
            return
        for rank, link in self._links.items():
            if link.stall is None or link.ending:
                continue
            hangs = link.stall.age(link.outbox.sent) > self._stall_timeout
            if hangs and rank not in self._suspects:
                self._suspects[rank] = False
                link.stall.ask_for_stack()
                driver.call_later(_STACK_GRACE, self._report, link)
            elif not hangs and self._suspects.pop(rank, False):
                self._tell(ReportProgress(rank, link.status.incarnation))
        if self._pending or self._suspects:
            self.arm()

    def _report(self, link: Link) -> None:
        rank = link.status.rank
        if self._driver is None or link.stall is None or link.ending or rank not in self._suspects:
            return
        report = link.stall.report(link.outbox.sent)
        if report.age > self._stall_timeout:
            self._suspects[rank] = True
            self._tell(ReportStall(rank, link.status.incarnation, report))
        else:
            del self._suspects[rank]
