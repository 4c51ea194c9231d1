"""What the ranks of a lockstep group have in common: they start together, and end together."""

from __future__ import annotations

import msgspec

from outboard.config import EngineConfig, RestartPolicy
from outboard.launch.coordinator import CoordinatorKeeper
from outboard.launch.rank import EngineRank, GroupFacts
from outboard.launch.supervisor import RestartBudget
from outboard.transport.session import SessionDirectory

__all__ = ["LockstepGroup"]


class _GroupBudget(RestartBudget):
    """Of restarts of a group: its ranks differ in their incarnations, and fall together."""

    def __init__(self, policy: RestartPolicy, group: LockstepGroup) -> None:
        super().__init__(policy)
        self._group = group

    def take(self, now: float, incarnation: int) -> float | None:
        return super().take(now, self._group.facts.group)


class LockstepGroup:
    """Belongs to the launcher's thread. Whether ranks step together is known from their READY; before, they may.

    A group that falls, or changes its size, becomes a new incarnation of the group. None of its ranks is started again
    before all have ended.

    Args:
        config: what runs.
        session: its directory holds the group's sockets.
        coordinator: of the group.

    Attributes:
        ranks: all that step together, or may; set by the launcher.
        size: how many ranks a group that is started again has.
        lockstep: whether ranks step together.
        falls: how often it has fallen.
        stopping: whether all is being stopped.
    """

    def __init__(self, config: EngineConfig, session: SessionDirectory, coordinator: CoordinatorKeeper) -> None:
        self._config = config
        self._session = session
        self._coordinator = coordinator
        self._number = -1
        self._renew = True  # whether the next rank that is started is the first of a new incarnation
        self.facts = GroupFacts(0, 0, 0, "", "")
        self.ranks: list[EngineRank] = []
        self.size = config.parallel.data_parallel_size
        self.lockstep = False
        self.falls = 0
        self.stopping = False
        self._budget = _GroupBudget(config.faults.restart, self)

    def facts_at_start(self) -> GroupFacts:
        """What a rank is told that is being started."""
        if self._renew:
            return self.renew(self.size)
        return self.facts if self.lockstep else msgspec.structs.replace(self.facts, data_parallel_size=self.size)

    def renew(self, size: int) -> GroupFacts:
        """Makes a new incarnation of the group, of this size; what its ranks are told."""
        self._renew = False
        self._number = number = self._number + 1
        # Names are used once: a new group must not meet what an old one left behind.
        sync, meeting = self._session.address(f"sync-{number}"), self._session.path / f"meet-{number}"
        self.facts = GroupFacts(size, number, max(self._coordinator.incarnation, 0), sync, str(meeting))
        return self.facts

    def look(self, now: float) -> None:
        """To be called when an engine core has become ready: the first one tells whether ranks step together."""
        if self.lockstep or not self._config.parallel.elastic or not any(rank.lockstep for rank in self.ranks):
            return
        self.lockstep = True
        for rank in self.ranks:
            rank.supervisor.budget = self._budget
        if not self._coordinator.wanted:
            self._coordinator.start(now)

    def add(self, ranks: list[EngineRank]) -> None:
        """These ranks belong to it from now on."""
        self.ranks += ranks
        for rank in ranks:
            rank.joining = False
            if self.lockstep:
                rank.supervisor.budget = self._budget

    @property
    def may_begin(self) -> bool:
        """Whether ranks that are to be started again may be now."""
        return not self.lockstep or all(rank.process is None for rank in self.ranks)

    def end_with(self, fallen: EngineRank, now: float) -> list[EngineRank]:
        """A rank has ended: ends the others of its group. Returns those whose state has changed."""
        if not self.lockstep or self.stopping or fallen not in self.ranks:
            return []
        if not self._renew:
            self._renew = True
            self.falls += 1
        death = fallen.status(0).death
        why = f": {death.reason}" if death is not None else "."
        reason = f"was ended with its lockstep group, since rank {fallen.rank} ended{why}"
        return [rank for rank in self.ranks if rank is not fallen and rank.end_with_group(now, reason)]
