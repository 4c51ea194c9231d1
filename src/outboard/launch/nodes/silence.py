"""For how long a peer has been silent, as far as whoever waits for it was there to listen. Pure."""

from __future__ import annotations

__all__ = ["Silence"]


class Silence:
    """Counts only time in which we listened.

    A process that was stopped for a minute, or a machine that was asleep, must not take its peers for lost: what they
    have said meanwhile is just about to be read. All times are seconds of one monotonic clock.

    Args:
        patience: how long the peer may be silent.
        interval: how often `listened` is called at least; what goes beyond twice that was no listening.
        now: when the peer was heard last.

    Attributes:
        seconds: for how long it has been silent.
    """

    def __init__(self, patience: float, interval: float, now: float) -> None:
        self._patience = patience
        self._longest = 2 * interval
        self._listened_at = now
        self.seconds = 0.0

    def heard(self) -> None:
        """It has said something."""
        self.seconds = 0.0

    def listened(self, now: float) -> bool:
        """All that it had said has been taken. Returns whether it has been silent for too long."""
        self.seconds += min(now - self._listened_at, self._longest)
        self._listened_at = now
        return self.seconds >= self._patience
