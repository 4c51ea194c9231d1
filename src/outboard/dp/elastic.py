"""The plan of a change of size: what has to happen in which order, and the way back. Pure: no clock, no process.

    up     STARTING -> PREPARED -> CONNECTING -> [QUIESCING ->] RECONFIGURING -> ANNOUNCED -> DONE
    down   PREPARED -> ANNOUNCED -> EMPTYING -> [QUIESCING ->] RECONFIGURING -> LEAVING -> DONE
    back   any stage of the way up before ANNOUNCED -> CLEARING -> [RESTORING ->] ROLLED_BACK

What is in brackets is for ranks that step together. A change counts once the new size has been announced to the front
ends: on the way up behind all that can fail, on the way down as the first thing, since a front end may send LEAVE from
then on. Before, any fault leads back to the old size; afterwards, all faults lead on to the new one.

* *New ranks are connected before they count*: no front end waits for a connection, and one that hangs is noticed while
  there is a way back.
* *Ranks that step together rest while their group changes*, and those that leave step with it until they are empty.
* *A group that falls is not waited for*: it starts again by itself, in the old size before the announcement and in the
  new one after it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import ClassVar

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
from outboard.protocol.scaling import (
    ScaleState,
)

__all__ = ["ScalePlan"]


class _Stage(Enum):
    NEW = auto()
    STARTING = auto()
    PREPARED = auto()
    CONNECTING = auto()
    EMPTYING = auto()
    QUIESCING = auto()
    RECONFIGURING = auto()
    ANNOUNCED = auto()
    LEAVING = auto()
    CLEARING = auto()
    RESTORING = auto()
    DONE = auto()
    ROLLED_BACK = auto()


class ScalePlan:
    """One change of size. `advance` says what to do next; call it whenever facts or time have changed.

    Args:
        old_size, new_size: numbers of ranks; not the same.
        lockstep: whether ranks step together.
        timeout: seconds for the start of new ranks, and again for the commit.
        patience: seconds that ranks wait for each other: where there is no other way than that they come together, they
            get at least so long.
        drain: seconds that ranks which leave get to end their requests.
        commit: whether to go on by itself once all is ready.

    Attributes:
        reason: why it is rolled back, or what was lost on the way forward; "" where all went well.
        due: when to call `advance` although nothing has changed; None: not before something does.
    """

    def __init__(
        self,
        old_size: int,
        new_size: int,
        *,
        lockstep: bool,
        timeout: float,
        drain: float,
        patience: float = 0.0,
        commit: bool = True,
    ) -> None:
        self.old_size = old_size
        self.new_size = new_size
        self.reason = ""
        self.due: float | None = None
        self._lockstep = lockstep
        self._timeout = timeout
        self._long = max(timeout, patience)
        self._drain = drain
        self._commit = commit
        self._abort = ""
        self._stage = _Stage.NEW
        self._reconfigured = False  # whether ranks have been told of the new size
        self._quiesced = False
        self._told: frozenset[int] = frozenset()  # independent ranks that have been told of the size, and serve since
        self._late = False  # whether what is waited for has been killed already

    # --- what it is about ---

    @property
    def up(self) -> bool:
        """Whether ranks come."""
        return self.new_size > self.old_size

    @property
    def coming(self) -> range:
        """The ranks that come."""
        return range(self.old_size, self.new_size)

    @property
    def leaving(self) -> range:
        """The ranks that leave."""
        return range(self.new_size, self.old_size)

    @property
    def announced(self) -> bool:
        """Whether the new size counts: there is no way back."""
        if self.up:
            return self._stage in (_Stage.ANNOUNCED, _Stage.DONE)
        return self._stage not in (_Stage.NEW, _Stage.PREPARED, _Stage.CLEARING, _Stage.ROLLED_BACK)

    @property
    def over(self) -> bool:
        """Whether it is done, one way or the other."""
        return self._stage in (_Stage.DONE, _Stage.ROLLED_BACK)

    @property
    def rolling_back(self) -> bool:
        """Whether it is on its way back."""
        return self._stage in (_Stage.CLEARING, _Stage.RESTORING) or (bool(self._abort) and not self.announced)

    @property
    def state(self) -> ScaleState:
        """Where it is, as others are told."""
        match self._stage:
            case _Stage.NEW | _Stage.STARTING:
                return ScaleState.PREPARING
            case _Stage.PREPARED:
                return ScaleState.READY
            case _Stage.CLEARING | _Stage.RESTORING:
                return ScaleState.ROLLING_BACK
            case _Stage.DONE:
                return ScaleState.DONE
            case _Stage.ROLLED_BACK:
                return ScaleState.ROLLED_BACK
            case _Stage.ANNOUNCED:
                return ScaleState.COMMITTING
            case _:
                return ScaleState.COMMITTING if self.up else ScaleState.DRAINING

    def ranks(self, facts: Facts) -> dict[int, str]:
        """What each rank that this is about is at."""
        if self.up:
            told = {rank: "ready" if rank in facts.ready else "starting" for rank in self.coming}
            told |= {rank: "waiting for room" for rank in facts.no_room if rank in self.coming}
            if self.announced or self.rolling_back:
                told = {rank: "serving" if rank in facts.ready and self.announced else "ending" for rank in self.coming}
        else:
            told = {rank: "drained" if rank in facts.drained else "draining" for rank in self.leaving}
        told |= {rank: "ended" for rank in (*self.coming, *self.leaving) if rank in facts.ended}
        if self._stage in (_Stage.RECONFIGURING, _Stage.RESTORING):
            told |= {rank: "reconfigured" for rank in facts.reconfigured}
            told |= {rank: f"cannot be reconfigured: {why}" for rank, why in facts.refused.items()}
        return told

    # --- what others want ---

    def commit(self) -> None:
        """Go on once all is ready."""
        self._commit = True

    def abort(self, reason: str) -> None:
        """Go back, if the new size does not count yet; else nothing happens."""
        if not self.announced and not self._abort:
            self._abort = reason

    # --- its course ---

    def advance(self, facts: Facts, now: float) -> list[Action] | None:
        """What to do now; call it again after that, with fresh facts. None: nothing, until something changes."""
        before = self._stage
        if self._abort and not self.announced and not self._is_back:
            return self._go_back(self._abort, now)
        actions = self._steps[self._stage](self, facts, now)
        if actions or self._stage is not before:
            return actions
        if self.due is not None and now >= self.due:
            return self._too_late(facts, now)
        return None

    @property
    def _is_back(self) -> bool:
        return self._stage in (_Stage.CLEARING, _Stage.RESTORING, _Stage.ROLLED_BACK)

    def _enter(self, stage: _Stage, due: float | None) -> None:
        self._stage = stage
        self.due = due
        self._late = False

    def _new(self, facts: Facts, now: float) -> list[Action]:
        if self.up:
            self._enter(_Stage.STARTING, now + self._timeout)
            return [Start(self.coming)]
        self._enter(_Stage.PREPARED, None)
        return []

    def _starting(self, facts: Facts, now: float) -> list[Action]:
        if ended := facts.ended.intersection(self.coming):
            rank = min(ended)
            return self._go_back(f"rank {rank} did not get ready: {facts.deaths.get(rank, 'it ended')}", now)
        if facts.ready.issuperset(self.coming):
            self._enter(_Stage.PREPARED, None)
        return []

    def _prepared(self, facts: Facts, now: float) -> list[Action]:
        if lost := set(self.coming) - facts.ready:
            return self._lost(lost, facts, now)
        if not self._commit:
            return []
        if self.up:
            self._enter(_Stage.CONNECTING, now + self._timeout)
            return []
        self._enter(_Stage.ANNOUNCED, None)
        return [Announce(self.new_size), Drain(self.leaving)]

    def _connecting(self, facts: Facts, now: float) -> list[Action]:
        if lost := set(self.coming) - facts.ready:
            return self._lost(lost, facts, now)
        if not facts.connected:
            return []
        if not self._lockstep:
            return self._reconfigure(facts)
        if not facts.ready.issuperset(range(self.old_size)):
            return []  # its group is just being started again
        self._stage = _Stage.QUIESCING
        self._quiesced = True
        return [Quiesce(range(self.old_size))]

    def _emptying(self, facts: Facts, now: float) -> list[Action]:
        if self._lockstep and (facts.fallen or facts.ended.intersection(self.leaving)):
            return self._after_fall(now)
        empty = facts.drained | facts.ended
        if not empty.issuperset(self.leaving):
            return []
        return self._after_emptying(facts, now)

    def _after_emptying(self, facts: Facts, now: float) -> list[Action]:
        if self._lockstep:
            self._enter(_Stage.QUIESCING, now + self._long)
            self._quiesced = True
            return [Quiesce(range(self.old_size))]
        return self._let_go(facts, now)

    def _let_go(self, facts: Facts, now: float) -> list[Action]:
        """Ranks that leave end, the others hear of it."""
        self._enter(_Stage.RECONFIGURING, now + self._long)
        self._told = facts.ready.intersection(range(self.new_size))
        kills: list[Action] = [
            Kill(range(rank, rank + 1), f"was scaled away, and had not ended its requests within {self._drain:g} s")
            for rank in self.leaving
            if rank not in facts.drained | facts.ended
        ]
        return [*kills, Stop(self.leaving), Reconfigure(range(self.new_size), self.new_size)]

    def _quiescing(self, facts: Facts, now: float) -> list[Action]:
        if facts.fallen:
            return self._after_fall(now)
        if self.up and (lost := set(self.coming) - facts.ready):
            return self._lost(lost, facts, now)
        if not facts.quiet.issuperset(range(self.old_size)):
            return []
        if self.up:
            return self._reconfigure(facts)
        return self._let_go(facts, now)

    def _reconfigure(self, facts: Facts) -> list[Action]:
        self._stage = _Stage.RECONFIGURING
        self._told = facts.ready.intersection(range(self.new_size))
        self._reconfigured = True
        return [Reconfigure(range(self.new_size), self.new_size)]

    def _reconfiguring(self, facts: Facts, now: float) -> list[Action]:
        if self._lockstep and facts.fallen:
            return self._after_fall(now)
        if facts.refused:
            rank, why = next(iter(facts.refused.items()))
            return self._cannot(f"rank {rank} cannot be reconfigured: {why}", now)
        if self.up and (lost := set(self.coming) - facts.ready):
            return self._lost(lost, facts, now)
        size = self.new_size
        # An independent rank that was being started again, or has been since, needs no telling.
        self._told &= facts.ready
        waited_for = set(range(size)) if self._lockstep else self._told
        if not facts.reconfigured.issuperset(waited_for):
            return []
        if untold := set(range(size)) - waited_for:
            names = ", ".join(map(str, sorted(untold)))
            self.reason = self.reason or f"rank {names} was not ready, and so not told"
        resume: list[Action] = [Resume(range(size))] if self._lockstep else []
        if self.up:
            self._enter(_Stage.ANNOUNCED, now + self._timeout)
            return [Announce(size), *resume]
        self._enter(_Stage.LEAVING, now + self._timeout)
        return resume

    def _announced(self, facts: Facts, now: float) -> list[Action]:
        if not self.up:
            self._enter(_Stage.EMPTYING, now + self._drain)
        elif facts.acknowledged:
            self._enter(_Stage.DONE, None)
        return []

    def _leaving(self, facts: Facts, now: float) -> list[Action]:
        if not facts.ended.issuperset(self.leaving):
            return []
        self._enter(_Stage.DONE, None)
        return []

    # --- faults ---

    def _lost(self, lost: set[int], facts: Facts, now: float) -> list[Action]:
        rank = min(lost)
        return self._go_back(f"rank {rank} was ready, and is no more: {facts.deaths.get(rank, 'it has ended')}", now)

    def _go_back(self, reason: str, now: float) -> list[Action]:
        self.reason = reason
        started = self._stage is not _Stage.NEW
        self._enter(_Stage.CLEARING, now + self._timeout)
        return [Kill(self.coming, f"the change of size was taken back: {reason}")] if self.up and started else []

    def _clearing(self, facts: Facts, now: float) -> list[Action]:
        if self.up and not facts.ended.issuperset(self.coming):
            return []
        old = range(self.old_size)
        if not self._lockstep or not self._quiesced or facts.fallen:
            self._enter(_Stage.ROLLED_BACK, None)
            return []
        if self._reconfigured:
            self._enter(_Stage.RESTORING, now + self._long)
            return [Reconfigure(old, self.old_size)]
        self._enter(_Stage.ROLLED_BACK, None)
        return [Resume(old)]

    def _restoring(self, facts: Facts, now: float) -> list[Action]:
        if facts.fallen:
            self._enter(_Stage.ROLLED_BACK, None)
            return []
        if facts.refused and not self._late:
            rank, why = next(iter(facts.refused.items()))
            return self._fell_group(f"rank {rank} cannot be reconfigured: {why}")
        if not facts.reconfigured.issuperset(range(self.old_size)):
            return []
        self._enter(_Stage.ROLLED_BACK, None)
        return [Resume(range(self.old_size))]

    def _after_fall(self, now: float) -> list[Action]:
        """The group starts again, in the size that counts; so there is nothing to reconfigure."""
        if not self.announced:
            return self._go_back("a rank of the lockstep group ended", now)
        self.reason = self.reason or "a rank of the lockstep group ended, so the group is being started again"
        self._enter(_Stage.LEAVING, now + self._timeout)
        return [Kill(self.leaving, self.reason)]

    def _cannot(self, reason: str, now: float) -> list[Action]:
        if not self.announced:
            return self._go_back(reason, now)
        return self._fell_group(reason)

    def _fell_group(self, reason: str) -> list[Action]:
        """Ranks that cannot go on together are of no use; what comes then is as after any death."""
        if self._late:
            return []
        self._late = True
        self.reason = f"{self.reason}; {reason}" if self.reason else reason
        return [Kill(range(1), f"was ended, since its lockstep group cannot go on: {reason}")]

    def _too_late(self, facts: Facts, now: float) -> list[Action]:
        """What was waited for has not happened."""
        self.due = None
        seconds = f"within {self._timeout:g} s"
        match self._stage:
            case _Stage.STARTING:
                late = ", ".join(map(str, sorted(set(self.coming) - facts.ready)))
                reasons = [reason for rank, reason in facts.no_room.items() if rank in self.coming]
                return self._go_back("; ".join([f"rank {late} was not ready {seconds}", *reasons]), now)
            case _Stage.CONNECTING | _Stage.QUIESCING | _Stage.RECONFIGURING if self.up:
                return self._go_back(f"the commit was not over {seconds}: {self._awaited(facts)}", now)
            case _Stage.EMPTYING:
                return self._cut(facts, now)
            case _Stage.QUIESCING | _Stage.RECONFIGURING | _Stage.RESTORING if self._lockstep:
                return self._fell_group(f"it was not reconfigured within {self._long:g} s: {self._awaited(facts)}")
            case _Stage.RECONFIGURING:
                self.reason = f"not told of the new size within {self._long:g} s: {self._awaited(facts)}"
                self._enter(_Stage.LEAVING, now + self._timeout)
                return []
            case _Stage.ANNOUNCED:
                self.reason = f"not acknowledged {seconds} by {facts.waiting_for}"
                self._enter(_Stage.DONE, None)
                return []
            case _Stage.LEAVING | _Stage.CLEARING:
                return [Kill(self.leaving or self.coming, "it did not end")]
        return []

    def _cut(self, facts: Facts, now: float) -> list[Action]:
        left = [rank for rank in self.leaving if rank not in facts.drained | facts.ended]
        names = ", ".join(map(str, left))
        self.reason = f"rank {names} had not ended its requests within {self._drain:g} s"
        return self._after_emptying(facts, now)

    def _awaited(self, facts: Facts) -> str:
        if self._stage is _Stage.CONNECTING:
            return facts.waiting_for or "the lockstep group is being started again"
        said = facts.quiet if self._stage is _Stage.QUIESCING else facts.reconfigured
        size = self.old_size if self._stage in (_Stage.QUIESCING, _Stage.RESTORING) else self.new_size
        return f"nothing from rank {', '.join(map(str, sorted(set(range(size)) - said)))}"

    _steps: ClassVar[dict[_Stage, Callable[[ScalePlan, Facts, float], list[Action]]]] = {
        _Stage.NEW: _new,
        _Stage.STARTING: _starting,
        _Stage.PREPARED: _prepared,
        _Stage.CONNECTING: _connecting,
        _Stage.EMPTYING: _emptying,
        _Stage.QUIESCING: _quiescing,
        _Stage.RECONFIGURING: _reconfiguring,
        _Stage.ANNOUNCED: _announced,
        _Stage.LEAVING: _leaving,
        _Stage.CLEARING: _clearing,
        _Stage.RESTORING: _restoring,
        _Stage.DONE: lambda self, facts, now: [],
        _Stage.ROLLED_BACK: lambda self, facts, now: [],
    }
