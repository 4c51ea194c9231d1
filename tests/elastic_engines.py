"""Engines that fail when they are to start or to change their group's size, as a file says just then."""

from __future__ import annotations

import os
import time
from pathlib import Path

from outboard import EngineCore, ParallelState
from outboard.engines.lockstep_mock import LockstepMockEngine
from outboard.engines.mock import MockEngine

__all__ = ["LockstepTrouble", "StartTrouble", "Unscalable"]


def meet(trouble: str, where: str) -> None:
    """Does what the file says, if it says it of this place: "start die", "reinitialize refuse", ..."""
    path = Path(trouble)
    said = path.read_text().split() if trouble and path.exists() else []
    if said[:1] != [where]:
        return
    match said[1]:
        case "die":
            os._exit(7)
        case "hang":
            while path.exists():
                time.sleep(0.01)
        case "refuse":
            raise RuntimeError("no room at all")


class StartTrouble(MockEngine):
    """A `mock` whose start may fail."""

    def __init__(self, step_ms: float = 2.0, trouble: str = "") -> None:
        meet(trouble, "start")
        super().__init__(step_ms)


class LockstepTrouble(LockstepMockEngine):
    """A `lockstep_mock` whose start, or change of its group's size, may fail."""

    def __init__(self, step_ms: float = 2.0, trouble: str = "", barrier_timeout: float = 5.0) -> None:
        self._trouble = trouble
        meet(trouble, "start")
        super().__init__(step_ms, barrier_timeout=barrier_timeout)

    def reinitialize(self, state: ParallelState) -> None:
        if state.rank == 2:
            meet(self._trouble, "reinitialize")
        super().reinitialize(state)


class Unscalable(LockstepMockEngine):
    """Steps together with others, as many as there were at first."""

    reinitialize = EngineCore.reinitialize
