"""Free pieces of an address range: taken best-fit, joined with their neighbours when they come back."""

from __future__ import annotations

import bisect

__all__ = ["Extents"]


class Extents:
    """Offsets and sizes in any unit. Empty at first: what is there is added."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int]] = []  # (offset, size), in order, never adjacent

    def __repr__(self) -> str:
        return f"Extents({self._pieces})"

    def add(self, offset: int, size: int) -> None:
        """Adds a piece that is free from now on."""
        pieces = self._pieces
        position = bisect.bisect(pieces, (offset, size))
        if position < len(pieces) and pieces[position][0] == offset + size:
            size += pieces.pop(position)[1]
        if position and sum(pieces[position - 1]) == offset:
            before, room = pieces.pop(position - 1)
            offset, size = before, room + size
        bisect.insort(pieces, (offset, size))

    def take(self, size: int) -> int | None:
        """Takes `size` off the smallest piece that is large enough: its offset; None if no piece is."""
        fits = [piece for piece in self._pieces if piece[1] >= size]
        if not fits:
            return None
        offset, room = min(fits, key=lambda piece: piece[1])
        self._pieces.remove((offset, room))
        if room > size:
            bisect.insort(self._pieces, (offset + size, room - size))
        return offset

    def room_before(self, end: int) -> int:
        """The size of the free piece that ends at `end`; 0 if none does."""
        return self._pieces[-1][1] if self._pieces and sum(self._pieces[-1]) == end else 0
