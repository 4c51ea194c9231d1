"""What a rank needs of its process, wherever that runs, and of whoever starts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from outboard.errors import EngineDeadError
from outboard.protocol.messages import Ready

__all__ = ["NoRoom", "RankProcess", "RankStarter"]

_E = TypeVar("_E", bound=EngineDeadError)


class NoRoom(Exception):
    """There is no place for this rank now; there may be one later. The text says what is missing."""


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
    """Starts the processes of ranks."""

    def start(self, rank: int, incarnation: int, env: Mapping[str, str]) -> RankProcess:
        """Starts an incarnation of a rank, with these environment variables of its own.

        Raises:
            NoRoom: there is no place for it now.
            OSError: no process is to be had.
        """
