"""numpy arrays and torch tensors inside messages: in the body, in frames of their own, or in shared memory, by size.

Each becomes a msgpack extension (`ARRAY_EXT`, `TENSOR_EXT`) whose payload is itself msgpack: `(dtype, shape, data)`.
There `data` is the bytes, the number of the auxiliary frame that holds them, or the reference of a shared-memory slot.
Arrays arrive as read-only views of what was received; tensors, which know no such thing, as memory of their own.

numpy takes longer to import than everything else together, so it is imported with the first array, not before. torch is
never imported here: who has a tensor has imported it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from outboard.errors import ProtocolError
from outboard.protocol.shm import SlotPool, SlotReader, SlotRef

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ARRAY_EXT",
    "TENSOR_EXT",
    "Buffer",
    "Inlet",
    "Outlet",
    "Unavailable",
    "is_array",
    "is_scalar",
    "is_tensor",
    "pack_array",
    "pack_tensor",
    "slot_of",
    "unpack_array",
    "unpack_tensor",
]

ARRAY_EXT = 1
TENSOR_EXT = 2

Buffer = bytes | bytearray | memoryview

_header = msgspec.msgpack.Encoder()
_read_header = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes | int | SlotRef])

# `numpy.dtype.str` of numbers, times and text: byte order, kind, size, and the unit of times.
_DTYPE = re.compile(r"[<>|][biufcmMSUV][0-9]+(\[[0-9]*[A-Za-z]+\])?")

# What malformed headers and buffers make msgspec, numpy and torch raise.
_MALFORMED = (
    msgspec.MsgspecError,
    IndexError,
    TypeError,
    ValueError,
    RecursionError,
    MemoryError,
    OverflowError,
    RuntimeError,
)


class Outlet:
    """Where the bytes of one message's arrays go.

    Args:
        inline_bytes: arrays up to this size go into the body.
        shared_memory_bytes: larger ones than this go into a slot of `pool`, if it has one; else they are frames.

    Attributes:
        frames: auxiliary frames so far. One is the array's own memory, not a copy, unless the array has gaps.
        slots: slots leased so far.
    """

    def __init__(self, inline_bytes: int, shared_memory_bytes: int = 0, pool: SlotPool | None = None) -> None:
        self._inline_bytes = inline_bytes
        self._shared_memory_bytes = shared_memory_bytes
        self._pool = pool
        self.frames: list[Buffer] = []
        self.slots: list[SlotRef] = []

    def place(self, size: int, copy_to: Callable[[memoryview], Any], view: Callable[[], memoryview]) -> Any:
        """Puts `size` bytes where they belong; what to write into the header."""
        if self._pool is not None and size > self._shared_memory_bytes and (lease := self._pool.lease(size)):
            self.slots.append(lease[0])
            copy_to(lease[1])
            return lease[0]
        if size <= self._inline_bytes:
            return view().tobytes()
        self.frames.append(view())
        return len(self.frames) - 1


class Inlet:
    """Where the bytes of one message's arrays come from.

    Attributes:
        taken: numbers of the auxiliary frames that were asked for.
        opened: numbers of the leases that were opened.
        unavailable: why some tensor could not be made here; empty while all is well.
    """

    def __init__(self, frames: Sequence[Buffer] = (), reader: SlotReader | None = None) -> None:
        self._frames = frames
        self._reader = reader
        self.taken: set[int] = set()
        self.opened: set[int] = set()
        self.unavailable = ""

    def buffer(self, data: bytes | int | SlotRef, size: int) -> Buffer:
        """The bytes that a header means; a writable memoryview where they are a slot's."""
        if isinstance(data, bytes):
            return data
        if isinstance(data, int):
            if data < 0:
                raise ValueError(f"no frame has number {data}")
            self.taken.add(data)
            return self._frames[data]
        if self._reader is None:
            raise ValueError("a shared-memory slot, but shared memory is off")
        slot = self._reader.open(data, size)
        self.opened.add(data.number)
        return slot.data


class Unavailable:
    """Stands where a tensor would be that this process cannot make. Never handed on: its request or call fails."""


def is_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Whether this is a numpy array; nobody has one who has not imported numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_scalar(value: object) -> TypeGuard[np.generic[Any]]:
    """Whether this is a numpy scalar, such as an item of an array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def is_tensor(value: object) -> bool:
    """Whether this is a torch tensor; nobody has one who has not imported torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def slot_of(payload: memoryview) -> SlotRef | None:
    """The slot that an extension refers to, if it is an array in one."""
    try:
        data = _read_header.decode(payload)[2]
    except (msgspec.MsgspecError, RecursionError):
        return None
    return data if isinstance(data, SlotRef) else None


# --- numpy -----------------------------------------------------------------------------------------------------------


def pack_array(value: np.ndarray[Any, Any], outlet: Outlet) -> msgspec.msgpack.Ext:
    """Makes an extension of an array.

    Raises:
        TypeError: the dtype has no plain buffer (object, structured, one of another library), or it is a masked array.
    """
    import numpy as np

    dtype = value.dtype
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked numpy array cannot be sent: its mask would be lost; send data and mask apart")
    if dtype.hasobject or dtype.names is not None or not dtype.itemsize:
        raise TypeError(f"a numpy array of dtype {dtype} cannot be sent: its items are not plain numbers or text")
    if np.dtype(dtype.str) != dtype:
        raise TypeError(f"a numpy array of dtype {dtype} cannot be sent: numpy alone does not know that type")

    def copy_to(slot: memoryview) -> None:
        np.copyto(np.frombuffer(slot, dtype).reshape(value.shape), value)

    def view() -> memoryview:
        # A view as bytes: not every dtype (float16, datetime64) has a buffer format that memoryview knows.
        flat = np.ascontiguousarray(value).reshape(-1)
        return (flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)).data

    data = outlet.place(value.nbytes, copy_to, view)
    return msgspec.msgpack.Ext(ARRAY_EXT, _header.encode((dtype.str, value.shape, data)))


def unpack_array(payload: memoryview, inlet: Inlet) -> np.ndarray[Any, Any]:
    """The array of an extension's payload; read-only.

    Raises:
        ProtocolError: the payload is not what `pack_array` makes, or names a frame or slot that is not there.
    """
    import numpy as np

    try:
        name, shape, data = _read_header.decode(payload)
        # Only what `pack_array` writes: numpy also reads Python from a dtype's name, and counts from the end.
        if not _DTYPE.fullmatch(name) or (dtype := np.dtype(name)).str != name or min(shape, default=0) < 0:
            raise ValueError(f"no array has dtype {name!r} and shape {shape}")
        buffer = memoryview(inlet.buffer(data, math.prod(shape) * dtype.itemsize)).toreadonly()
        return (np.frombuffer(buffer, dtype) if buffer.nbytes else _read_only(np.empty(0, dtype))).reshape(shape)
    except _MALFORMED as error:
        raise ProtocolError(f"malformed array in a message: {error}") from error


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


# --- torch -----------------------------------------------------------------------------------------------------------


def pack_tensor(value: Any, outlet: Outlet) -> msgspec.msgpack.Ext:
    """Makes an extension of a torch tensor. Gradients stay behind: it arrives detached.

    Raises:
        TypeError: it is not a plain tensor in the CPU's memory.
    """
    torch = sys.modules["torch"]
    name = str(value.dtype).removeprefix("torch.")
    if value.device.type != "cpu":
        raise TypeError(f"a torch tensor on {value.device} cannot be sent: move it with .cpu() first")
    if value.layout is not torch.strided or value.is_quantized:
        raise TypeError(
            f"a torch tensor of layout {value.layout} and dtype {name} cannot be sent: it has no plain buffer"
        )
    tensor = value.detach()

    def copy_to(slot: memoryview) -> None:
        torch.frombuffer(slot, dtype=value.dtype).reshape(value.shape).copy_(tensor)

    def view() -> memoryview:
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        buffer: memoryview = flat.view(torch.uint8).numpy().data
        return buffer

    try:
        data = outlet.place(tensor.numel() * tensor.element_size(), copy_to, view)
    except RuntimeError as error:
        raise TypeError(f"a torch tensor of dtype {name} cannot be sent: {error}") from error
    return msgspec.msgpack.Ext(TENSOR_EXT, _header.encode((name, tuple(value.shape), data)))


def unpack_tensor(payload: memoryview, inlet: Inlet) -> Any:
    """The tensor of an extension's payload; `Unavailable` where this process has not imported torch.

    Its memory is its own and may be written to: a slot, or a copy of what came in a frame.

    Raises:
        ProtocolError: the payload is not what `pack_tensor` makes, or names a frame or slot that is not there.
    """
    torch = sys.modules.get("torch")
    try:
        name, shape, data = _read_header.decode(payload)
        dtype = getattr(torch, name, None)
        if torch is None or not isinstance(dtype, torch.dtype):
            inlet.buffer(data, 0)  # its slot is free with that
            inlet.unavailable = (
                "a torch tensor came, but this process has not imported torch: import torch there, before it arrives"
                if torch is None
                else f"a torch tensor of dtype {name} came, but torch {torch.__version__} here has no such type"
            )
            return Unavailable()
        if min(shape, default=0) < 0:
            raise ValueError(f"no tensor has shape {shape}")
        buffer = inlet.buffer(data, math.prod(shape) * dtype.itemsize)
        if not len(buffer):
            return torch.empty(shape, dtype=dtype)
        writable = buffer if isinstance(data, SlotRef) else bytearray(buffer)
        return torch.frombuffer(writable, dtype=dtype).reshape(shape)
    except _MALFORMED as error:
        raise ProtocolError(f"malformed tensor in a message: {error}") from error
