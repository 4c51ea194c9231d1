"""The coordinator's side of waves (waves.py): wakes ranks that rest while another does not, pauses, resumes."""

from __future__ import annotations

from outboard.dp.waves import (
    FirstRequest,
    Phase,
    RankReport,
    SetControl,
    StartWave,
    WaveState,
    is_paused,
    make_control,
)

__all__ = ["ToRank", "WaveCoordinator"]

# A message, and the rank that it is for.
ToRank = tuple[int, StartWave | SetControl]


class WaveCoordinator:
    """What a coordinator knows of a lockstep group. Every method returns the messages to send, in order.

    It learns of a group, of its size and of who can be reached by the ranks' reports. It sends nothing to a rank that
    it has not heard of: there may be no connection yet.

    Args:
        incarnation: how often the coordinator has been started before.
    """

    def __init__(self, incarnation: int = 0) -> None:
        self.incarnation = incarnation
        self._group = -1
        self._size = 0
        self._reports: dict[int, RankReport] = {}
        self._wave = 0  # the greatest that a rank reported
        self._started = False  # ranks that rest before that wave are to join it
        self._told: set[int] = set()  # ranks that were sent its StartWave
        self._control = 0
        self._commanded: dict[int, int] = {}  # the last command that a rank was sent
        self._numbers = 0  # pauses and resumes so far

    @property
    def group(self) -> int:
        """Incarnation of the group; -1: none has reported."""
        return self._group

    @property
    def state(self) -> WaveState | None:
        """What to publish; None until every rank has reported: a coordinator does not speak before it knows."""
        if not self._size or len(self._reports) < self._size:
            return None
        running = any(r.wave == self._wave and r.phase is not Phase.IDLE for r in self._reports.values())
        return WaveState(self._group, self._wave, running, is_paused(self._control))

    @property
    def control(self) -> int:
        """The last pause or resume that is known; 0: there was none."""
        return self._control

    @property
    def paused(self) -> bool:
        """Whether the last command was to pause."""
        return is_paused(self._control)

    @property
    def pause_complete(self) -> bool:
        """Whether every rank has said that it rests and knows of the pause: no step is taken until `resume`.

        A rank that was sent a `StartWave` before the pause takes it first, and is in a later wave when it says so.
        """
        return (
            self.paused
            and 0 < self._size == len(self._reports)
            and all(
                (r.wave, r.phase, r.control) == (self._wave, Phase.IDLE, self._control) for r in self._reports.values()
            )
        )

    def report(self, report: RankReport) -> list[ToRank]:
        """A rank said where it is."""
        if report.group < self._group:
            return []
        if report.group > self._group:
            self._group = report.group
            self._size = report.size
            self._reports.clear()
            self._commanded.clear()
            self._move_to(0)
        self._reports[report.rank] = report
        if report.wave > self._wave:
            self._move_to(report.wave)
        self._control = max(self._control, report.control)
        messages = self._spread_control()
        if report.wave == self._wave:
            # A rank that this coordinator has not heard of may have woken, and told its predecessor only.
            unheard = report.first_coordinator != self.incarnation and len(self._reports) < self._size
            self._started |= unheard or report.phase is not Phase.IDLE
        return messages + self._start_ranks()

    def first_request(self, notice: FirstRequest) -> list[ToRank]:
        """A front end has sent a request to a group that it believes to rest."""
        if (notice.group, notice.wave) != (self._group, self._wave) or self.paused:
            return []
        self._started = True
        return self._start_ranks()

    def pause(self) -> list[ToRank]:
        """Pauses the group at a common step; see `pause_complete`. Holds until `resume`, over a group's restart too."""
        return self._command(True)

    def resume(self) -> list[ToRank]:
        """Ends a pause."""
        return self._command(False)

    def _command(self, paused: bool) -> list[ToRank]:
        self._numbers += 1
        self._control = make_control(self.incarnation, self._numbers, paused)
        return self._spread_control()

    def _move_to(self, wave: int) -> None:
        self._wave = wave
        self._started = False
        self._told.clear()

    def _spread_control(self) -> list[ToRank]:
        """Tells the last command to all that may not know it, whoever gave it.

        Each rank that has reported is told once, if only that there is none: no work of its own wakes it before.
        """
        messages: list[ToRank] = []
        for rank, report in self._reports.items():
            if max(report.control, self._commanded.get(rank, 0)) < self._control or rank not in self._commanded:
                self._commanded[rank] = self._control
                messages.append((rank, SetControl(self._group, self._control)))
        return messages

    def _start_ranks(self) -> list[ToRank]:
        if not self._started:
            return []
        awake = {r.rank for r in self._reports.values() if r.wave == self._wave and r.phase is not Phase.IDLE}
        ranks = self._reports.keys() - awake - self._told
        self._told |= ranks
        return [(rank, StartWave(self._group, self._wave)) for rank in sorted(ranks)]
