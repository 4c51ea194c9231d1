"""The column of handles: where it is that of the message before, what was made of that is taken again.

In a busy engine core most steps have the same requests. To decode 256 handles, and to look up the user's ids for them,
takes more than all else that a client does with a message; to see that they are the same bytes takes 50 ns.
"""

from __future__ import annotations

import msgspec

from outboard.client.pending import PendingTable
from outboard.protocol.messages import EngineCoreOutputs

__all__ = ["HandleColumn", "ReceivedOutputs"]


class ReceivedOutputs(EngineCoreOutputs, tag=0):
    """As it is decoded: with the handles as bytes, until `HandleColumn.fill_in`."""

    handles: msgspec.Raw = msgspec.Raw(b"\x90")  # type: ignore[assignment]


class HandleColumn:
    """Remembers the handles of the last message, of one engine core.

    Args:
        pending: has the ids.
    """

    def __init__(self, pending: PendingTable) -> None:
        self._pending = pending
        self._decode = msgspec.msgpack.Decoder(list[int]).decode
        self._bytes = msgspec.Raw()
        self._handles: list[int] = []
        self._ids: list[str | None] = []
        self._ids_as_of = -1  # `PendingTable.changes` for which the ids are right

    def fill_in(self, message: ReceivedOutputs) -> bool:
        """Makes a list of the message's handles, which messages share; False if they are none."""
        if message.handles != self._bytes:
            try:
                self._handles = self._decode(message.handles)
            except msgspec.MsgspecError:
                return False
            self._bytes = message.handles.copy()  # the message's own bytes are about to be overwritten
            self._ids_as_of = -1
        message.handles = self._handles  # type: ignore[assignment]
        return True

    def request_ids(self) -> list[str | None]:
        """The user's ids at the last message's handles, None for what has ended; messages share the list."""
        changes = self._pending.changes
        if changes != self._ids_as_of:
            self._ids = list(map(self._pending.request_ids.get, self._handles))
            self._ids_as_of = changes
        return self._ids
