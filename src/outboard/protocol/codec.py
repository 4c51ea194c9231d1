"""Structs to frames and back. The first frame is the msgpack body, the others are auxiliary buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from outboard.errors import ProtocolError
from outboard.protocol.messages import EngineCoreOutputs, ErrorReport, UtilityOutput
from outboard.protocol.shm import SlotPool, SlotReader, SlotRef
from outboard.protocol.tensors import (
    ARRAY_EXT,
    TENSOR_EXT,
    Buffer,
    Inlet,
    Outlet,
    Unavailable,
    is_array,
    is_scalar,
    is_tensor,
    pack_array,
    pack_tensor,
    slot_of,
    unpack_array,
    unpack_tensor,
)

__all__ = ["MAX_FRAMES", "MsgpackDecoder", "MsgpackEncoder", "check_size"]

# How many auxiliary frames a message may have.
MAX_FRAMES = 1 << 16

T = TypeVar("T")


class MsgpackEncoder:
    """Encodes messages of any of our structs, for one peer. Not to be shared between threads.

    Args:
        inline_bytes: arrays up to this size go into the body.
        shared_memory_bytes: larger ones than this go into a slot of `pool`, if it has one; all others are frames.
        pool: the peer's slots; None: no shared memory.
    """

    def __init__(self, inline_bytes: int, shared_memory_bytes: int = 0, pool: SlotPool | None = None) -> None:
        self._sizes = (inline_bytes, shared_memory_bytes)
        self._pool = pool
        self._outlet: Outlet | None = None  # of the message that is being encoded, from its first array on
        self._encode = msgspec.msgpack.Encoder(enc_hook=self._hook).encode

    def encode(self, message: Any) -> list[Buffer]:
        """All frames of a message. Auxiliary frames are the arrays' own memory: it must not change while in flight.

        A message that is then not sent must go to `give_back`.

        Raises:
            TypeError: the message holds a value that msgpack cannot carry; the text names its type.
        """
        try:
            body = self._encode(message)
            return [body] if self._outlet is None else [body, *self._outlet.frames]
        except BaseException:
            if self._outlet is not None and self._pool is not None:
                for slot in self._outlet.slots:
                    self._pool.give_back(slot)
            raise
        finally:
            self._outlet = None  # or the last message's buffers would live until the next one

    def give_back(self, body: Buffer) -> None:
        """Frees the slots of a message, given by its first frame, that is not going to be sent."""
        if self._pool is not None and self._pool.held:
            for slot in _slots_of(body):
                self._pool.give_back(slot)

    def _hook(self, value: Any) -> Any:
        if is_array(value):
            return pack_array(value, self._open_outlet())
        if is_tensor(value):
            return pack_tensor(value, self._open_outlet())
        if is_scalar(value) and not is_scalar(item := value.item()):  # the item of a longdouble is a longdouble again
            return item
        raise TypeError(
            f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be sent; send msgpack values "
            "(None, bool, int, float, str, bytes, list, dict), dataclasses, structs, numpy arrays or torch tensors"
        )

    def _open_outlet(self) -> Outlet:
        if self._outlet is None:
            self._outlet = Outlet(*self._sizes, self._pool)
        return self._outlet


class MsgpackDecoder(Generic[T]):
    """Decodes frames to one type. Not to be shared between threads.

    Args:
        type_: of the messages.
        reader: for arrays that the peer puts into shared memory; None: there is none.
    """

    def __init__(self, type_: Any, reader: SlotReader | None = None) -> None:
        self._reader = reader
        self._frames: Sequence[Buffer] = ()
        self._inlet: Inlet | None = None  # of the message that is being decoded, from its first array on
        self._decode = msgspec.msgpack.Decoder(type_, ext_hook=self._hook).decode

    def decode(self, body: Buffer, aux: Sequence[Buffer] = ()) -> T:
        """The message. Where one holds a tensor that cannot be made here, only what holds it fails.

        Raises:
            ProtocolError: the frames are not a message of this type; the text says what is wrong.
        """
        self._frames = aux
        try:
            message: T = self._decode(body)
            if aux or self._inlet is not None:
                self._check(message, self._open_inlet())
            return message
        except ProtocolError:
            self.discard(body)
            raise
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.discard(body)
            raise ProtocolError(f"undecodable message: {error}") from error
        finally:
            self._frames = ()
            self._inlet = None

    def discard(self, body: Buffer) -> None:
        """Frees the slots of a message, given by its first frame, that is not decoded.

        Those that were opened before it failed are free when the exception has gone, with their views.
        """
        if self._reader is not None:
            for slot in _slots_of(body):
                if self._inlet is None or slot.number not in self._inlet.opened:
                    self._reader.free(slot)

    def _check(self, message: T, inlet: Inlet) -> None:
        if len(inlet.taken) != len(self._frames):
            raise ProtocolError(f"{len(self._frames)} auxiliary frames came, the message needs {len(inlet.taken)}")
        if inlet.unavailable:
            _fail_apart(message, inlet.unavailable)

    def _open_inlet(self) -> Inlet:
        if self._inlet is None:
            self._inlet = Inlet(self._frames, self._reader)
        return self._inlet

    def _hook(self, code: int, payload: memoryview) -> Any:
        if code == ARRAY_EXT:
            return unpack_array(payload, self._open_inlet())
        if code == TENSOR_EXT:
            return unpack_tensor(payload, self._open_inlet())
        raise ProtocolError(f"unknown msgpack extension {code} in a message")


def _slots_of(body: Buffer) -> list[SlotRef]:
    """All slots that a message refers to, as far as it can be read; whatever type it is of."""
    found = []

    def look(code: int, payload: memoryview) -> None:
        if code in (ARRAY_EXT, TENSOR_EXT) and (slot := slot_of(payload)) is not None:
            found.append(slot)

    try:
        msgspec.msgpack.Decoder(ext_hook=look).decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        pass
    return found


def _fail_apart(message: Any, reason: str) -> None:
    """Makes an error of each result with an `Unavailable` in it. A message of another kind is one such thing itself."""
    if not isinstance(message, EngineCoreOutputs):
        raise ProtocolError(reason)
    answer = message.utility_output
    if answer is not None and _is_missing_in(answer.result):
        error = ErrorReport(f"{ProtocolError.__module__}.{ProtocolError.__qualname__}", reason, "")
        message.utility_output = UtilityOutput(answer.call_id, error=error)
    extras = message.extras
    if extras is None:
        return
    failed = [position for position, result in extras.results.items() if _is_missing_in(result)]
    ended = [end for end in message.finished or () if end[0] not in failed]
    message.finished = ended + [(position, "error", None) for position in failed] or None
    for position in failed:
        del extras.results[position]
        extras.errors[position] = reason


def _is_missing_in(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_missing_in, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_missing_in, value))
    return isinstance(value, Unavailable)


def check_size(frames: Sequence[Buffer], limit: int) -> None:
    """Raises ValueError if a frame has more than `limit` bytes, or there are too many: the peer would not take it."""
    if len(frames) > MAX_FRAMES:
        raise ValueError(f"{len(frames)} arrays that are too large for the body; one message may hold {MAX_FRAMES}")
    for frame in frames:
        if len(frame) > limit:
            raise ValueError(f"{len(frame)} bytes in one piece; max_message_bytes in TransportConfig allows {limit}")
