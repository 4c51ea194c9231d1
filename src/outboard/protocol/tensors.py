"""numpy arrays inside messages: small ones in the body, large ones as auxiliary frames.

An array becomes a msgpack extension (`ARRAY_EXT`) whose payload is itself msgpack: `(dtype, shape, data)`, where
`data` is the bytes, or the number of the auxiliary frame that holds them. Arrays arrive as read-only views of what was
received.

numpy takes longer to import than everything else together, so it is imported with the first array, not before.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import msgspec

from outboard.errors import ProtocolError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ARRAY_EXT", "Buffer", "FrameSource", "is_array", "is_scalar", "pack_array", "unpack_array"]

ARRAY_EXT = 1

Buffer = bytes | bytearray | memoryview


class FrameSource(Protocol):
    """Auxiliary frames by number."""

    def __getitem__(self, number: int, /) -> Buffer: ...


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
        TypeError: the dtype has no plain buffer (object, structured), or it is a masked array.
    """
    import numpy as np

    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked numpy array cannot be sent: its mask would be lost; send data and mask apart")
    if value.dtype.hasobject or value.dtype.names is not None:
        raise TypeError(f"a numpy array of dtype {value.dtype} cannot be sent: its items are not plain numbers or text")
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


def unpack_array(payload: memoryview, aux: FrameSource) -> np.ndarray[Any, Any]:
    """The array of an extension's payload; read-only.

    Raises:
        ProtocolError: the payload is not what `pack_array` makes, or names a frame that is not there.
    """
    import numpy as np

    try:
        name, shape, data = _read_header.decode(payload)
        dtype = np.dtype(name)
        # Only what `pack_array` writes: numpy also reads Python from a dtype's name, and counts from the end.
        if dtype.str != name or dtype.hasobject or min(shape, default=0) < 0 or (isinstance(data, int) and data < 0):
            raise ValueError(f"no array has dtype {name!r} and shape {shape}")
        buffer = aux[data] if isinstance(data, int) else data
        array = (np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)).reshape(shape)
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"malformed array in a message: {error}") from error
    array.flags.writeable = False
    return array
