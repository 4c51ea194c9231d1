"""From the frames of a client's message to an item in the busy loop's queue."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from outboard.engine.events import BadCall, BadRequest
from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.messages import AbortRequests, AddRequest, EngineCoreRequestType, LeaveRank, UtilityCall
from outboard.protocol.shm import SlotReader
from outboard.protocol.tensors import Buffer

__all__ = ["Drops", "Incoming"]

logger = logging.getLogger("outboard.engine")


# What somebody waits for the answer to.
_ANSWERED = (EngineCoreRequestType.ADD.value, EngineCoreRequestType.UTILITY.value)


class _Head(msgspec.Struct, array_like=True):
    """The fields that every body begins with; what is told of a body that is otherwise undecodable."""

    epoch: int
    handle: int = -1


class Drops:
    """Counts what is dropped, and logs the first of each kind: whoever sends junk may send much of it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, kind: str, what: object) -> None:
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            logger.warning("dropped a message to the engine core (%s): %s; more are only counted", kind, what)


class Incoming:
    """Decodes messages; what is of another epoch or makes no sense is logged and dropped.

    Args:
        epoch: of the one client that may send.
        reader: for arrays that it puts into shared memory.

    Attributes:
        drops: what was dropped.
    """

    def __init__(self, epoch: int, reader: SlotReader | None = None) -> None:
        self._epoch = epoch
        self._decoders: dict[bytes, MsgpackDecoder[Any]] = {
            EngineCoreRequestType.ADD.value: MsgpackDecoder(AddRequest, reader),
            EngineCoreRequestType.ABORT.value: MsgpackDecoder(AbortRequests, reader),
            EngineCoreRequestType.UTILITY.value: MsgpackDecoder(UtilityCall, reader),
            EngineCoreRequestType.LEAVE.value: MsgpackDecoder(LeaveRank, reader),
        }
        self._heads: MsgpackDecoder[_Head] = MsgpackDecoder(_Head, reader)
        self.drops = Drops()

    def decode(self, frames: Sequence[Buffer]) -> Any:
        """The item for the busy loop (events.py); None if the message was dropped. Never raises."""
        try:
            epoch, item = self._decode(frames)
        except ProtocolError as error:
            self.drops.note("undecodable", error)
            return None
        except Exception as error:  # whatever it was: an engine core without its input thread would be deaf for ever
            self.drops.note(type(error).__name__, error)
            return None
        if epoch != self._epoch:
            self.drops.note("epoch", f"of epoch {epoch:x}, where {self._epoch:x} was expected")
            return None
        return item

    def _decode(self, frames: Sequence[Buffer]) -> tuple[int, Any]:
        if len(frames) < 2:
            raise ProtocolError(f"{len(frames)} frames; a message has a type byte and a body")
        kind = bytes(frames[0])
        decoder = self._decoders.get(kind)
        if decoder is None:
            self._heads.discard(frames[1])
            raise ProtocolError(f"unknown message type {kind[:8]!r}")
        try:
            message = decoder.decode(frames[1], frames[2:])
        except ProtocolError as error:
            head = self._heads.decode(frames[1])
            if kind not in _ANSWERED or head.handle < 0:
                raise
            # Or whoever sent it would wait for ever.
            bad = BadRequest if kind == EngineCoreRequestType.ADD.value else BadCall
            return head.epoch, bad(head.handle, str(error))
        return message.epoch, message
