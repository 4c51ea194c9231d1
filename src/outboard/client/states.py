"""What to raise for the state of an engine core."""

from __future__ import annotations

from outboard.errors import EngineDeadError, EngineRemovedError, EngineRestartedError, EngineStalledError
from outboard.protocol.control import EngineState, EngineStatus

__all__ = ["GONE", "SERVING", "gone", "removed", "restarting", "stalled"]

SERVING = (EngineState.READY, EngineState.STALLED)
GONE = (EngineState.DEAD, EngineState.STOPPED)


def gone(status: EngineStatus) -> EngineDeadError:
    """It ended, and will not come back."""
    if status.death is not None and status.state is EngineState.DEAD:
        return EngineDeadError(**status.death.facts())
    reason = f"engine core rank {status.rank} was shut down by its launcher"
    return EngineDeadError(reason, phase="stopping", rank=status.rank, incarnation=status.incarnation)


def removed(status: EngineStatus) -> EngineRemovedError:
    """It was scaled away, with what it had not ended."""
    reason = f"engine core rank {status.rank} was scaled away"
    if status.death is not None:
        facts = status.death.facts()
        return EngineRemovedError(f"{reason}: {facts.pop('reason')}", **facts)
    return EngineRemovedError(reason, phase="stopping", rank=status.rank, incarnation=status.incarnation)


def restarting(status: EngineStatus) -> EngineRestartedError:
    """It ended; it is being started again, or others serve."""
    if status.death is not None:
        return EngineRestartedError(**status.death.facts())
    reason = f"engine core rank {status.rank} is not ready"
    return EngineRestartedError(reason, rank=status.rank, incarnation=status.incarnation)


def stalled(status: EngineStatus) -> EngineStalledError:
    """It makes no progress."""
    report = status.stall
    assert report is not None  # its state says so
    return EngineStalledError(
        f"engine core rank {status.rank} (pid {status.pid}) has made no progress for {report.age:.1f} s or more, after "
        f"{report.steps} steps; its process is {report.process}",
        rank=status.rank,
        incarnation=status.incarnation,
        age=report.age,
        process=report.process,
        stack=report.stack,
    )
