"""What a plan of a change of size (elastic.py) looks at, and what it has done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Action", "Announce", "Drain", "Facts", "Kill", "Quiesce", "Reconfigure", "Resume", "Start", "Stop"]


@dataclass(frozen=True, slots=True)
class Start:
    """Start these ranks; they load, and meet nobody yet."""

    ranks: range


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell all front ends, and the coordinator, that there are so many ranks now."""

    size: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Have these ranks say when they are empty."""

    ranks: range


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Have these ranks come to rest together."""

    ranks: range


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Tell these ranks of their group's size."""

    ranks: range
    size: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Let these ranks step again."""

    ranks: range


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask these ranks to end: they have nothing left to do."""

    ranks: range


@dataclass(frozen=True, slots=True)
class Kill:
    """End these ranks at once. None of them is started again, unless it is one of `size`."""

    ranks: range
    reason: str


Action: TypeAlias = "Start | Announce | Drain | Quiesce | Reconfigure | Resume | Stop | Kill"


@dataclass(frozen=True, slots=True)
class Facts:
    """How things stand. Answers count only where they are to what was asked last.

    Attributes:
        ready: ranks that serve.
        ended: ranks that have no process, and will get none, or have not been started.
        connected: whether every front end is attached to every new rank, and the coordinator, if wanted, is there.
        acknowledged: whether every front end and the coordinator have taken note of what was announced.
        fallen: whether the lockstep group has fallen since it was last asked for something.
        deaths: why ranks have ended.
        quiet, drained, reconfigured: ranks that have said so.
        refused: what ranks said that cannot be reconfigured.
        waiting_for: who has not connected or acknowledged, for people.
        no_room: why ranks that are to start have not been started yet.
    """

    ready: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()
    connected: bool = True
    acknowledged: bool = True
    fallen: bool = False
    deaths: Mapping[int, str] = field(default_factory=dict)
    quiet: frozenset[int] = frozenset()
    drained: frozenset[int] = frozenset()
    reconfigured: frozenset[int] = frozenset()
    refused: Mapping[int, str] = field(default_factory=dict)
    waiting_for: str = ""
    no_room: Mapping[int, str] = field(default_factory=dict)
