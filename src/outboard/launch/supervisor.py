"""What becomes of one rank: its states, its incarnations, its budget of restarts. Pure: no clock, no process.

    STARTING --ready--> READY <--stalled / progressed--> STALLED
       |                  |                                 |
       | died             | died, killed                    |
       v                  v                                 v
     DEAD <--no budget-- RESTARTING --its pause is over: a new incarnation starts; ready--> READY
                          ^    | died
                          +----+
    any --stop, then died--> STOPPED

An engine core that dies in its very first start-up is not tried again: what is wrong then stays wrong.
"""

from __future__ import annotations

from outboard.config import RestartPolicy
from outboard.launch.budget import RestartBudget
from outboard.protocol.control import EngineState

__all__ = ["RankSupervisor", "RestartBudget"]


class RankSupervisor:
    """Decides; the launcher does. All times are seconds of one monotonic clock.

    Args:
        policy: whether, how often and how soon to start again.
        incarnation: of the first process; above 0 where the rank has been there before, and left.

    Attributes:
        budget: of restarts; ranks that restart as one share theirs.
        state: where the rank is.
        incarnation: of the process that runs or starts, or ran last.
        first_incarnation: of the first.
        stopping: whether its end is wanted.
        restart_at: when `begin` is to be called for the next incarnation; None: nothing is due.
    """

    def __init__(self, policy: RestartPolicy, incarnation: int = 0) -> None:
        self.budget = RestartBudget(policy)
        self.stopping = False
        self.state = EngineState.STARTING
        self.incarnation = self.first_incarnation = incarnation
        self.restart_at: float | None = None

    @property
    def alive(self) -> bool:
        """Whether it serves, or may still come to serve."""
        return self.state not in (EngineState.DEAD, EngineState.STOPPED)

    @property
    def is_first(self) -> bool:
        """Whether the incarnation that runs or starts is the first."""
        return self.incarnation == self.first_incarnation

    def begin(self) -> None:
        """The pause before a restart is over: the next incarnation is being started."""
        self.restart_at = None
        self.incarnation += 1

    def ready(self) -> bool:
        """The incarnation that was being started is ready. Returns whether that is news."""
        if self.stopping or self.state not in (EngineState.STARTING, EngineState.RESTARTING):
            return False
        self.state = EngineState.READY
        return True

    def stalled(self) -> bool:
        """It makes no progress. Returns whether that is news."""
        if self.stopping or self.state is not EngineState.READY:
            return False
        self.state = EngineState.STALLED
        return True

    def progressed(self) -> bool:
        """It makes progress again. Returns whether that is news."""
        if self.stopping or self.state is not EngineState.STALLED:
            return False
        self.state = EngineState.READY
        return True

    def stop(self) -> None:
        """Its end is wanted from now on: no restart."""
        self.stopping = True
        if self.restart_at is not None:  # there is no process
            self.restart_at = None
            self.state = EngineState.STOPPED

    def died(self, now: float) -> None:
        """Its process has ended, whatever the cause; `state` and `restart_at` say what comes then."""
        if not self.alive:
            return
        if self.stopping:
            self.state = EngineState.STOPPED
        elif self.state is EngineState.STARTING or not self._take_restart(now):
            self.state = EngineState.DEAD
        else:
            self.state = EngineState.RESTARTING

    def _take_restart(self, now: float) -> bool:
        self.restart_at = self.budget.take(now, self.incarnation)
        return self.restart_at is not None
