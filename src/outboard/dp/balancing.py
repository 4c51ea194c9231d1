"""Which rank gets a request. Policies choose by the estimates of a `LoadTable`; any object with `choose` is one.

    policy = make_policy("least_loaded")
    rank = policy.choose(table, request)
    table.sent(rank)

`least_loaded` is what fits nearly always. `prefix_affine` fits prompts that share long beginnings, `power_of_two`
many ranks with late news, `round_robin` requests that are all alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Protocol

from outboard.dp.load import LoadTable
from outboard.errors import ConfigError
from outboard.protocol.messages import EngineCoreRequest

__all__ = [
    "POLICIES",
    "BalancingPolicy",
    "LeastLoaded",
    "PowerOfTwo",
    "PrefixAffine",
    "RoundRobin",
    "make_policy",
]


class BalancingPolicy(Protocol):
    """Chooses ranks. One object serves one front end and may keep state; it does no IO and does not wait."""

    def choose(self, table: LoadTable, request: EngineCoreRequest) -> int:
        """One of `table.ranks`.

        Raises:
            LookupError: there is none.
        """
        ...


class LeastLoaded:
    """The rank with the least estimate. Ties rotate, beginning at another rank in each front end.

    Front ends that hear the same news at the same time would all send their next request to the same rank, so none
    of them makes anything of differences below `client_count`: among ranks that are so close it takes the one with the
    fewest requests of its own.
    """

    __slots__ = ("_start",)

    def __init__(self) -> None:
        self._start = -1

    def choose(self, table: LoadTable, request: EngineCoreRequest) -> int:
        loads = table.loads
        start = self._start
        if not 0 <= start < len(loads):
            start = table.client_index * _count(table) // table.client_count
        least = min(loads)
        if table.client_count > 1:
            limit = least + table.client_count
            loads = [own if load < limit else inf for load, own in zip(loads, table.own, strict=True)]
            least = min(loads)
        try:
            position = loads.index(least, start)
        except ValueError:
            position = loads.index(least)
        self._start = position + 1 if position + 1 < len(loads) else 0
        return table.ranks[position]


class RoundRobin:
    """One rank after the other, whatever their load. Begins at another rank in each front end."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = -1

    def choose(self, table: LoadTable, request: EngineCoreRequest) -> int:
        count = _count(table)
        position = self._next
        if not 0 <= position < count:
            position = table.client_index * count // table.client_count if position < 0 else 0
        self._next = position + 1
        return table.ranks[position]


class PowerOfTwo:
    """The less loaded of two ranks drawn at random: front ends with the same late news do not all choose the same.

    Args:
        rng: where to draw from.
    """

    __slots__ = ("_random",)

    def __init__(self, rng: Random | None = None) -> None:
        self._random = (rng or Random()).random

    def choose(self, table: LoadTable, request: EngineCoreRequest) -> int:
        count = _count(table)
        if count == 1:
            return table.ranks[0]
        first = int(self._random() * count)
        second = int(self._random() * (count - 1))
        second += second >= first
        loads = table.loads
        return table.ranks[first if loads[first] <= loads[second] else second]


class PrefixAffine:
    """The rank that has had a prompt with the same beginning, as its prefix cache has it, too.

    Prompts are compared by whole blocks of tokens, the longest known beginning counts. A beginning may be known on
    several ranks, then the least loaded of these is chosen; where all of them have `max_imbalance` more requests than
    the least loaded rank, or none is known, another policy chooses, and that rank is known from then on.

    Args:
        block_tokens: tokens a block; shorter prompts have no beginning to share.
        max_blocks: how many blocks of a prompt are looked at; bounds the cost of a choice.
        max_imbalance: in requests, as `LoadTable` estimates them.
        capacity: how many beginnings are remembered, the least recently used is forgotten first.
        otherwise: the other policy; the least loaded rank by default.

    Attributes:
        hits, misses: choices by a known beginning, and others.
    """

    __slots__ = (
        "_block_tokens",
        "_capacity",
        "_known",
        "_max_blocks",
        "_max_imbalance",
        "_otherwise",
        "hits",
        "misses",
    )

    def __init__(
        self,
        *,
        block_tokens: int = 32,
        max_blocks: int = 8,
        max_imbalance: float = 8.0,
        capacity: int = 16384,
        otherwise: BalancingPolicy | None = None,
    ) -> None:
        for name, value in (("block_tokens", block_tokens), ("max_blocks", max_blocks), ("capacity", capacity)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._max_imbalance = max_imbalance
        self._capacity = capacity
        self._otherwise = otherwise if otherwise is not None else LeastLoaded()
        self._known: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self.hits = 0
        self.misses = 0

    @property
    def hit_rate(self) -> float:
        """Share of choices by a known beginning, 0 to 1."""
        total = self.hits + self.misses
        return self.hits / total if total else 0.0

    def choose(self, table: LoadTable, request: EngineCoreRequest) -> int:
        _count(table)
        keys = self._keys(request.prompt_token_ids)
        rank = self._choose_known(table, keys)
        if rank is None:
            self.misses += 1
            rank = self._otherwise.choose(table, request)
        else:
            self.hits += 1
        self._remember(keys, rank)
        return rank

    def forget(self, rank: int) -> None:
        """This rank's cache is empty: it was started again, or its cache was reset."""
        for key, ranks in list(self._known.items()):
            if rank in ranks:
                rest = tuple([other for other in ranks if other != rank])
                if rest:
                    self._known[key] = rest
                else:
                    del self._known[key]

    def _keys(self, tokens: Sequence[int]) -> list[int]:
        """A hash of each beginning of whole blocks, shortest first. A collision costs a cache hit, nothing else."""
        size = self._block_tokens
        blocks = min(len(tokens) // size, self._max_blocks)
        keys = []
        key = 0
        for start in range(0, blocks * size, size):
            key = hash((key, *tokens[start : start + size]))
            keys.append(key)
        return keys

    def _choose_known(self, table: LoadTable, keys: list[int]) -> int | None:
        loads = table.loads
        limit = min(loads) + self._max_imbalance
        for key in reversed(keys):
            known = self._known.get(key, ())
            candidates = [(loads[position], rank) for position, rank in enumerate(table.ranks) if rank in known]
            if candidates:
                load, rank = min(candidates)
                return rank if load < limit else None
        return None

    def _remember(self, keys: list[int], rank: int) -> None:
        known = self._known
        for key in keys:
            ranks = known.get(key, ())
            if rank not in ranks:
                known[key] = ranks + (rank,)
            known.move_to_end(key)
        while len(known) > self._capacity:
            known.popitem(last=False)


POLICIES: dict[str, Callable[[], BalancingPolicy]] = {
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "prefix_affine": PrefixAffine,
}


def make_policy(policy: str | BalancingPolicy) -> BalancingPolicy:
    """A new policy of this name; or the object given, if it is one.

    Raises:
        ConfigError: no such policy; the message names those there are.
    """
    if not isinstance(policy, str):
        if not callable(getattr(policy, "choose", None)):
            raise ConfigError(f"a balancing policy has a method `choose(table, request)`, {policy!r} has none")
        return policy
    if policy not in POLICIES:
        raise ConfigError(f"no balancing policy {policy!r}; there are {', '.join(POLICIES)}")
    return POLICIES[policy]()


def _count(table: LoadTable) -> int:
    """How many ranks there are to choose from; an error if none."""
    count = len(table.ranks)
    if not count:
        raise LookupError("no rank is available")
    return count
