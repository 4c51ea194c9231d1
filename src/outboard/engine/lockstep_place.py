"""A rank's place in its lockstep group: its waves, and how it agrees with the others. A change of size moves it."""

from __future__ import annotations

from collections.abc import Callable

from outboard.dp.rank_waves import RankWaves
from outboard.dp.step_sync import StepSync
from outboard.engine.core import EngineCore, ParallelState
from outboard.protocol.control import Reconfigure

__all__ = ["LockstepPlace", "MakeSync"]

# (rank, size, address of the group's reductions)
MakeSync = Callable[[int, int, str], StepSync]


class LockstepPlace:
    """Belongs to the busy loop.

    Args:
        waves: of this rank.
        sync: by which the ranks agree; None: it joins a group that runs, and has no place yet.
        sync_interval: of the waves of later groups.
        make_sync: makes the `sync` of a later group.

    Attributes:
        waves, sync: of the group that this rank is in.
    """

    def __init__(self, waves: RankWaves, sync: StepSync | None, sync_interval: int, make_sync: MakeSync) -> None:
        self.waves = waves
        self.sync = sync
        self._sync_interval = sync_interval
        self._make_sync = make_sync

    def move(self, to: Reconfigure, engine: EngineCore) -> None:
        """Takes the place of this rank in a group of another size. Nobody may be in a wave.

        Raises:
            Exception: the engine's own: it cannot.
        """
        rank = self.waves.rank
        self.close()
        self.sync = self._make_sync(rank, to.size, to.step_sync_address)
        waves = RankWaves(
            rank, to.size, group=to.group, coordinator=to.first_coordinator, sync_interval=self._sync_interval
        )
        waves.control = self.waves.control  # a pause outlives the group
        self.waves = waves
        state = ParallelState(rank, to.size, to.group, to.rendezvous)
        engine.parallel = state
        engine.reinitialize(state)

    def close(self) -> None:
        """Leaves the group. Idempotent."""
        if self.sync is not None:
            self.sync.close()
            self.sync = None
