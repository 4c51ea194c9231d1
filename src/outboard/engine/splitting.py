"""A backlog in parts of bounded size, so that a front end that catches up never has much to do at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from outboard.engine.batch import Part

__all__ = ["split"]


def split(columns: Part, most: int) -> list[Part]:
    """Takes full parts off the front of what waits; what is left, which fits into one message, stays.

    Every part is valid by itself. Where the tokens of one output are too many they go into several outputs of the same
    request, and all else that it says comes with the last.

    Args:
        columns: what waits.
        most: tokens, and outputs, in one part.
    """
    if columns.counts is not None and max(columns.counts, default=0) > most:
        _divide(columns, most)
    handles, tokens, counts = columns.handles, columns.tokens, columns.counts
    parts: list[Part] = []
    starts: list[int] = []  # positions
    # How many tokens there are up to and including each position.
    ends: Sequence[int] = range(1, len(handles) + 1) if counts is None else list(accumulate(counts))
    start = first = 0
    while start < len(handles):
        end = min(start + most, bisect_right(ends, first + most, start))
        part = Part()
        part.handles = handles[start:end]
        part.tokens = tokens[first : ends[end - 1]]
        if counts is not None:
            part.counts = counts[start:end]
        parts.append(part)
        starts.append(start)
        start, first = end, ends[end - 1]
    _hand_out(columns, parts, starts)
    if parts:
        rest = parts.pop()
        columns.handles, columns.tokens, columns.counts = rest.handles, rest.tokens, rest.counts
        columns.finished, columns.extras = rest.finished, rest.extras
    return parts


def _hand_out(columns: Part, parts: list[Part], starts: list[int]) -> None:
    """Gives each part the ends and the rare fields of its outputs."""
    for position, reason, stop_reason in columns.finished or ():
        index = bisect_right(starts, position) - 1
        part = parts[index]
        if part.finished is None:
            part.finished = []
        part.finished.append((position - starts[index], reason, stop_reason))
    if columns.extras is None:
        return
    for name in columns.extras.__struct_fields__:
        by_position: dict[int, Any] = getattr(columns.extras, name)
        for position, value in by_position.items():
            index = bisect_right(starts, position) - 1
            getattr(parts[index].extras_to_fill(), name)[position - starts[index]] = value


def _divide(columns: Part, most: int) -> None:
    """Makes several outputs of each that has more than so many tokens."""
    assert columns.counts is not None
    handles: list[int] = []
    counts: list[int] = []
    lasts: list[int] = []  # of the outputs that each has become
    for handle, count in zip(columns.handles, columns.counts, strict=True):
        while count > most:
            handles.append(handle)
            counts.append(most)
            count -= most
        lasts.append(len(handles))
        handles.append(handle)
        counts.append(count)
    if columns.finished is not None:
        columns.finished = [(lasts[position], reason, stop) for position, reason, stop in columns.finished]
    extras = columns.extras
    if extras is not None:
        logprobs: dict[int, list[dict[int, float]]] = {}
        for position, entries in extras.logprobs.items():
            last = lasts[position]
            first = last - (max(columns.counts[position], 1) - 1) // most
            for start, index in enumerate(range(first, last + 1)):
                logprobs[index] = entries[start * most : (start + 1) * most]
        for name in extras.__struct_fields__:
            setattr(extras, name, {lasts[position]: value for position, value in getattr(extras, name).items()})
        extras.logprobs = logprobs
    columns.handles, columns.counts = handles, counts
