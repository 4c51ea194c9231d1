"""Which notifications of engine cores a change of size brings, and which make no sense. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from outboard.errors import NotificationError
from outboard.protocol.control import ScaleProgress, ScaleState
from outboard.protocol.messages import RECONFIGURE_FINISHED, SHUTDOWN_COMPLETE

__all__ = ["Notifications"]

_KINDS = (RECONFIGURE_FINISHED, SHUTDOWN_COMPLETE)
_MOST_EARLY = 1024


class Notifications:
    """Follows one change after the other.

    A notification and the progress that explains it come by different ways, in any order: one that is not expected yet
    is kept, until `judge` finds that nothing came to explain it.

    Args:
        only_rank: the one rank that there is a connection with; None: all.
    """

    def __init__(self, only_rank: int | None = None) -> None:
        self._only_rank = only_rank
        self._expected: set[tuple[str, int]] = set()
        self._came: set[tuple[str, int]] = set()
        self._early: list[tuple[str, int]] = []
        self._anything = False  # it is taken back: some come, some do not, some twice

    def follow(self, progress: ScaleProgress) -> None:
        """How far a change has come."""
        if progress.state in (ScaleState.ROLLING_BACK, ScaleState.ROLLED_BACK):
            self._anything = True
        elif progress.state in (ScaleState.PREPARING, ScaleState.READY):
            if self._expected or self._anything:
                self._expected, self._came, self._anything = set(), set(), False
        elif not self._expected:
            staying = range(progress.new_size)
            leaving = range(progress.new_size, progress.old_size)
            self._expected = self._seen((RECONFIGURE_FINISHED, rank) for rank in staying)
            self._expected |= self._seen((SHUTDOWN_COMPLETE, rank) for rank in leaving)
            early = [one for one in self._early if one in self._expected]
            self._early = [one for one in self._early if one not in self._expected]
            self._came.update(early)

    def take(self, kind: str, rank: int) -> None:
        """One has come.

        Raises:
            NotificationError: it is unknown, or came before.
        """
        if kind not in _KINDS:
            raise NotificationError(f"rank {rank} sent a notification of unknown type {kind!r}", rank)
        one = (kind, rank)
        if self._anything:
            return
        if one in self._came:
            raise NotificationError(f"rank {rank} sent {kind} twice", rank)
        if one in self._expected:
            self._came.add(one)
        elif len(self._early) < _MOST_EARLY:
            self._early.append(one)

    def judge(self) -> NotificationError | None:
        """Forgets what came early and was never explained; what to say of it."""
        early, self._early = self._early, []
        if not early:
            return None
        kind, rank = early[0]
        return NotificationError(f"rank {rank} sent {kind}, which belongs to no change of size under way", rank)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not sent what they are expected to."""
        return [] if self._anything else sorted({rank for _, rank in self._expected - self._came})

    def _seen(self, notifications: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
        return {one for one in notifications if self._only_rank in (None, one[1])}
