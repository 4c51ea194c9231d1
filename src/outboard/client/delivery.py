"""Where a client's messages go: the part of it that all its engine cores share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from outboard.errors import EngineDeadError, OutboardError
from outboard.protocol.messages import EngineCoreOutputs, OutputExtras

__all__ = ["Delivery", "FailedOutputs"]


class FailedOutputs(EngineCoreOutputs):
    """Made by the client, never received: these requests have ended because of `cause`; others go on.

    Attributes:
        cause: what happened; whoever raises it makes a copy of his own.
    """

    cause: OutboardError | None = None

    @classmethod
    def of(cls, rank: int, handles: Sequence[int], ids: Sequence[str | None], cause: OutboardError) -> FailedOutputs:
        """All of these requests, finished with "error"."""
        text = str(cause.args[0]) if cause.args else type(cause).__name__
        positions = range(len(handles))
        return cls(
            rank,
            0,
            0,
            time.monotonic(),
            list(handles),
            counts=[0] * len(handles),
            finished=[(position, "error", None) for position in positions],
            extras=OutputExtras(errors=dict.fromkeys(positions, text)),
            request_ids=list(ids),
            cause=cause,
        )


class Delivery(ABC):
    """Gets every message with outputs or scheduler stats, in order, and the end."""

    @property
    def needs_ids(self) -> bool:
        """Whether whoever gets the messages will ask for the user's request ids."""
        return True

    @abstractmethod
    def deliver(self, message: EngineCoreOutputs) -> None:
        """Hands on a message."""

    @abstractmethod
    def end(self, cause: EngineDeadError) -> None:
        """Tells whoever waits for messages that there will be no more. Called once."""

    def can_tell(self) -> bool:
        """Whether anybody may be waiting."""
        return True

    def notify(self, payload: tuple[str, int]) -> bool:
        """Takes a notification of elastic scaling; False if there is nobody to take it."""
        return False
