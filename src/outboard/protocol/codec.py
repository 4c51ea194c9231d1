"""Structs to frames and back. The first frame is the msgpack body, the others are auxiliary buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from outboard.errors import ProtocolError
from outboard.protocol.tensors import ARRAY_EXT, Buffer, FrameSource, is_array, is_scalar, pack_array, unpack_array

__all__ = ["MsgpackDecoder", "MsgpackEncoder"]

T = TypeVar("T")


class MsgpackEncoder:
    """Encodes messages of any of our structs. Not to be shared between threads."""

    def __init__(self, inline_bytes: int) -> None:
        self._inline_bytes = inline_bytes
        self._aux: list[Buffer] = []
        self._encode = msgspec.msgpack.Encoder(enc_hook=self._hook).encode

    def encode(self, message: Any) -> list[Buffer]:
        """All frames of a message. Auxiliary frames are the arrays' own memory: it must not change while in flight.

        Raises:
            TypeError: the message holds a value that msgpack cannot carry; the text names its type.
        """
        aux: list[Buffer] = []
        self._aux = aux
        try:
            return [self._encode(message), *aux]
        finally:
            self._aux = []  # or the last message's buffers would live until the next one

    def _hook(self, value: Any) -> Any:
        if is_array(value):
            return pack_array(value, self._inline_bytes, self._aux)
        if is_scalar(value) and not is_scalar(item := value.item()):  # the item of a longdouble is a longdouble again
            return item
        raise TypeError(
            f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be sent; "
            "send msgpack values (None, bool, int, float, str, bytes, list, dict), dataclasses, structs or numpy arrays"
        )


class _Frames:
    """Auxiliary frames, and which of them the message has asked for."""

    __slots__ = ("_frames", "taken")

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self._frames = frames
        self.taken: set[int] = set()

    def __getitem__(self, number: int) -> Buffer:
        self.taken.add(number)
        return self._frames[number]


class MsgpackDecoder(Generic[T]):
    """Decodes frames to one type. Not to be shared between threads."""

    def __init__(self, type_: Any) -> None:
        self._aux: FrameSource = ()
        self._decode = msgspec.msgpack.Decoder(type_, ext_hook=self._hook).decode

    def decode(self, body: Buffer, aux: Sequence[Buffer] = ()) -> T:
        """The message.

        Raises:
            ProtocolError: the frames are not a message of this type; the text says what is wrong.
        """
        frames = _Frames(aux)
        self._aux = frames if aux else ()
        try:
            message: T = self._decode(body)
            if len(frames.taken) != len(aux):
                raise ProtocolError(f"{len(aux)} auxiliary frames came, the message needs {len(frames.taken)}")
            return message
        except ProtocolError:
            raise
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"undecodable message: {error}") from error
        finally:
            self._aux = ()

    def _hook(self, code: int, payload: memoryview) -> Any:
        if code == ARRAY_EXT:
            return unpack_array(payload, self._aux)
        raise ProtocolError(f"unknown msgpack extension {code} in a message")
