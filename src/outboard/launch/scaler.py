"""Changes of the number of ranks, as the launcher carries them out: the plan (dp/elastic.py) decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from outboard.config import EngineConfig
from outboard.dp.elastic import ScalePlan
from outboard.errors import ConfigError, ScaleError, ScaleInProgressError, ScaleRolledBackError, UnsupportedError
from outboard.launch.coordinator import CoordinatorKeeper
from outboard.launch.desk import ControlDesk
from outboard.launch.frontends import FrontEnd
from outboard.launch.lockstep import LockstepGroup
from outboard.launch.rank import EngineRank
from outboard.launch.scale_work import ScaleWork
from outboard.protocol.control import EngineState
from outboard.protocol.scaling import (
    AbortScale,
    CommitScale,
    Scale,
    ScaleProgress,
    ScaleRefused,
    ScaleState,
)

__all__ = ["ScaleOrder", "Scaler"]

logger = logging.getLogger("outboard.launch")

_ENDED = (EngineState.DEAD, EngineState.STOPPED)


class ScaleOrder:
    """Who wants what.

    Args:
        scale: what is wanted.
        front_end: who wants it; None: the owner of the engine cores.

    Attributes:
        done: for the owner: the end, or what went wrong.
    """

    def __init__(self, scale: Scale, front_end: FrontEnd | None = None) -> None:
        self.scale = scale
        self.front_end = front_end
        self.done: Future[None] = Future()

    @property
    def client_index(self) -> int:
        """Index of the front end; -1: there is none."""
        return self.front_end.client_index if self.front_end is not None else -1


class Scaler:
    """One change after the other. Belongs to the launcher's thread.

    Args:
        config: what runs.
        ranks: all ranks by number, those that come and leave included; the launcher's own list, changed here.
        group: of those that step together.
        coordinator: started where it comes to be wanted.
        desk: by which all is told and heard.
        make_rank: makes a rank of a number, for a group of a size, with its first incarnation.
        started: whether the first start-up is over.
    """

    def __init__(
        self,
        config: EngineConfig,
        ranks: list[EngineRank],
        group: LockstepGroup,
        coordinator: CoordinatorKeeper,
        desk: ControlDesk,
        make_rank: Callable[[int, int, int], EngineRank],
        started: Callable[[], bool],
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._group = group
        self._desk = desk
        self._started = started
        self._plan: ScalePlan | None = None
        self._order: ScaleOrder | None = None
        self._parked: ScaleOrder | None = None  # waits until an earlier one is rolled back
        self._told: ScaleProgress | None = None
        self._work = ScaleWork(config, ranks, group, coordinator, desk, make_rank)
        desk.on_join = self._on_join
        desk.on_detach = self._on_detach
        desk.handle(Scale, self._on_scale)
        desk.handle(CommitScale, self._on_commit)
        desk.handle(AbortScale, self._on_abort)

    @property
    def due(self) -> float | None:
        """When to call `look` although nothing has happened; None: not before something does."""
        return self._plan.due if self._plan is not None else None

    def look(self, now: float) -> None:
        """Goes on as far as it can; to be called whenever anything has changed."""
        while self._plan is not None:
            actions = self._plan.advance(self._work.facts(self._plan), now)
            for action in actions or ():
                self._work.do(action, now)
            self._tell()
            if self._plan.over:
                self._end(now)
            elif actions is None:
                return

    def order(self, order: ScaleOrder) -> None:
        """Takes a wish; what becomes of it is told to whoever has it."""
        try:
            self._take(order)
        except (ScaleError, ConfigError, UnsupportedError) as error:
            self._refuse(order, error)

    def _on_join(self, front_end: FrontEnd) -> None:
        """It has to know which ranks leave, so that it says LEAVE to them."""
        if self._plan is not None and self._told is not None:
            self._desk.tell(front_end, self._told)

    def _on_detach(self, front_end: FrontEnd) -> None:
        """It has left or died: what it wanted is taken back, if it still can be."""
        if self._parked is not None and self._parked.front_end is front_end:
            self._parked = None
        if self._plan is not None and self._order is not None and self._order.front_end is front_end:
            self._plan.abort("the front end that wanted it is gone")

    def stop(self) -> None:
        """All is being stopped: nothing is changed any more."""
        for order in (self._order, self._parked):
            if order is not None and not order.done.done():
                order.done.set_exception(ScaleError("the engine cores are being stopped"))
        self._plan = self._order = self._parked = None

    # --- what is wanted ---

    def _take(self, order: ScaleOrder) -> None:
        scale, parallel = order.scale, self._config.parallel
        size = self._desk.members
        if not parallel.elastic:
            raise UnsupportedError(
                "a single rank that was not meant to be scaled cannot be: start it with ParallelConfig(max_size=...)"
            )
        if not parallel.min_size <= scale.new_size <= parallel.most_ranks:
            raise ConfigError(
                f"there can be {parallel.min_size} to {parallel.most_ranks} ranks, not {scale.new_size}: "
                "ParallelConfig(min_size=..., max_size=...) sets that"
            )
        if not (scale.timeout > 0 and scale.drain >= 0):
            raise ConfigError(f"timeout must be above 0 s and drain at least 0 s, not {scale.timeout}, {scale.drain}")
        if not self._started():
            raise ScaleError("the engine cores are still starting")
        plan = self._plan
        if plan is not None and plan.rolling_back and self._parked is None:
            self._parked = order
            return
        if plan is not None:
            raise ScaleInProgressError(
                f"a change from {plan.old_size} to {plan.new_size} ranks is under way ({plan.state.value}); wait for it"
            )
        if self._group.lockstep and not all(rank.can_reinitialize for rank in self._ranks):
            raise UnsupportedError(
                "ranks that step together can only be scaled where their engine defines reinitialize()"
            )
        self._order = order
        self._told = None
        if scale.new_size == size:
            self._tell_end(ScaleProgress(order.client_index, scale.call, size, size, ScaleState.DONE))
            return
        self._plan = ScalePlan(
            size,
            scale.new_size,
            lockstep=self._group.lockstep,
            timeout=scale.timeout,
            drain=scale.drain,
            patience=parallel.dp_sync_timeout,
            commit=scale.commit,
        )
        self._tell()

    def _refuse(self, order: ScaleOrder, error: Exception) -> None:
        if order.front_end is None:
            order.done.set_exception(error)
        else:
            self._desk.tell(order.front_end, ScaleRefused(order.scale.call, type(error).__name__, str(error)))

    def _on_scale(self, sender: bytes, scale: Scale) -> None:
        front_end = self._desk.front_ends.get(sender)
        if front_end is not None:
            self.order(ScaleOrder(scale, front_end))

    def _on_commit(self, sender: bytes, message: CommitScale) -> None:
        front_end = self._desk.front_ends.get(sender)
        if front_end is None:
            return
        if self._is_of(front_end, message.call) and self._plan is not None:
            self._plan.commit()
        else:
            reason = "nothing that this front end has prepared is waiting to be committed"
            self._desk.tell(front_end, ScaleRefused(message.call, ScaleError.__name__, reason))

    def _on_abort(self, sender: bytes, message: AbortScale) -> None:
        front_end = self._desk.front_ends.get(sender)
        if front_end is None:
            return
        parked = self._parked
        if parked is not None and parked.front_end is front_end and parked.scale.call == message.call:
            self._parked = None
            self._refuse(parked, ScaleError("it was taken back before it had begun"))
        elif self._is_of(front_end, message.call) and self._plan is not None:
            self._plan.abort("whoever wanted it took it back")

    def _is_of(self, front_end: FrontEnd, call: int) -> bool:
        order = self._order
        return order is not None and order.front_end is front_end and order.scale.call == call

    # --- the end ---

    def _tell(self) -> None:
        """Tells all front ends how far it is, where that is news."""
        plan, order = self._plan, self._order
        assert plan is not None and order is not None
        progress = ScaleProgress(
            order.client_index,
            order.scale.call,
            plan.old_size,
            plan.new_size,
            plan.state,
            plan.ranks(self._work.facts(plan)),
            plan.reason,
        )
        if progress != self._told:
            self._told = progress
            if not plan.over:
                self._desk.tell_all(progress)

    def _end(self, now: float) -> None:
        plan, told = self._plan, self._told
        assert plan is not None and told is not None
        size = plan.new_size if told.state is ScaleState.DONE else plan.old_size
        self._work.end(size)
        self._plan = None
        level = logging.INFO if told.state is ScaleState.DONE and not told.reason else logging.WARNING
        what = f"from {plan.old_size} to {plan.new_size} ranks"
        logger.log(level, "the change %s is %s%s", what, told.state.value, f": {told.reason}" if told.reason else "")
        self._tell_end(told)
        parked, self._parked = self._parked, None
        if parked is not None:
            self.order(parked)

    def _tell_end(self, progress: ScaleProgress) -> None:
        order, self._order = self._order, None
        assert order is not None
        if order.front_end is None:
            if progress.state is ScaleState.DONE:
                order.done.set_result(None)
            else:
                order.done.set_exception(ScaleRolledBackError(progress.reason))
        self._desk.tell_all(progress)
