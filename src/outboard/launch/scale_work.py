"""What a change of the number of ranks does to them, and what it hears of them; the plan (dp/elastic.py) decides."""

from __future__ import annotations

from collections.abc import Callable

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
from outboard.launch.coordinator import CoordinatorKeeper
from outboard.launch.desk import ControlDesk
from outboard.launch.lockstep import LockstepGroup
from outboard.launch.rank import EngineRank
from outboard.protocol import scaling
from outboard.protocol.control import EngineState
from outboard.protocol.scaling import Drained, DrainRank, Quiet, Reconfigured, ResumeRank

__all__ = ["ScaleWork"]

_ENDED = (EngineState.DEAD, EngineState.STOPPED)


class ScaleWork:
    """Of one change after the other. Belongs to the launcher's thread. Arguments as of `Scaler`."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: list[EngineRank],
        group: LockstepGroup,
        coordinator: CoordinatorKeeper,
        desk: ControlDesk,
        make_rank: Callable[[int, int, int], EngineRank],
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._group = group
        self._coordinator = coordinator
        self._desk = desk
        self._make_rank = make_rank
        self._under_way = False  # whether there is a change
        self._next_incarnation: dict[int, int] = {}  # of ranks that have left
        self._version = 0  # of what ranks were asked last
        self._drain_version = 0
        self._announced_version = 0
        self._falls = 0
        self._quiet: set[int] = set()
        self._reconfigured: dict[int, str] = {}  # rank -> "", or why not
        self._drained: set[int] = set()
        desk.handle(Quiet, self._on_quiet)
        desk.handle(Reconfigured, self._on_reconfigured)
        desk.handle(Drained, self._on_drained)

    def end(self, size: int) -> None:
        """The change is over: ranks from this on have gone."""
        for rank in self._ranks[size:]:
            self._next_incarnation[rank.rank] = rank.supervisor.incarnation + 1
        del self._ranks[size:]
        self._group.ranks = [rank for rank in self._group.ranks if rank.rank < size]
        self._desk.forget_above(size)
        self._under_way = False
        self._quiet.clear()
        self._reconfigured.clear()
        self._drained.clear()

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
        return known and self._under_way and answer.version == version

    # --- how things stand ---

    def facts(self, plan: ScalePlan) -> Facts:
        """What the plan goes by."""
        self._under_way = True
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

    def do(self, action: Action, now: float) -> None:
        """Does what the plan says. Does not wait."""
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
