"""The table handle -> slot of a dispatcher."""

from __future__ import annotations

from outboard.frontend.slot import Slot

__all__ = ["SlotTable"]


class SlotTable:
    """Slots that have not ended, by handle.

    Remembers the slots of the last column of handles. Messages about the same requests share that list, which
    `EngineCoreOutputs` says is not changed; so most are spared a lookup for each token, a quarter of their dispatch.
    """

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._column: list[int] | None = None
        self._column_slots: list[Slot | None] = []

    def __contains__(self, handle: int) -> bool:
        return handle in self._slots

    def add(self, slot: Slot) -> None:
        """Enters a slot by its handle."""
        self._slots[slot.handle] = slot
        self._forget_column()

    def pop(self, handle: int) -> Slot | None:
        """Takes a slot out; None if it is not there (any more)."""
        self._forget_column()
        return self._slots.pop(handle, None)

    def clear(self) -> None:
        """Takes all out."""
        self._forget_column()
        self._slots.clear()

    def find(self, handles: list[int]) -> list[Slot | None]:
        """The slots of these, None for each that is not there. The list is good until something comes or goes."""
        if handles is not self._column:
            self._column = handles
            self._column_slots = list(map(self._slots.get, handles))
        return self._column_slots

    def _forget_column(self) -> None:
        self._column = None
        self._column_slots = []
