"""Changes of the number of ranks, as the launcher carries them out: the plan (dp/elastic.py) decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from outboard.config import EngineConfig
from outboard.dp.elastic import ScalePlan
from outboard.dp.elastic_steps import (
    Action,
    Announce,
    Drain,
    Facts,
    Kill,
    Quiesce,
    Reconfigure,
    Resume,
    Start,
    Stop,
)
from outboard.errors import ConfigError, ScaleError, ScaleInProgressError, ScaleRolledBackError, UnsupportedError
from outboard.launch.coordinator import CoordinatorKeeper
from outboard.launch.desk import ControlDesk
from outboard.launch.frontends import FrontEnd
from outboard.launch.lockstep import LockstepGroup
from outboard.launch.rank import EngineRank
from outboard.protocol import scaling
from outboard.protocol.control import EngineState
from outboard.protocol.scaling import (
    AbortScale,
    CommitScale,
    Drained,
    DrainRank,
    Quiet,
    Reconfigured,
    ResumeRank,
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
        self._coordinator = coordinator
        self._desk = desk
        self._make_rank = make_rank
        self._started = started
        self._plan: ScalePlan | None = None
        self._order: ScaleOrder | None = None
        self._parked: ScaleOrder | None = None  # waits until an earlier one is rolled back
        self._told: ScaleProgress | None = None
        self._next_incarnation: dict[int, int] = {}  # of ranks that have left
        self._version = 0  # of what ranks were asked last
        self._drain_version = 0
        self._announced_version = 0
        self._falls = 0
        self._quiet: set[int] = set()
        self._reconfigured: dict[int, str] = {}  # rank -> "", or why not
        self._drained: set[int] = set()
        desk.on_join = self._on_join
        desk.on_detach = self._on_detach
        desk.handle(Scale, self._on_scale)
        desk.handle(CommitScale, self._on_commit)
        desk.handle(AbortScale, self._on_abort)
        desk.handle(Quiet, self._on_quiet)
        desk.handle(Reconfigured, self._on_reconfigured)
        desk.handle(Drained, self._on_drained)

    @property
    def due(self) -> float | None:
        """When to call `look` although nothing has happened; None: not before something does."""
        return self._plan.due if self._plan is not None else None

    def look(self, now: float) -> None:
        """Goes on as far as it can; to be called whenever anything has changed."""
        while self._plan is not None:
            actions = self._plan.advance(self._facts(self._plan), now)
            for action in actions or ():
                self._do(action, now)
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

    # --- what ranks answer ---

    def _on_quiet(self, sender: bytes, answer: Quiet) -> None:
        if self._is_answer(sender, answer, self._version):
            self._quiet.add(answer.rank)

    def _on_reconfigured(self, sender: bytes, answer: Reconfigured) -> None:
        if self._is_answer(sender, answer, self._version):
            self._reconfigured[answer.rank] = answer.error

    def _on_drained(self, sender: bytes, answer: Drained) -> None:
        if self._is_answer(sender, answer, self._drain_version):
            self._drained.add(answer.rank)

    def _is_answer(self, sender: bytes, answer: Quiet | Reconfigured | Drained, version: int) -> bool:
        known = self._desk.is_rank(sender, answer.rank, answer.session_token)
        return known and self._plan is not None and answer.version == version

    # --- how things stand ---

    def _facts(self, plan: ScalePlan) -> Facts:
        ready, ended = set(), set()
        for rank in self._ranks:
            if rank.is_ready and rank.supervisor.state in (EngineState.READY, EngineState.STALLED):
                ready.add(rank.rank)
            elif rank.process is None and rank.supervisor.state in _ENDED:
                ended.add(rank.rank)
        unconnected = self._unconnected(plan) if plan.up else ""
        unheard = self._unacknowledged()
        return Facts(
            ready=frozenset(ready),
            ended=frozenset(ended | set(range(len(self._ranks), max(plan.old_size, plan.new_size)))),
            connected=not unconnected,
            acknowledged=not unheard,
            fallen=self._group.falls != self._falls,
            quiet=frozenset(self._quiet),
            drained=frozenset(self._drained),
            reconfigured=frozenset(rank for rank, error in self._reconfigured.items() if not error),
            deaths={rank.rank: rank.death for rank in self._ranks if rank.rank in ended},
            refused={rank: error for rank, error in self._reconfigured.items() if error},
            waiting_for=unconnected or unheard,
            no_room={rank.rank: rank.waits for rank in self._ranks if rank.waits},
        )

    def _unconnected(self, plan: ScalePlan) -> str:
        """Who is not connected to all that come; "": all are."""
        missing = []
        if self._coordinator.wanted and self._coordinator.place is None:
            missing.append("the coordinator")
        if self._config.parallel.balancing == "internal":  # else a front end has nothing to do with new ranks
            coming = [self._ranks[rank] for rank in plan.coming if rank < len(self._ranks)]
            missing += [
                f"front end {one.client_index}" for one in self._desk.front_ends if not one.is_attached_to(coming)
            ]
        return ", ".join(missing)

    def _unacknowledged(self) -> str:
        version = self._announced_version
        missing = [f"front end {one.client_index}" for one in self._desk.front_ends if one.acknowledged < version]
        if self._coordinator.place is not None and self._desk.coordinator_acknowledged < version:
            missing.append("the coordinator")
        return ", ".join(missing)

    # --- what is to be done ---

    def _do(self, action: Action, now: float) -> None:
        match action:
            case Start():
                self._start(action, now)
            case Announce():
                self._announce(action.size, now)
            case Drain():
                self._drain_version = self._next_version()
                self._drained.clear()
                self._falls = self._group.falls
                self._ask(action.ranks, DrainRank(self._drain_version))
            case Quiesce():
                self._quiet.clear()
                self._falls = self._group.falls
                self._ask(action.ranks, scaling.Quiesce(self._next_version()))
            case Reconfigure():
                self._reconfigure(action)
            case Resume():
                self._ask(action.ranks, ResumeRank(self._next_version()))
            case Stop():
                for rank in self._of(action.ranks):
                    rank.stop(now, self._config.faults.shutdown_timeout)
            case Kill():
                for rank in self._of(action.ranks):
                    self._kill(rank, action.reason, now)

    def _start(self, action: Start, now: float) -> None:
        size = action.ranks.stop
        parallel = self._config.parallel
        if size > 1 and parallel.client_count > 1 and not self._coordinator.wanted:
            self._coordinator.start(now)
        for number in action.ranks:
            rank = self._make_rank(number, size, self._next_incarnation.get(number, 0))
            self._ranks.append(rank)
            rank.start_or_die(now)

    def _announce(self, size: int, now: float) -> None:
        coming = self._ranks[self._desk.members : size]
        self._group.size = size
        self._group.add(coming)
        self._announced_version = self._desk.announce(size)
        for rank in self._ranks[size:]:
            self._leave(rank, now)

    def _leave(self, rank: EngineRank, now: float) -> None:
        before = rank.supervisor.state
        rank.leave(now)
        if rank.supervisor.state is not before:  # it was between two incarnations
            self._desk.publish(rank)

    def _kill(self, rank: EngineRank, reason: str, now: float) -> None:
        if rank.rank >= self._desk.members:
            self._leave(rank, now)
        rank.kill(now, f"Engine core rank {rank.rank} (pid {rank.pid}) {reason}")

    def _reconfigure(self, action: Reconfigure) -> None:
        self._reconfigured.clear()
        message = scaling.Reconfigure(self._next_version(), action.size)
        if self._group.lockstep:
            self._group.ranks = [rank for rank in self._group.ranks if rank.rank < action.size]
            facts = self._group.renew(action.size)
            message.group, message.first_coordinator = facts.group, facts.first_coordinator
            message.step_sync_address, message.rendezvous = facts.step_sync_address, facts.rendezvous
        self._ask(action.ranks, message)

    def _ask(self, ranks: range, message: object) -> None:
        for rank in self._of(ranks):
            self._desk.tell_rank(rank, message)

    def _of(self, numbers: range) -> list[EngineRank]:
        return [self._ranks[number] for number in numbers if number < len(self._ranks)]

    def _next_version(self) -> int:
        self._version += 1
        return self._version

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
            plan.ranks(self._facts(plan)),
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
        for rank in self._ranks[size:]:
            self._next_incarnation[rank.rank] = rank.supervisor.incarnation + 1
        del self._ranks[size:]
        self._group.ranks = [rank for rank in self._group.ranks if rank.rank < size]
        self._desk.forget_above(size)
        self._plan = None
        self._quiet.clear()
        self._reconfigured.clear()
        self._drained.clear()
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
