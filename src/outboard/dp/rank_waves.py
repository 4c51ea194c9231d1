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
    Reports go to the coordinator, in order, *before* anything that may block. A reduction may block; one that does not
    lets messages be taken meanwhile. A rank of a restarted group gets a new object.

    Args:
        rank, size: this rank, and how many there are.
        group: incarnation of the group.
        coordinator: incarnation of the coordinator that there was when the group was launched.
        sync_interval: steps from one reduction to the next. A wave lasts up to so many steps longer than its work.

    Attributes:
        phase, wave: as in `RankReport`.
        control: the last pause or resume that this rank knows of.
        steps: steps taken in this wave.
    """

    def __init__(self, rank: int, size: int, *, group: int = 0, coordinator: int = 0, sync_interval: int = 32) -> None:
        if sync_interval < 1:
            raise ValueError(f"sync_interval must be at least 1, not {sync_interval}")
        self.rank = rank
        self.size = size
        self.group = group
        self.phase = Phase.IDLE
        self.wave = 0
        self.control = 0
        self.steps = 0
        self._coordinator = coordinator
        self._interval = sync_interval
        self._until_sync = 0
        self._woken = -1  # the last wave that the coordinator told to start

    @property
    def paused(self) -> bool:
        """Whether this rank knows of a pause. While it is awake, the next reduction decides."""
        return is_paused(self.control)

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
        if message.wave > self.wave + (self.phase is not Phase.IDLE):
            where = f"rank {self.rank}, {self.phase.name} in wave {self.wave},"
            raise ProtocolError(f"{where} is to start wave {message.wave}")
        self._woken = max(self._woken, message.wave)
        return self.update(False)

    def set_control(self, message: SetControl, has_work: bool) -> RankReport | None:
        """A `SetControl` came. Returns the report that answers it; a resume wakes a rank that has work."""
        if message.group != self.group:
            return None
        self.control = max(self.control, message.control)
        self._wake(has_work)
        return self.report()

    def vote(self, has_work: bool) -> Vote:
        """What to put into the reduction."""
        return Vote(has_work, self.control)

    def reduced(self, result: Vote, has_work: bool) -> RankReport | None:
        """A reduction is complete. Whether the wave is over follows from its result alone.

        Returns:
            The report to send if the wave is over; this rank may be awake in the next one by then.
        """
        self.control = max(self.control, result.control)
        if result.work and not is_paused(result.control):
            self.phase = Phase.RUNNING
            self._until_sync = self._interval
            return None
        self.phase = Phase.IDLE
        self.wave += 1
        self._wake(has_work)
        return self.report()

    def stepped(self) -> None:
        """A step has been taken, a real one or a dummy."""
        self.steps += 1
        self._until_sync -= 1

    def _wake(self, has_work: bool) -> bool:
        if self.phase is not Phase.IDLE or not (self._woken == self.wave or (has_work and not self.paused)):
            return False
        self.phase = Phase.OPENING
        self.steps = 0
        return True
