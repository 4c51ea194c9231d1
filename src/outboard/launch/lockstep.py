"""What the ranks of a lockstep group have in common: they start together, and end together."""

from __future__ import annotations

from outboard.config import EngineConfig
from outboard.launch.coordinator import CoordinatorKeeper
from outboard.launch.rank import EngineRank, GroupFacts
from outboard.launch.supervisor import RestartBudget
from outboard.transport.session import SessionDirectory

__all__ = ["LockstepGroup"]


class LockstepGroup:
    """Belongs to the launcher's thread. Whether ranks step together is known from their READY; before, they may.

    The incarnation of such a group is that of its ranks: none is started again before all have ended.

    Args:
        config: what runs.
        session: its directory holds the group's sockets.
        coordinator: of the group.

    Attributes:
        ranks: all of them; set by the launcher.
        lockstep: whether ranks step together.
    """

    def __init__(self, config: EngineConfig, session: SessionDirectory, coordinator: CoordinatorKeeper) -> None:
        self._config = config
        self._session = session
        self._coordinator = coordinator
        self._facts: dict[int, GroupFacts] = {}
        self.ranks: list[EngineRank] = []
        self.lockstep = False

    def facts(self, incarnation: int) -> GroupFacts:
        """What ranks of this incarnation are told; the same for all."""
        known = self._facts.get(incarnation)
        if known is None:
            # Names are used once: a new group must not meet what an old one left behind.
            sync, meeting = self._session.address(f"sync-{incarnation}"), self._session.path / f"meet-{incarnation}"
            known = GroupFacts(incarnation, max(self._coordinator.incarnation, 0), sync, str(meeting))
            self._facts = {incarnation: known} if self.lockstep else {**self._facts, incarnation: known}
        return known

    def look(self, now: float) -> None:
        """To be called when an engine core has become ready: the first one tells whether ranks step together."""
        if self.lockstep or len(self.ranks) == 1 or not any(rank.lockstep for rank in self.ranks):
            return
        self.lockstep = True
        budget = RestartBudget(self._config.faults.restart)
        for rank in self.ranks:
            rank.supervisor.budget = budget
        if not self._coordinator.wanted:
            self._coordinator.start(now)

    @property
    def may_begin(self) -> bool:
        """Whether ranks that are to be started again may be now."""
        return not self.lockstep or all(rank.process is None for rank in self.ranks)

    def end_with(self, fallen: EngineRank, now: float) -> list[EngineRank]:
        """A rank has ended: ends the others of its group. Returns those whose state has changed."""
        if not self.lockstep or fallen.supervisor.stopping:
            return []
        death = fallen.status(0).death
        why = f": {death.reason}" if death is not None else "."
        reason = f"was ended with its lockstep group, since rank {fallen.rank} ended{why}"
        return [rank for rank in self.ranks if rank is not fallen and rank.end_with_group(now, reason)]
