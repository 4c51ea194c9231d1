"""What a rank needs of its process, wherever that runs, and of whoever starts it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeVar

from outboard.errors import EngineDeadError, EngineStartupError
from outboard.protocol.messages import Ready

__all__ = ["NoRoom", "RankProcess", "RankStarter", "Unplaceable"]

_E = TypeVar("_E", bound=EngineDeadError)


class NoRoom(Exception):
    """There is no place for this rank now; there may be one later. The text says what is missing.

    Args:
        reason: the text.
        on_its_way: whether one is being made, so that nobody needs to be told.
    """

    def __init__(self, reason: str, *, on_its_way: bool = False) -> None:
        super().__init__(reason)
        self.on_its_way = on_its_way


class Unplaceable(Exception):
    """There will be no place for this incarnation. The text says why.

    Args:
        reason: the text.
        error: what to raise where it was to be the first.
    """

    def __init__(self, reason: str, error: type[EngineStartupError] = EngineStartupError) -> None:
        super().__init__(reason)
        self.error = error


class RankProcess(Protocol):
    """The process of one incarnation of a rank: `EngineProcess` here, `RemoteProcess` on a node."""

    @property
    def node(self) -> str:
        """Name of the node where it runs; "": this host."""

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once all is over, or the node is lost. -1 after `close`."""

    def identify(self, pid: int, pgid: int) -> None:
        """Note what the engine core says of itself in its HELLO."""

    def watch(self, pid: int, ready: Ready) -> None:
        """It is ready: have its progress told, where front ends cannot see it by themselves."""

    def terminate(self) -> None:
        """Ask for a clean stop. Does not wait."""

    def kill(self) -> None:
        """Have all of it killed. Does not wait."""

    def end(self, timeout: float) -> int:
        """Kill it, and wait `timeout` seconds and a bit at most; what has not ended then is given up."""

    def close(self) -> None:
        """Release the descriptors."""

    def release(self) -> None:
        """As `kill`, for finalizers: takes no lock, does nothing that another thread might be at."""

    def abandon(self) -> None:
        """Have all ended and released in the background."""

    def death(self, phase: str, cls: type[_E], reason: str | None = None, **facts: Any) -> _E:
        """The error that says how it ended; see `EngineProcess.death`."""


class RankStarter(Protocol):
    """Starts the processes of ranks.

    Attributes:
        fd: readable when `start` may have another answer than before; -1: nothing tells that.
    """

    fd: int = -1

    def start(self, rank: int, incarnation: int, env: Mapping[str, str]) -> RankProcess:
        """Starts an incarnation of a rank, with these environment variables of its own.

        Raises:
            NoRoom: there is no place for it now.
            Unplaceable: there will be none.
            OSError: no process is to be had.
        """

    def look(self, ranks: Collection[int]) -> None:
        """To be called in every turn of the launcher: these ranks run, or are to. What others had is given back."""
        return

    def close(self) -> None:
        """Gives all back. Bounded. Idempotent."""
        return
