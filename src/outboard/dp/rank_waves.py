"""The engine's side of waves (waves.py): what one rank of a lockstep group does next."""

from __future__ import annotations

from enum import Enum, auto

from outboard.dp.waves import Phase, RankReport, SetControl, StartWave, Vote, is_paused
from outboard.errors import ProtocolError

__all__ = ["Next", "RankWaves"]


class Next(Enum):
    """What a rank is to do next."""

    REST = auto()
    REDUCE = auto()
    STEP = auto()


class RankWaves:
    """State of one rank of a lockstep group. A busy loop drives it like this:

        take what has come: `start`, `set_control`, ...; wait for it if `waves.next` is REST
        send(waves.update(engine.has_work()))
        match waves.next:
            REDUCE: send(waves.reduced(reduce(waves.vote(engine.has_work())), engine.has_work()))
            STEP:   engine.step(...) or engine.execute_dummy_batch(); waves.stepped()

    The first thing that it sends is `report()`, before it takes a request; and that again to each new coordinator.
    Before the coordinator has answered no work wakes it, and awake for another reason it asks for no step: a pause
    outlives the group, and it may not know of one.
    Reports go to the coordinator, in order, *before* anything that may block. A reduction may block; one that does not
    lets messages be taken meanwhile. A rank of a restarted group gets a new object, as does one whose group has changed
    its size: that begins at rest.

    Args:
        rank, size: this rank, and how many there are.
        group: incarnation of the group.
        coordinator: incarnation of the coordinator that there was when the group was launched.
        sync_interval: steps from one reduction to the next. A wave lasts up to so many steps longer than its work.
        control: the last pause or resume that this rank knows of: a pause outlives the group.
        at_rest: whether it is to wait for `release`.

    Attributes:
        phase, wave: as in `RankReport`.
        control: the last pause or resume that this rank knows of.
        steps: steps taken in this wave.
        told_to_rest: version of the change of size for which this rank was told to rest; 0: none.
        at_rest: whether all ranks have agreed to rest: nothing wakes this one before `release`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        group: int = 0,
        coordinator: int = 0,
        sync_interval: int = 32,
        control: int = 0,
        at_rest: bool = False,
    ) -> None:
        if sync_interval < 1:
            raise ValueError(f"sync_interval must be at least 1, not {sync_interval}")
        self.rank = rank
        self.size = size
        self.group = group
        self.phase = Phase.IDLE
        self.wave = 0
        self.control = control
        self.steps = 0
        self.told_to_rest = 0
        self.at_rest = at_rest
        self._coordinator = coordinator
        self._interval = sync_interval
        self._until_sync = 0
        self._informed = False  # whether a coordinator has told it of the last pause or resume, or that there is none
        self._woken = -1  # the last wave that it is to join, whatever it has to do

    @property
    def paused(self) -> bool:
        """Whether this rank knows of a pause. While it is awake, the next reduction decides."""
        return is_paused(self.control)

    @property
    def _next_wave(self) -> int:
        """The wave that it can be woken for."""
        return self.wave + (self.phase is not Phase.IDLE)

    @property
    def next(self) -> Next:
        """What to do now."""
        if self.phase is Phase.IDLE:
            return Next.REST
        return Next.STEP if self._until_sync else Next.REDUCE

    def report(self) -> RankReport:
        """Where this rank is; for a coordinator that it has not reported to yet."""
        return RankReport(self.group, self._coordinator, self.size, self.rank, self.wave, self.phase, self.control)

    def update(self, has_work: bool) -> RankReport | None:
        """Wakes this rank if it has to; for whenever its work may have changed. Returns the report of that."""
        return self.report() if self._wake(has_work) else None

    def start(self, message: StartWave) -> RankReport | None:
        """A `StartWave` came. Returns the report to send if it woke this rank.

        Raises:
            ProtocolError: the group is in a wave that this rank was not asked to join: it can not catch up.
        """
        if message.group != self.group:
            return None
        if message.wave > self._next_wave:
            where = f"rank {self.rank}, {self.phase.name} in wave {self.wave},"
            raise ProtocolError(f"{where} is to start wave {message.wave}")
        self._woken = max(self._woken, message.wave)
        return self.update(False)

    def set_control(self, message: SetControl, has_work: bool) -> RankReport | None:
        """A `SetControl` came. Returns the report that answers it; a resume wakes a rank that has work."""
        if message.group != self.group:
            return None
        self.control = max(self.control, message.control)
        self._informed = True
        self._wake(has_work)
        return self.report()

    def rest(self, version: int) -> RankReport | None:
        """The group is to rest for this change of its size; `at_rest` tells when it does, whether it is paused or not.

        This rank wakes, once: the last one that is told finds all others of its mind. Returns the report of that.
        """
        self.told_to_rest = version
        self._woken = max(self._woken, self._next_wave)
        return self.update(False)

    def release(self, has_work: bool) -> RankReport | None:
        """Ends a rest, or takes the wish for it back. Returns the report to send if this rank woke."""
        self.told_to_rest = 0
        self.at_rest = False
        return self.update(has_work)

    def vote(self, has_work: bool) -> Vote:
        """What to put into the reduction."""
        return Vote(has_work and self._informed, self.control, self.told_to_rest)

    def reduced(self, result: Vote, has_work: bool) -> RankReport | None:
        """A reduction is complete. Whether the wave is over follows from its result alone.

        Returns:
            The report to send if the wave is over; this rank may be awake in the next one by then.
        """
        self.control = max(self.control, result.control)
        if result.work and not is_paused(result.control) and not result.rest:
            self.phase = Phase.RUNNING
            self._until_sync = self._interval
            return None
        self.phase = Phase.IDLE
        self.wave += 1
        # It may have been let go since it voted, where a reduction does not block.
        self.at_rest = 0 < result.rest == self.told_to_rest
        self._wake(has_work)
        return self.report()

    def stepped(self) -> None:
        """A step has been taken, a real one or a dummy."""
        self.steps += 1
        self._until_sync -= 1

    def _wake(self, has_work: bool) -> bool:
        if self.phase is not Phase.IDLE or self.at_rest:
            return False
        if self._woken != self.wave and (not self._informed or self.paused or not has_work):
            return False
        self.phase = Phase.OPENING
        self.steps = 0
        return True
