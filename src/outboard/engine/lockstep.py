"""The busy loop of an engine whose ranks must step together (waves.py): real steps, dummy steps, reductions, rest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from outboard.dp.messages import AskControl
from outboard.dp.rank_waves import Next
from outboard.dp.step_sync import ReductionInterrupted
from outboard.dp.waves import Phase, RankReport, SetControl, StartWave
from outboard.engine.controls import Controls
from outboard.engine.core import EngineCore
from outboard.engine.events import CoordinatorJoined, Stop
from outboard.engine.lockstep_controls import LockstepControls
from outboard.engine.lockstep_place import LockstepPlace
from outboard.engine.loop import BusyLoop
from outboard.engine.outgoing import describe
from outboard.errors import OutboardError
from outboard.protocol.progress import BUSY, FROZEN, ProgressPage
from outboard.protocol.scaling import (
    Quiesce,
    Reconfigure,
    ResumeRank,
)

__all__ = ["LockstepLoop"]

logger = logging.getLogger("outboard.engine")


class LockstepLoop(BusyLoop):
    """Steps whenever any rank has work. It rests until a coordinator knows of it; what comes before that waits.

    Stopped, it ends its requests and goes on with the others to the end of the wave: all are stopped together, and one
    that just ended would leave the others in the middle of a step.

    Args:
        engine, inbox, page: as `BusyLoop`.
        place: of this rank in its group.
        incarnation, say, token: as `BusyLoop`.
    """

    def __init__(
        self,
        engine: EngineCore,
        inbox: SimpleQueue[Any],
        page: ProgressPage,
        *,
        place: LockstepPlace,
        incarnation: int = 0,
        say: Callable[[Any], None] = lambda message: None,
        token: str = "",
    ) -> None:
        self._place = place
        self._given_up = False
        super().__init__(engine, inbox, page, rank=place.waves.rank, incarnation=incarnation, say=say, token=token)
        self._events[StartWave] = self._on_start
        self._events[SetControl] = self._on_control

    def _make_controls(self) -> Controls:
        self._lockstep_controls = LockstepControls(self._engine, self._batch, self._admit, self._place)
        return self._lockstep_controls

    def close(self, linger_ms: int) -> None:
        super().close(linger_ms)
        self._place.close()

    # --- what the coordinator says ---

    def _on_coordinator(self, joined: CoordinatorJoined) -> None:
        super()._on_coordinator(joined)
        if self._place.known:
            self._tell(self._place.waves.report())
        self._lockstep_controls.forget_asked()

    def _on_start(self, message: StartWave) -> None:
        self._tell(self._place.waves.start(message))

    def _on_control(self, message: SetControl) -> None:
        self._tell(self._place.waves.set_control(message, self._has_work))

    # --- changes of size ---

    def _on_quiesce(self, message: Quiesce) -> None:
        waves = self._place.waves
        self._tell(waves.rest(message.version))
        if waves.at_rest:  # for an earlier one that was not ended
            self._scaling.quiet(message.version)

    def _on_reconfigure(self, message: Reconfigure) -> None:
        if not self._place.waves.at_rest:
            self._scaling.reconfigured(message.version, "it does not rest")
            return
        self._page.alive(FROZEN)  # for how long it may take is the launcher's to say
        try:
            self._place.move(message, self._engine)
        except Exception as error:
            logger.exception("the group's size cannot be changed to %d", message.size)
            self._scaling.reconfigured(message.version, describe(error))
            return
        self._scaling.reconfigured(message.version)
        self._lockstep_controls.forget_asked()
        self._tell(self._place.waves.report())

    def _on_resume(self, message: ResumeRank) -> None:
        self._tell(self._place.waves.release(self._has_work))

    # --- steps ---

    def _advance(self) -> bool:
        waves = self._place.waves
        if self._coordinator is None or self._given_up or waves.at_rest:
            return False
        self._tell(waves.update(self._has_work))
        if waves.next is Next.REDUCE:
            if self._engine_sleeps and not waves.told_to_rest:
                return False
            self._given_up = not self._reduce()
            if self._given_up or waves.at_rest:
                return False
        if waves.next is Next.STEP:
            if self._engine_sleeps:
                return False
            if self._engine.has_work():
                self._engine.step(self._batch)
            else:
                self._engine.execute_dummy_batch()
            waves.stepped()
            self._page.stepped()
        self._lockstep_controls.settle(self._ask)
        return waves.next is not Next.REST

    @property
    def _has_work(self) -> bool:
        return not self._stopping and self._engine.has_work()

    @property
    def _is_frozen(self) -> bool:
        waves = self._place.waves
        return waves.at_rest or (waves.paused and waves.phase is Phase.IDLE)

    @property
    def _engine_sleeps(self) -> bool:
        """Others were woken up a moment before this one: they wait."""
        return self._lockstep_controls.sleeping and not self._stopping

    def _reduce(self) -> bool:
        """Agrees with the others; False if this engine core is to end, and they may have ended."""
        waves = self._place.waves
        # The page says BUSY, and no sign of life is given: whoever waits for a hung rank must not look alive for ever.
        try:
            result = self._place.reduce(waves.vote(self._has_work))
        except ReductionInterrupted:
            self._on_stop(Stop())
            return False
        self._page.alive(BUSY)
        self._tell(waves.reduced(result, self._has_work))
        if waves.at_rest:
            self._scaling.quiet(result.rest)
        return True

    def _tell(self, report: RankReport | None) -> None:
        if report is not None and self._coordinator is not None and not self._coordinator.say(report):
            raise OutboardError("the coordinator does not read: a lockstep group cannot go on without it")

    def _ask(self, paused: bool) -> bool:
        mouth, waves = self._coordinator, self._place.waves
        return mouth is not None and mouth.say(AskControl(waves.group, waves.control, paused))
