"""Bad messages out of good ones: by their bytes, by their frames, and by the values in them. The same for a seed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

__all__ = ["Mutator", "deep", "extension"]

Frames = list[bytes]

_encode = msgspec.msgpack.Encoder().encode
_tree = msgspec.msgpack.Decoder(ext_hook=msgspec.msgpack.Ext).decode


def deep(levels: int, opening: bytes = b"\x91") -> msgspec.Raw:
    """Arrays in arrays; with `opening` b"\\x81\\x00" maps in maps."""
    return msgspec.Raw(opening * levels + b"\xc0")


def extension(code: int, header: Any) -> msgspec.msgpack.Ext:
    """An extension with a msgpack payload, as arrays and tensors have."""
    return msgspec.msgpack.Ext(code, _encode(header))


_DTYPES = [
    *("<f4", "<i4", "|u1", "|b1", "<f8", ">u2", "<c16", "<M8[s]", "<U2", "|S3", "|V4", "float32", "int64", "uint8"),
    *("|O", "<V0", "|S0", "<f3", "<i4,<i4", "f4", "<M8[99999999999s]", "<U999999999999999999999", "<f1", "<m8[Y]"),
    *("bool", "quint8", "Tensor", "float8_e4m3fn", "complex32", "nn.Module", "\0", "", "|V1152921504606846976", "<c1"),
    *("<M8[0s]", "<m8[foo]", "|S4294967295", "<U536870911", "float4_e2m1fn_x2", "bits1x8", "qint32", "dtype"),
]
_SHAPES = [
    *([], [0], [1], [2], [3], [4], [2, 2], [1] * 3, [-1], [2, -2], [0, -1], [-1, 0], [0, 2**62], [2**62, 0]),
    *([2**63 - 1], [2**64 - 1], [2**32, 2**32], [2**62, 4], [0] * 65, [1] * 65, [1] * 1000, [2**31], [-(2**63)]),
    *([0, 2**40, 2**40], [1.5], [None], ["1"], "12", {}, [[1]], [2**64 - 1, 0], [0, 2**63]),
]
_BYTES = [b"", b"\0", b"\0" * 4, b"\xff" * 8, b"\1" * 16, b"x" * 4097]
_INTS = [
    *(0, 1, 2, 3, -1, -2, 127, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63 - 1, 2**63),
    *(2**64 - 1, -(2**63), 1 << 40, 7, 17, 1023, 1024),
]
# A map whose key is an array of this package is no map.
_ARRAY_KEY = msgspec.Raw(b"\x81" + _encode(extension(1, ("|u1", [1], b"x"))) + b"\xc0")


class Mutator:
    """Mutates samples, which are valid messages as frames.

    Args:
        samples: of one decoder; a mutation may mix two of them.
        random: the source of every choice.
        values: interesting values beside those that are always tried, such as references to slots that exist.
    """

    def __init__(self, samples: Sequence[Frames], random: Random, values: Sequence[Any] = ()) -> None:
        self._samples = samples
        self._random = random
        self._own = list(values)
        self._trees: list[tuple[int, int, Any, list[tuple[Any, Any]]]] = []
        for number, frames in enumerate(samples):
            for position, frame in enumerate(frames):
                try:
                    tree = _tree(frame)
                except (msgspec.DecodeError, ValueError, RecursionError):
                    continue
                slots: list[tuple[Any, Any]] = []
                _find_slots(tree, slots)
                if slots:
                    self._trees.append((number, position, tree, slots))
        self._bytewise: list[Callable[[bytearray], None]] = [
            *(self._flip, self._flip, self._set, self._set, self._cut, self._insert, self._remove, self._repeat),
            *(self._overwrite, self._splice, self._huge),
        ]

    def make(self) -> Frames:
        """The next message; one in a hundred is a good one."""
        choice = self._random.random()
        if choice < 0.5 and self._trees:
            frames = self._of_values()
            if choice < 0.42:
                return frames
        else:
            frames = self._pick()
            if choice > 0.99:
                return frames
        if choice > 0.94 or not frames:
            self._framewise(frames)
        else:
            self._at_bytes(frames)
        return frames

    def _choose(self, options: Sequence[Any]) -> Any:
        """As `Random.choice`, in half the time."""
        return options[int(self._random.random() * len(options))]

    def _pick(self) -> Frames:
        return list(self._choose(self._samples))

    # --- values ---

    def _of_values(self) -> Frames:
        """A sample with one to three of its values replaced by others."""
        number, position, tree, slots = self._choose(self._trees)
        undo = []
        for _ in range(self._choose((1, 1, 1, 2, 3))):
            container, key = self._choose(slots)
            undo.append((container, key, container[key]))
            container[key] = self._value(container[key])
        frames = list(self._samples[number])
        try:
            frames[position] = _encode(tree)
        except (OverflowError, ValueError, RecursionError):
            pass  # what cannot be encoded cannot come
        for container, key, value in reversed(undo):
            container[key] = value
        return frames

    def _value(self, old: Any) -> Any:
        random = self._random
        kind = random.randrange(16)
        if kind < 4 and isinstance(old, int):
            return self._choose((old + 1, old - 1, old ^ 1 << random.randrange(40), -old)) % 2**63
        if kind < 5 and isinstance(old, list):
            return self._choose((old * 2, old[:-1], old[1:], [*old, None], old[::-1], [old], copy.copy(old) * 40))
        if kind < 5 and isinstance(old, (str, bytes)):
            return self._choose((old * 2, old[1:], old[:-1], old[:0]))
        if kind < 8:
            return self._choose(_INTS)
        if kind < 11:
            return self._array(old)
        if kind == 11:
            return self._choose(_BYTES)
        if kind == 12 and self._own:
            return self._choose(self._own)
        return self._choose(_VALUES)

    def _array(self, old: Any) -> msgspec.msgpack.Ext:
        """An extension like those of arrays and tensors: of odd parts, or with one odd part."""
        random = self._random
        header: list[Any] = [self._choose(_DTYPES), self._choose(_SHAPES), self._data()]
        code = self._choose((1, 1, 1, 2, 2, 0, 3, -1, 127))
        if isinstance(old, msgspec.msgpack.Ext):
            code = self._choose((old.code, old.code, code))
            try:
                whole = _tree(old.data)
                whole[random.randrange(len(whole))] = header[random.randrange(3)]
                header = whole
            except (msgspec.DecodeError, ValueError, TypeError, IndexError, RecursionError):
                pass
        try:
            return extension(code, header)
        except OverflowError:
            return msgspec.msgpack.Ext(code, b"")

    def _data(self) -> Any:
        random = self._random
        if self._own and random.random() < 0.5:
            return self._choose(self._own)
        return self._choose((self._choose(_BYTES), self._choose(_INTS), random.choices(_INTS, k=3)))

    # --- frames ---

    def _framewise(self, frames: Frames) -> None:
        random = self._random
        for _ in range(self._choose((1, 1, 2, 5))):
            act = random.randrange(6)
            if act == 0 or not frames:
                frames.insert(random.randint(0, len(frames)), self._choose((b"", b"\0", random.randbytes(20))))
            elif act == 1:
                frames.pop(random.randrange(len(frames)))
            elif act == 2:
                frames.append(frames[random.randrange(len(frames))])
            elif act == 3:
                random.shuffle(frames)
            elif act == 4:
                frames += self._pick()
            else:
                frames[random.randrange(len(frames))] = random.randbytes(random.randrange(60))

    # --- bytes ---

    def _at_bytes(self, frames: Frames) -> None:
        random = self._random
        position = random.randrange(len(frames)) if random.random() < 0.2 else _largest(frames)
        data = bytearray(frames[position])
        for _ in range(self._choose((1, 1, 2, 4))):
            self._choose(self._bytewise)(data)
        frames[position] = bytes(data)

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def _set(self, data: bytearray) -> None:
        if data:
            data[self._random.randrange(len(data))] = self._random.randrange(256)

    def _cut(self, data: bytearray) -> None:
        del data[self._random.randint(0, len(data)) :]

    def _insert(self, data: bytearray) -> None:
        position = self._random.randint(0, len(data))
        data[position:position] = self._random.randbytes(self._random.randint(1, 9))

    def _remove(self, data: bytearray) -> None:
        start = self._random.randint(0, len(data))
        del data[start : start + self._random.randint(1, 9)]

    def _repeat(self, data: bytearray) -> None:
        start = self._random.randint(0, len(data))
        data[start:start] = data[start : start + 30] * self._random.randint(1, 3)

    def _overwrite(self, data: bytearray) -> None:
        start = self._random.randint(0, len(data))
        piece = self._random.randbytes(self._random.randint(1, 12))
        data[start : start + len(piece)] = piece

    def _splice(self, data: bytearray) -> None:
        other = self._choose(self._samples)
        if other:
            donor = other[self._random.randrange(len(other))]
            data[self._random.randint(0, len(data)) :] = donor[self._random.randint(0, len(donor)) :]

    def _huge(self, data: bytearray) -> None:
        """A length that is not there: of a string, bytes, an array, a map or an extension."""
        start = self._random.randint(0, len(data))
        lead = self._choose((b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9", b"\xdc", b"\xda", b"\xde", b"\xc8"))
        length = self._choose((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\xff\xff\xff", b"\x00\x00\x00\x40"))
        data[start : start + 1] = lead + length


def _largest(frames: Frames) -> int:
    """Which frame holds most; of several, the first: a body, not what comes with it."""
    return max(range(len(frames)), key=lambda position: len(frames[position]))


def _find_slots(tree: Any, slots: list[tuple[Any, Any]]) -> None:
    """Every place in a tree, as container and key, that can be given another value."""
    if isinstance(tree, (list, dict)):
        for key in range(len(tree)) if isinstance(tree, list) else list(tree):
            slots.append((tree, key))
            _find_slots(tree[key], slots)


_VALUES: list[Any] = [
    *(None, True, False, 0.0, -1.5, float("nan"), float("inf"), -float("inf"), 1e308),
    *("", "x", "é😀", "x" * 5000, [], [[]], {}, {"": ""}, {1: 2}, [None] * 20, [0] * 300, list(range(20)), ["a", "b"]),
    *(
        {1: [{2: 0.5}]},
        {0: "error"},
        {-1: None},
        {2**63: 1},
        [0, "stop", None],
        [[0, "stop", "\n"]],
        [[99, "error", 1]],
    ),
    *(deep(50), deep(900), deep(1200), deep(100_000), deep(100_000, b"\x81\x00"), deep(900, b"\x81\x00"), _ARRAY_KEY),
    *(msgspec.Raw(b"\xdd\xff\xff\xff\xff"), msgspec.Raw(b"\xdf\x7f\xff\xff\xff"), msgspec.Raw(b"\xdc\xff\xff" * 800)),
    *(
        msgspec.Raw(b"\xc1"),
        msgspec.Raw(b"\xdb\xff\xff\xff\xff"),
        msgspec.Raw(b"\xa2\xff\xfe"),
        msgspec.Raw(b"\x81\x90\x01"),
    ),
    *(msgspec.Raw(b"\xd6\xff\x00\x00\x00\x00"), msgspec.Raw(b"\xc7\x0c\xff" + b"\xff" * 12), msgspec.Raw(b"\x91" * 40)),
    *(extension(1, ("<f4", [2], b"\0" * 8)), extension(2, ("float32", [2], b"\0" * 8)), extension(1, ("|u1", [1], 0))),
    *(
        extension(1, (1, 2, 3)),
        msgspec.msgpack.Ext(1, b"\x91" * 3000),
        msgspec.msgpack.Ext(2, b"\x93\xa1x" + b"\x91" * 3000),
    ),
    *([-1, "x"], ["SCALE", 1], ["SCALE", True], ["SCALE", 2**64 - 1]),
]
