"""A rank's place in its lockstep group: its waves, and how it agrees with the others. A change of size moves it."""

from __future__ import annotations

from collections.abc import Callable

from outboard.dp.rank_waves import RankWaves
from outboard.dp.step_sync import StepSync
from outboard.dp.waves import Vote
from outboard.engine.core import EngineCore, ParallelState
from outboard.errors import OutboardError
from outboard.protocol.scaling import (
    Reconfigure,
)

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
        waves: of this rank in that group.
    """

    def __init__(self, waves: RankWaves, sync: StepSync | None, sync_interval: int, make_sync: MakeSync) -> None:
        self.waves = waves
        self._sync = sync
        self._sync_interval = sync_interval
        self._make_sync = make_sync

    def move(self, to: Reconfigure, engine: EngineCore) -> None:
        """Takes the place of this rank in a group of another size, at rest as it was in the last.

        Raises:
            Exception: the engine's own: it cannot. This rank then has no place.
        """
        rank = self.waves.rank
        self.close()
        self._sync = self._make_sync(rank, to.size, to.step_sync_address)
        self.waves = RankWaves(
            rank,
            to.size,
            group=to.group,
            coordinator=to.first_coordinator,
            sync_interval=self._sync_interval,
            control=self.waves.control,
            at_rest=True,
        )
        state = ParallelState(rank, to.size, to.group, to.rendezvous)
        engine.parallel = state
        try:
            engine.reinitialize(state)
        except BaseException:
            self.close()
            raise

    @property
    def known(self) -> bool:
        """Whether it has a place; without one it rests."""
        return self._sync is not None

    def reduce(self, vote: Vote) -> Vote:
        """Agrees with the others; see `StepSync.reduce`.

        Raises:
            OutboardError: it was let go with no place in a group.
        """
        if self._sync is None:
            raise OutboardError("this rank is to step with a group in which it has no place")
        return self._sync.reduce(vote)

    def close(self) -> None:
        """Leaves the group. Idempotent."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None
