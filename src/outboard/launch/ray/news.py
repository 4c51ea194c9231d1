"""What the thread that speaks with Ray tells the launcher's of places, which are told apart by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["PlaceLost", "PlaceMade", "PlaceNews", "PlacePending"]


@dataclass(frozen=True, slots=True)
class PlaceMade:
    """Ray has room: a node of this name can be started there."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class PlacePending:
    """There is no room yet, and why."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class PlaceLost:
    """The place is gone, and its node with it: it "has died", say; in one word as in `EngineDeadError.lost`."""

    number: int
    what: str
    word: str = "actor"


PlaceNews: TypeAlias = PlaceMade | PlacePending | PlaceLost
