"""The front end's side of waves (waves.py): saying early that a resting group has been sent a request."""

from __future__ import annotations

from math import inf

from outboard.dp.waves import FirstRequest, WaveState

__all__ = ["ClientWaves"]


class ClientWaves:
    """What a front end knows of the group's wave.

    A request to a group that rests comes with a notice to the coordinator, so that the other ranks wake while the one
    with the request does. Nothing depends on it but time: a rank with work says so itself. The notice repeats until
    that wave is seen running, is over, or cannot run.

    Args:
        repeat_after: seconds from one notice to the next.

    Attributes:
        group: incarnation of the group; -1: nothing heard yet.
        current_wave, engines_running, paused: as last published.
        next_due: when to ask `due` again; infinite: not before the next call of something else.
    """

    def __init__(self, repeat_after: float = 0.25) -> None:
        self.group = -1
        self.current_wave = 0
        self.engines_running = False
        self.paused = False
        self.next_due = inf
        self._repeat_after = repeat_after
        self._version = (-1, -1)

    def request_sent(self, now: float) -> FirstRequest | None:
        """A request is being sent to some rank. Returns the notice to send, if one is called for."""
        if self.engines_running or self.paused or self.group < 0 or self.next_due < inf:
            return None
        return self._notice(now)

    def due(self, now: float) -> FirstRequest | None:
        """The notice to repeat, if it is time."""
        return self._notice(now) if now >= self.next_due else None

    def published(self, version: tuple[int, int], state: WaveState) -> None:
        """The coordinator published a state.

        Args:
            version: incarnation of the coordinator, and its count of publications. Late and repeated ones are void.
        """
        if version <= self._version or state.group < self.group:
            return
        self._version = version
        moved = (state.group, state.wave) != (self.group, self.current_wave)
        self.group = state.group
        self.current_wave = state.wave
        self.engines_running = state.running
        self.paused = state.paused
        if moved or state.running or state.paused:
            self.next_due = inf

    def _notice(self, now: float) -> FirstRequest:
        self.next_due = now + self._repeat_after
        return FirstRequest(self.group, self.current_wave)
