"""Which notifications of engine cores a change of size brings, and which make no sense. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import TypeAlias

from outboard.errors import NotificationError
from outboard.protocol.messages import RECONFIGURE_FINISHED, SHUTDOWN_COMPLETE
from outboard.protocol.scaling import (
    ScaleProgress,
    ScaleState,
)

__all__ = ["Notifications"]

_KINDS = (RECONFIGURE_FINISHED, SHUTDOWN_COMPLETE)
_MOST_UNEXPLAINED = 1024

_One: TypeAlias = "tuple[str, int]"


class _Change:
    """One change of size.

    Attributes:
        due: what has to come.
        allowed: what may come, or not.
        came: what has come.
        taken_back: anything may come: some come, some do not, some twice.
        over: when it was over.
    """

    def __init__(self, progress: ScaleProgress, linked: Callable[[int], bool]) -> None:
        self.whose = (progress.client_index, progress.call)
        self.taken_back = False
        self.over = inf
        self.came: set[_One] = set()
        self._ranks = range(max(progress.old_size, progress.new_size))
        expected: list[_One] = []
        if progress.old_size != progress.new_size:
            expected += [(RECONFIGURE_FINISHED, rank) for rank in range(progress.new_size)]
            expected += [(SHUTDOWN_COMPLETE, rank) for rank in range(progress.new_size, progress.old_size)]
        self.due = {one for one in expected if linked(one[1])}
        self.allowed = set(expected) - self.due

    def excuse(self, those: Iterable[_One]) -> None:
        """These need not come any more; they may."""
        excused = self.due.intersection(those)
        self.due -= excused
        self.allowed |= excused

    def take(self, one: _One, among: set[_One]) -> bool:
        """Takes what is among these; whether it is."""
        if one not in among:
            return False
        among.remove(one)
        self.came.add(one)
        return True

    def takes_anything_of(self, rank: int) -> bool:
        return self.taken_back and rank in self._ranks


class Notifications:
    """Follows one change after the other. All times in seconds of any one clock.

    The news of several changes may come before the notifications of the first: each belongs to the oldest change that
    wants it. One that none wants is kept for a while, since its explanation may come yet; `judge` gives it up.

    Args:
        linked: whether there is a connection with a rank, by which it could tell.
        apart: how much later a notification may come than the end of its change.
    """

    def __init__(self, linked: Callable[[int], bool] = lambda rank: True, apart: float = 5.0) -> None:
        self._linked = linked
        self._apart = apart
        self._changes: list[_Change] = []
        self._unexplained: list[tuple[_One, float]] = []
        self._doubtful: list[tuple[_One, float]] = []  # may be late ones, or of the next change

    def follow(self, progress: ScaleProgress, now: float) -> None:
        """How far a change has come."""
        self._changes = [change for change in self._changes if change.over > now - self._apart]
        if progress.state in (ScaleState.PREPARING, ScaleState.READY):
            return
        whose = (progress.client_index, progress.call)
        change = next((one for one in self._changes if one.whose == whose and one.over == inf), None)
        if change is None:
            change = _Change(progress, self._linked)
            self._changes.append(change)
            change.excuse(one for one, at in self._doubtful if at > now - self._apart)
            self._doubtful = []
        if progress.state in (ScaleState.ROLLING_BACK, ScaleState.ROLLED_BACK):
            change.taken_back = True
            change.due.clear()
        if progress.state in (ScaleState.DONE, ScaleState.ROLLED_BACK):
            change.over = now
        self._unexplained = [
            (one, at)
            for one, at in self._unexplained
            if not (change.take(one, change.due) or change.take(one, change.allowed))
            and not change.takes_anything_of(one[1])
        ]

    def excuse(self, rank: int) -> None:
        """This rank has died: what it had not said it will not say."""
        for change in self._changes:
            change.excuse([one for one in change.due if one[1] == rank])

    def take(self, kind: str, rank: int, now: float) -> None:
        """One has come.

        Raises:
            NotificationError: it is of no known type, or too many make no sense.
        """
        if kind not in _KINDS:
            raise NotificationError(f"rank {rank} sent a notification of unknown type {kind!r}", rank)
        one = (kind, rank)
        if any(change.take(one, change.due) for change in self._changes):
            return
        if any(change.take(one, change.allowed) or change.takes_anything_of(rank) for change in self._changes):
            self._doubtful = [*self._doubtful[-_MOST_UNEXPLAINED:], (one, now)]
            return
        if len(self._unexplained) >= _MOST_UNEXPLAINED:
            raise self._wrong(one)
        self._unexplained.append((one, now))

    def judge(self, until: float = inf) -> NotificationError | None:
        """Forgets what came until then, and was never explained; what to say of the first of it."""
        wrong = [one for one, at in self._unexplained if at <= until]
        self._unexplained = [(one, at) for one, at in self._unexplained if at > until]
        return self._wrong(wrong[0]) if wrong else None

    @property
    def unexplained(self) -> bool:
        """Whether something came that no change wants."""
        return bool(self._unexplained)

    def missing(self, client_index: int, call: int) -> list[int]:
        """Ranks that have not sent what this change expects of them."""
        for change in reversed(self._changes):
            if change.whose == (client_index, call):
                return sorted({rank for _, rank in change.due})
        return []

    def _wrong(self, one: _One) -> NotificationError:
        kind, rank = one
        if any(one in change.came for change in self._changes):
            return NotificationError(f"rank {rank} sent {kind} twice", rank)
        return NotificationError(f"rank {rank} sent {kind}, which belongs to no change of size under way", rank)
