"""Which rank gets a request: what a client's membership asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outboard.dp.balancing import BalancingPolicy
from outboard.dp.coordinator_state import Publication
from outboard.dp.load import LoadTable
from outboard.protocol.messages import EngineCoreRequest

__all__ = ["Balanced", "OneRank", "Routing"]


class Routing(Protocol):
    """Chooses among the ranks that can be used."""

    def set_available(self, ranks: Sequence[int]) -> None:
        """Which ranks can be used from now on."""

    def forget(self, rank: int, incarnation: int) -> None:
        """This incarnation of a rank ended; what comes in its place starts afresh."""

    def published(self, publication: Publication) -> object:
        """A coordinator published loads."""

    def choose(self, request: EngineCoreRequest) -> int | None:
        """The rank for a request; None: none can be used."""
        ...


class OneRank:
    """There is one rank to choose from."""

    def __init__(self) -> None:
        self._rank: int | None = None

    def set_available(self, ranks: Sequence[int]) -> None:
        self._rank = ranks[0] if ranks else None

    def forget(self, rank: int, incarnation: int) -> None:
        pass

    def published(self, publication: Publication) -> None:
        pass

    def choose(self, request: EngineCoreRequest) -> int | None:
        return self._rank


class Balanced:
    """A policy chooses, by a load table.

    Args:
        table: is told by the pending table of all that is sent and ends.
        policy: chooses.
    """

    def __init__(self, table: LoadTable, policy: BalancingPolicy) -> None:
        self.table = table
        self.policy = policy

    def set_available(self, ranks: Sequence[int]) -> None:
        self.table.set_available(ranks)

    def forget(self, rank: int, incarnation: int) -> None:
        self.table.forget(rank, incarnation)
        forget = getattr(self.policy, "forget", None)  # of a policy that remembers what ranks have in their caches
        if forget is not None:
            forget(rank)

    def published(self, publication: Publication) -> None:
        self.table.published(publication)

    def choose(self, request: EngineCoreRequest) -> int | None:
        return self.policy.choose(self.table, request) if self.table.ranks else None
