"""What comes through the busy loop's queue, beside messages, which are tuples: (epoch of the client, items).

The coordinator's `StartWave` and `SetControl` come as they are.

An item is a decoded message, one of `BadRequest` and `BadCall`, or None for one that was dropped: it is only counted.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from outboard.engine.load_reports import Mouth
from outboard.engine.outgoing import OutputPort

__all__ = [
    "BadCall",
    "BadRequest",
    "ClientJoined",
    "ClientLeft",
    "CoordinatorJoined",
    "DeferredResult",
    "Stop",
    "Writable",
]


@dataclass(slots=True, frozen=True)
class BadRequest:
    """An item: an ADD that was told apart by its handle but is no valid request."""

    handle: int
    reason: str


@dataclass(slots=True, frozen=True)
class BadCall:
    """An item: a UTILITY that was told apart by its call id but is no valid call."""

    call_id: int
    reason: str


@dataclass(slots=True, frozen=True)
class ClientJoined:
    """A front end is to be served; its messages come behind this. The port is the busy loop's from now on."""

    epoch: int
    slot: int
    port: OutputPort
    client_index: int = 0


@dataclass(slots=True, frozen=True)
class ClientLeft:
    """A front end is gone. One that never joined is no error."""

    epoch: int


@dataclass(slots=True, frozen=True)
class CoordinatorJoined:
    """There is a coordinator, or another one, that listens. The mouth is the busy loop's from now on."""

    mouth: Mouth


@dataclass(slots=True, frozen=True)
class DeferredResult:
    """The future that a utility method returned is done."""

    epoch: int
    call_id: int
    future: Future[Any]


@dataclass(slots=True, frozen=True)
class Stop:
    """Abort everything and end."""


@dataclass(slots=True, frozen=True)
class Writable:
    """A front end that took no more may take more now."""
