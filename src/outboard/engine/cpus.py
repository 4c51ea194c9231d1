"""Which CPUs an engine-core process uses, so that ranks of one host do not fight over them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from outboard.errors import ConfigError

__all__ = ["share_of", "use_cpus"]


def share_of(cpus: Sequence[int], rank: int, size: int) -> list[int]:
    """The part of these CPUs that one of `size` ranks gets: neighbours, as they share caches, and at least one."""
    count = len(cpus)
    if size > count:
        return [cpus[rank % count]]
    return list(cpus[rank * count // size : (rank + 1) * count // size])


def use_cpus(cpus: Sequence[int]) -> None:
    """Restricts this process, and what it will start, to these CPUs.

    Raises:
        ConfigError: one of them is not there, or may not be used.
    """
    allowed = os.sched_getaffinity(0)
    if not allowed.issuperset(cpus):
        raise ConfigError(
            f"CPUs {sorted(set(cpus) - allowed)} are not there or may not be used; there are {sorted(allowed)}"
        )
    os.sched_setaffinity(0, cpus)
