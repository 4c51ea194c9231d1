"""Pausing, sleeping and statistics where ranks must step together: one rank's pause is everybody's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from outboard.dp.waves import Phase
from outboard.engine.controls import Controls, PauseMode
from outboard.engine.core import EngineCore, OutputBatch
from outboard.engine.lockstep_place import LockstepPlace
from outboard.errors import UtilityError
from outboard.protocol.messages import EngineCoreRequest

__all__ = ["LockstepControls"]


class LockstepControls(Controls):
    """Has the coordinator pause and resume the group, and answers once that is so on this rank.

    A pause ends the wave on all ranks at the same step, whatever they have left to do. With "wait" nothing needs to be
    paused: ranks that hold new requests and end those they have come to rest by themselves.

    Args:
        engine, batch, admit: as `Controls`.
        place: of this rank in its group.
    """

    def __init__(
        self,
        engine: EngineCore,
        batch: OutputBatch,
        admit: Callable[[EngineCoreRequest], None],
        place: LockstepPlace,
    ) -> None:
        super().__init__(engine, batch, admit)
        self._place = place
        self._wish: bool | None = None  # whether the group is to be paused; None: no matter
        self._asked = -1  # the control that was known when the coordinator was last asked
        self._answers: list[tuple[Future[None], Callable[[], None]]] = []

    @property
    def sleeping(self) -> bool:
        """Whether the engine has given its memory back."""
        return self._sleeping

    # --- for the busy loop ---

    def forget_asked(self) -> None:
        """There is another coordinator, which has not been asked."""
        self._asked = -1

    def settle(self, ask: Callable[[bool], bool]) -> None:
        """Asks the coordinator for what is wished, and answers those who wished it once it is so.

        Not to be called while the group changes its size: it must not fall asleep meanwhile.
        """
        waves = self._place.waves
        if self._wish is None:
            return
        if waves.paused != self._wish:
            if self._asked != waves.control and ask(self._wish):
                self._asked = waves.control
        elif not self._wish or waves.phase is Phase.IDLE:
            self._wish = None
            answers, self._answers = self._answers, []
            for future, then in answers:
                _answer(future, then)

    # --- utilities ---

    def pause_generation(self, mode: PauseMode = "abort") -> Future[None] | None:
        """Pauses all ranks at a common step, and holds new requests on this one from now on.

        Args:
            mode: what becomes of those that run on this rank: "abort" ends them, "keep" freezes them; "wait" lets them
                end (the call is answered then) and does not pause other ranks, which are to be asked as well.
        """
        if mode == "wait":
            return super().pause_generation(mode)
        self.paused = True
        if mode == "abort":
            self._abort_all()
        return self._wish_for(True)

    def resume_generation(self) -> Future[None] | None:
        """Ends the pause of all ranks; requests held on this one go to the engine.

        Raises:
            UtilityError: the engine sleeps.
        """
        super().resume_generation()
        return self._wish_for(False)

    def is_paused(self) -> bool:
        """Whether new requests are held, or the group is paused."""
        return self.paused or self._place.waves.paused

    def sleep(self, level: int = 1) -> Future[None] | None:
        """Aborts what runs, pauses all ranks, and once they rest has the engine give memory back.

        Raises:
            UnsupportedError: the engine cannot; nothing has changed.
        """
        if type(self._engine).sleep is EngineCore.sleep:
            self._engine.sleep(level)
        self.paused = True
        self._abort_all()

        def sleep() -> None:
            self._engine.sleep(level)
            self._sleeping = True

        return self._wish_for(True, sleep)

    def wake_up(self, tags: list[str] | None = None) -> Future[None] | None:
        """Wakes the engine; once all of it is awake, generation resumes on all ranks: wake every rank first."""
        self._engine.wake_up(tags)
        if not self._sleeping or self._engine.is_sleeping():
            return None
        self._sleeping = False
        return self.resume_generation()

    def get_stats(self) -> dict[str, Any]:
        """As of every engine core, and: wave, phase ("idle", "opening", "running"), steps in this or the last wave."""
        waves = self._place.waves
        return {
            **super().get_stats(),
            "paused": self.is_paused(),
            "wave": waves.wave,
            "phase": waves.phase.name.lower(),
            "wave_steps": waves.steps,
        }

    def _wish_for(self, paused: bool, then: Callable[[], None] = lambda: None) -> Future[None]:
        if self._wish not in (None, paused):
            answers, self._answers = self._answers, []
            for other, _ in answers:
                other.set_exception(UtilityError("another call asked for the opposite before this was done"))
        self._wish = paused
        self._asked = -1
        done: Future[None] = Future()
        self._answers.append((done, then))
        return done


def _answer(future: Future[None], then: Callable[[], None]) -> None:
    try:
        then()
    except Exception as error:  # the caller's, as of any utility
        future.set_exception(error)
    else:
        future.set_result(None)
