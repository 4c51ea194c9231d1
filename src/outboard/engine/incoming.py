"""From the frames of a client's message to an item in the busy loop's queue."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from outboard.engine.loop import BadRequest, DeferredResult
from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.messages import AbortRequests, AddRequest, EngineCoreRequestType, UtilityCall
from outboard.protocol.shm import SlotReader
from outboard.protocol.tensors import Buffer

__all__ = ["Incoming"]

logger = logging.getLogger("outboard.engine")


class _Head(msgspec.Struct, array_like=True):
    """The fields that every body begins with; what is told of a body that is otherwise undecodable."""

    epoch: int
    handle: int = -1


class Incoming:
    """Decodes messages; what is of another epoch or makes no sense is logged and dropped.

    Args:
        epoch: of the one client that may send.
        reader: for arrays that it puts into shared memory.
    """

    def __init__(self, epoch: int, reader: SlotReader | None = None) -> None:
        self._epoch = epoch
        self._decoders: dict[bytes, MsgpackDecoder[Any]] = {
            EngineCoreRequestType.ADD.value: MsgpackDecoder(AddRequest, reader),
            EngineCoreRequestType.ABORT.value: MsgpackDecoder(AbortRequests, reader),
            EngineCoreRequestType.UTILITY.value: MsgpackDecoder(UtilityCall, reader),
        }
        self._heads: MsgpackDecoder[_Head] = MsgpackDecoder(_Head, reader)

    def decode(self, frames: Sequence[Buffer]) -> Any:
        """The item for the busy loop's queue; None if the message was dropped. Never raises."""
        try:
            epoch, item = self._decode(frames)
        except ProtocolError as error:
            logger.warning("dropped a message to the engine core: %s", error)
            return None
        except Exception:  # whatever it was: an engine core without its input thread would be deaf for ever
            logger.exception("dropped a message to the engine core")
            return None
        if epoch != self._epoch:
            logger.warning("dropped a message of epoch %x to the engine core; its own is %x", epoch, self._epoch)
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
            if kind == EngineCoreRequestType.ABORT.value or head.handle < 0:
                raise
            if kind == EngineCoreRequestType.ADD.value:
                return head.epoch, BadRequest(head.handle, str(error))
            refused: Future[Any] = Future()  # or whoever called would wait for ever
            refused.set_exception(ProtocolError(str(error)))
            return head.epoch, DeferredResult(head.handle, refused)
        return message.epoch, message
