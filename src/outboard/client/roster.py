"""Which engine cores a client knows, how they are, and which of them get requests. No IO, no thread, no event loop."""

from __future__ import annotations

from outboard.client.states import GONE, gone, removed, restarting, stalled
from outboard.protocol.control import EngineState, EngineStatus

__all__ = ["Roster"]


class Roster:
    """Belongs to the client's thread.

    Args:
        only_rank: the one rank that this client has to do with; None: all.

    Attributes:
        members: ranks below this get requests; others are on their way in or out.
        leaving: ranks that were members, and serve on until they are empty.
        statuses: of the engine cores, by rank.
        told: the same, as far as subscribers have been told: one that is ready is not before it can be used.
    """

    def __init__(self, only_rank: int | None = None) -> None:
        self._only_rank = only_rank
        self.members = 0
        self.leaving: set[int] = set()
        self.statuses: dict[int, EngineStatus] = {}
        self.told: dict[int, EngineStatus] = {}

    @property
    def ranks(self) -> list[int]:
        """The ranks that this client has to do with, and that get requests."""
        return sorted(rank for rank in self.statuses if rank < self.members)

    @property
    def all_gone(self) -> bool:
        """Whether none of them will serve again."""
        return all(self.statuses[rank].state in GONE for rank in self.ranks)

    def concerns(self, rank: int) -> bool:
        """Whether this client has to do with a rank."""
        return self._only_rank in (None, rank)

    def is_member(self, rank: int) -> bool:
        """Whether this rank gets requests."""
        return rank in self.statuses and 0 <= rank < self.members

    def gets_requests(self, rank: int) -> bool:
        """Whether this rank has requests of this client, or can get them, once it can be used."""
        return rank < self.members or rank in self.leaving

    def set_members(self, members: int) -> int:
        """How many ranks get requests from now on; how many did before."""
        before, self.members = self.members, members
        self.leaving = {rank for rank in (*self.leaving, *range(members, before)) if rank >= members}
        return before

    def forget(self, rank: int) -> None:
        """This rank is no more; it may come again, as another incarnation."""
        del self.statuses[rank]
        self.told.pop(rank, None)
        self.leaving.discard(rank)

    def check_members(self) -> None:
        """Raises that the one rank which this client has to do with leaves; where there are several, one stays."""
        if not self.ranks:
            raise removed(next(iter(self.statuses.values())))

    def check(self) -> None:
        """Raises what is wrong, where no engine core serves."""
        self.check_members()
        statuses = [self.statuses[rank] for rank in self.ranks]
        if len(statuses) > 1 and any(status.state is EngineState.READY for status in statuses):
            return
        for status in statuses:
            if status.state is EngineState.STALLED:
                raise stalled(status)
            if status.state is EngineState.RESTARTING:
                raise restarting(status)
            if status.state in GONE:  # what it had sent is still being taken
                raise gone(status)
