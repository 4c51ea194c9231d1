"""numpy arrays inside messages: small ones in the body, large ones as auxiliary frames.

An array becomes a msgpack extension (`ARRAY_EXT`) whose payload is itself msgpack: `(dtype, shape, data)`, where
`data` is the bytes, or the number of the auxiliary frame that holds them. Arrays arrive as read-only views of what was
received.

numpy takes longer to import than everything else together, so it is imported with the first array, not before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from outboard.errors import ProtocolError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ARRAY_EXT", "Buffer", "is_array", "is_scalar", "pack_array", "unpack_array"]

ARRAY_EXT = 1

Buffer = bytes | bytearray | memoryview

_header = msgspec.msgpack.Encoder()
_read_header = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes | int])


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Whether this is a numpy array; nobody has one who has not imported numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_scalar(value: object) -> TypeGuard[np.generic[Any]]:
    """Whether this is a numpy scalar, such as an item of an array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def pack_array(value: np.ndarray[Any, Any], inline_bytes: int, aux: list[Buffer]) -> msgspec.msgpack.Ext:
    """Makes an extension of an array; appends its buffer to `aux` where it is larger than `inline_bytes`.

    A buffer in `aux` is the array's own memory, not a copy, unless the array is not contiguous.

    Raises:
        TypeError: the dtype has no plain buffer (object, structured).
    """
    if value.dtype.hasobject or value.dtype.names is not None:
        raise TypeError(f"a numpy array of dtype {value.dtype} cannot be sent: its items are not plain numbers or text")
    import numpy as np

    array = np.ascontiguousarray(value)
    # A view as bytes: not every dtype (float16, datetime64) has a buffer format that memoryview knows.
    flat = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    data: bytes | int
    if flat.nbytes <= inline_bytes:
        data = flat.tobytes()
    else:
        data = len(aux)
        aux.append(flat.data)
    return msgspec.msgpack.Ext(ARRAY_EXT, _header.encode((array.dtype.str, value.shape, data)))


def unpack_array(payload: memoryview, aux: Sequence[Buffer]) -> np.ndarray[Any, Any]:
    """The array of an extension's payload; read-only.

    Raises:
        ProtocolError: the payload is not what `pack_array` makes, or names a frame that is not there.
    """
    import numpy as np

    try:
        dtype, shape, data = _read_header.decode(payload)
        buffer = aux[data] if isinstance(data, int) else data
        array = np.frombuffer(buffer, dtype=np.dtype(dtype)) if len(buffer) else np.empty(0, np.dtype(dtype))
        array = array.reshape(shape)
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError) as error:
        raise ProtocolError(f"malformed array in a message: {error}") from error
    array.flags.writeable = False
    return array
