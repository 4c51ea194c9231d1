"""How often an engine core, or a group of them that restarts as one, may be started again. Pure."""

from __future__ import annotations

from collections import deque

from outboard.config import RestartPolicy

__all__ = ["RestartBudget"]


class RestartBudget:
    """Counts restarts within the policy's window. All times are seconds of one monotonic clock.

    Args:
        policy: how many, and after what pauses.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._restarts: deque[float] = deque()  # when, within the policy's window
        self._decided = -1  # the last incarnation whose end was decided upon
        self._restart_at: float | None = None

    def take(self, now: float, incarnation: int) -> float | None:
        """When to start again what ended in this incarnation; None: not at all.

        Ranks that share a budget ask one after the other; all get the same answer, and it counts once.
        """
        if incarnation != self._decided:
            self._decided = incarnation
            self._restart_at = self._decide(now)
        return self._restart_at

    def _decide(self, now: float) -> float | None:
        policy, restarts = self._policy, self._restarts
        while restarts and restarts[0] <= now - policy.window:
            restarts.popleft()
        if len(restarts) >= policy.max_restarts:
            return None
        # Capped before it is raised to a power: many restarts must not overflow a float.
        pause = min(policy.backoff * 2.0 ** min(len(restarts), 32), policy.max_backoff)
        restarts.append(now)
        return now + pause
