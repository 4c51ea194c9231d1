"""The header of a GGUF file: its metadata, and the size that the file must have. Loads no weights."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outboard.errors import ModelFileError

__all__ = ["GGUFHeader", "read_header"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 8  # ggml has 4; the product of what a damaged file says would take for ever

# Tensor type -> (elements a block, bytes a block), as in ggml.
# fmt: off
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),  # plain numbers
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),  # Q4_0 to Q8_1
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),  # Q2_K to Q8_K
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),  # IQ
    23: (256, 136), 29: (256, 56), 34: (256, 54), 35: (256, 66), 39: (32, 17),  # IQ4_XS, IQ1_M, TQ1_0, TQ2_0, MXFP4
}
# fmt: on


@dataclass(frozen=True)
class GGUFHeader:
    """What the header of a GGUF file says.

    Attributes:
        metadata: numbers and strings by key; arrays are left out.
        file_size: bytes that the file has at least if it is whole; tensors of unknown types count as empty.
    """

    metadata: dict[str, Any]
    file_size: int


class _Reader:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.position = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def skip(self, count: int) -> int:
        start = self.position
        self.position += count
        if self.position > len(self.buffer):
            raise EOFError
        return start

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.skip(length)
        return self.buffer[start : start + length].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A number or a string; None for an array, which is skipped."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[inner]))
        elif inner == _STRING:
            self._skip_strings(count)
        else:
            for _ in range(count):
                self.value(inner)
        return None

    def _skip_strings(self, count: int) -> None:
        buffer, position, unpack = self.buffer, self.position, struct.Struct("<Q").unpack_from
        for _ in range(count):
            position += 8 + unpack(buffer, position)[0]
        self.position = position
        self.skip(0)


def read_header(path: Path) -> GGUFHeader:
    """Reads the header of a GGUF file (versions 2 and 3, little-endian), some 50 ms for a vocabulary of 50,000.

    Raises:
        ModelFileError: the file cannot be read, is no GGUF file, or ends inside its header.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelFileError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                return _parse(path, buffer)
    except OSError as error:
        raise ModelFileError(f"cannot read the model file {path}: {error.strerror or error}") from error
    except (EOFError, struct.error) as error:
        raise ModelFileError(f"{path} is truncated: it ends inside its header; fetch it again") from error
    except (KeyError, OverflowError, RecursionError, ZeroDivisionError) as error:
        raise ModelFileError(f"{path} is damaged: its header makes no sense ({error!r}); fetch it again") from error


def _parse(path: Path, buffer: mmap.mmap) -> GGUFHeader:
    reader = _Reader(buffer)
    reader.skip(4)
    version = reader.scalar("I")
    if version not in (2, 3):
        raise ModelFileError(f"{path} has GGUF version {version}; versions 2 and 3 can be read")
    tensors, pairs = reader.scalar("Q"), reader.scalar("Q")

    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = reader.string()
        value = reader.value(reader.scalar("I"))
        if value is not None:
            metadata[key] = value

    end = 0
    for _ in range(tensors):
        reader.string()
        elements = 1
        dimensions = reader.scalar("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ModelFileError(f"{path} is damaged: a tensor has {dimensions} dimensions; fetch it again")
        for _ in range(dimensions):
            elements *= reader.scalar("Q")
        block, block_bytes = _BLOCKS.get(reader.scalar("I"), (1, 0))
        end = max(end, reader.scalar("Q") + elements // block * block_bytes)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelFileError(f"{path} is damaged: its general.alignment is {alignment!r}; fetch it again")
    data_start = -(-reader.position // alignment) * alignment
    return GGUFHeader(metadata, data_start + end)
