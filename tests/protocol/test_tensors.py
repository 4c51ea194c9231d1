"""numpy arrays inside messages."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackDecoder, MsgpackEncoder
from outboard.protocol.messages import UtilityOutput
from outboard.protocol.tensors import ARRAY_EXT, Inlet, Outlet, pack_array, unpack_array

INLINE = 64
PLAIN_DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "F", "D", "G"]
PLAIN_DTYPES += [">i2", ">i4", ">u8", ">f2", ">f4", ">f8", ">c16", ">M8[s]"]
PLAIN_DTYPES += ["M8[D]", "M8[ns]", "M8[25s]", "m8[us]", "m8[h]", "S1", "S5", "U3", ">U3", "V5"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (1, 1, 1), (2, 0, 3), (0, 0), (3, 4), (40, 1, 2), (2,) * 8]

encoder = MsgpackEncoder(INLINE)
decoder: MsgpackDecoder[Any] = MsgpackDecoder(Any)


def through(value: Any) -> Any:
    body, *aux = encoder.encode(value)
    return decoder.decode(body, aux)


def filled(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of no two equal bytes next to each other; of valid characters where it holds text."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    if kind.kind == "U":
        return np.array([chr(65 + i % 26) * 2 for i in range(count)], dtype=kind).reshape(shape)
    if kind.kind == "b":
        return (np.arange(count) % 2 == 0).reshape(shape)
    data = (np.arange(count * kind.itemsize) % 100 + 1).astype(np.uint8)  # no NaN, no NaT
    return np.frombuffer(data.tobytes(), kind).reshape(shape) if count else np.empty(shape, kind)


@pytest.mark.parametrize("inline", [0, 1 << 20], ids=["as a frame", "inline"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
def test_every_plain_array_comes_back(dtype: str, shape: tuple[int, ...], inline: int) -> None:
    array = filled(dtype, shape)
    body, *aux = MsgpackEncoder(inline).encode(array)
    assert len(aux) == (1 if array.nbytes > inline else 0)
    back = decoder.decode(body, aux)
    assert back.dtype == array.dtype
    assert back.dtype.str == array.dtype.str  # the byte order too
    assert back.shape == shape
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("inline", [0, 1 << 20], ids=["as a frame", "inline"])
@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[::2],
        lambda array: array[::-1],
        lambda array: array[:, ::3],
        lambda array: array[1:5, 2:4],
        lambda array: array.T,
        lambda array: np.asfortranarray(array),
        lambda array: np.broadcast_to(array[0], (5, array.shape[1])),
        lambda array: array[np.newaxis, ..., 0],
        lambda array: array[3, 3],
        lambda array: array[3:3],
    ],
    ids=["step", "reversed", "columns", "block", "transposed", "fortran", "broadcast", "new axis", "scalar", "empty"],
)
def test_views_arrive_with_the_values_that_they_show(view: Any, inline: int) -> None:
    array = view(np.arange(60, dtype="i4").reshape(6, 10))
    body, *aux = MsgpackEncoder(inline).encode([array])
    back = decoder.decode(body, aux)[0]
    np.testing.assert_array_equal(back, array)
    assert np.shape(back) == np.shape(array)


def test_nan_infinity_and_nat_keep_their_bits() -> None:
    floats = np.array([np.nan, -np.inf, -0.0])
    assert through(floats).tobytes() == floats.tobytes()
    assert np.isnat(through(np.array(["NaT", "2020-01-01"], "M8[D]"))).tolist() == [True, False]


# --- inline or frame -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "frames"), [(INLINE - 1, 0), (INLINE, 0), (INLINE + 1, 1)])
def test_the_size_in_bytes_decides(size: int, frames: int) -> None:
    assert len(encoder.encode(np.zeros(size, "u1"))) == 1 + frames
    assert len(encoder.encode(np.zeros(size // 8 + (size % 8 > 0), "f8"))) == 1 + frames


def test_a_frame_is_the_memory_of_a_contiguous_array() -> None:
    for array in (np.arange(100.0), np.zeros((10, 10), "f2"), np.arange(200)[50:150], np.zeros(99, "M8[s]")):
        _, aux = encoder.encode({"x": array})
        assert np.shares_memory(np.frombuffer(aux, "u1"), array)
        assert len(aux) == array.nbytes
        assert memoryview(aux).format == "B"


def test_a_frame_of_a_view_with_gaps_is_a_copy() -> None:
    array = np.arange(200)
    _, aux = encoder.encode(array[::2])
    assert not np.shares_memory(np.frombuffer(aux, "u1"), array)


def test_a_read_only_array_can_be_sent() -> None:
    array = np.arange(100)
    array.flags.writeable = False
    _, aux = encoder.encode(array)
    assert np.shares_memory(np.frombuffer(aux, "u1"), array)


def test_arrived_arrays_are_views_of_their_frame() -> None:
    body, _ = encoder.encode(np.arange(100))
    frame = np.arange(100).tobytes()
    assert np.shares_memory(decoder.decode(body, [frame]), np.frombuffer(frame, "u1"))


@pytest.mark.parametrize("size", [0, 1, 100])
def test_arrived_arrays_are_read_only(size: int) -> None:
    body, *aux = encoder.encode(np.zeros(size))
    back = decoder.decode(body, [bytearray(frame) for frame in aux])  # a buffer that could be written to
    assert not back.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        back[...] = 1


def test_an_inline_array_outlives_the_message() -> None:
    body = bytearray(encoder.encode([np.arange(5)])[0])
    back = decoder.decode(body)[0]
    body[:] = b"\xff" * len(body)
    assert back.tolist() == [0, 1, 2, 3, 4]


def test_the_encoder_lets_go_of_an_array_with_its_frames() -> None:
    array = np.zeros(100)
    gone = weakref.ref(array)
    frames = encoder.encode(array)
    del array, frames
    gc.collect()
    assert gone() is None


# --- inside other values ---------------------------------------------------------------------------------------------


def test_arrays_anywhere_in_a_message_keep_their_places() -> None:
    value = {
        "large": np.full(100, 1),
        "small": np.full(2, 2),
        "list": [np.full((50, 2), 3), {"deep": np.full(100, 4)}, None],
        "same": [np.full(100, 5)] * 2,
    }
    body, *aux = encoder.encode(UtilityOutput(0, value))
    assert len(aux) == 5
    back = MsgpackDecoder[UtilityOutput](UtilityOutput).decode(body, aux).result
    assert set(back) == set(value)
    assert (back["large"] == 1).all()
    assert (back["small"] == 2).all()
    assert back["list"][0].shape == (50, 2) and (back["list"][0] == 3).all()
    assert (back["list"][1]["deep"] == 4).all() and back["list"][2] is None
    assert all((array == 5).all() for array in back["same"])


@given(st.lists(st.tuples(st.sampled_from(PLAIN_DTYPES), st.sampled_from(SHAPES)), max_size=8))
def test_any_mixture_of_arrays(specs: list[tuple[str, tuple[int, ...]]]) -> None:
    arrays = [filled(dtype, shape) for dtype, shape in specs]
    for sent, back in zip(arrays, through(arrays), strict=True):
        assert (back.dtype, back.shape, back.tobytes()) == (sent.dtype, sent.shape, sent.tobytes())


# --- what cannot be sent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array([[1, "x"]], dtype=object),
        np.zeros(0, dtype=object),
        np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
        np.zeros(2, "V0"),
    ],
    ids=["object", "mixed", "empty object", "structured", "items of no bytes"],
)
def test_object_and_structured_arrays_are_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(TypeError, match=r"numpy array of dtype .* cannot be sent: its items are not plain"):
        encoder.encode([array])


def test_a_masked_array_is_refused_or_keeps_its_mask() -> None:
    """Its buffer holds what is masked: to send that would turn missing values into real ones."""
    array = np.ma.masked_array([1, 2, 3], [False, True, False])
    try:
        back = through(array)
    except TypeError as error:
        assert "masked" in str(error)
    else:
        assert np.ma.is_masked(back)


# --- what cannot be taken --------------------------------------------------------------------------------------------

FRAME = bytes(range(8))


def unpack(*fields: Any, aux: Any = (FRAME,)) -> np.ndarray[Any, Any]:
    return unpack_array(memoryview(msgspec.msgpack.encode(fields)), Inlet(aux))


def test_what_the_malformed_payloads_below_differ_from() -> None:
    assert unpack("<i4", [2], FRAME).tolist() == unpack("<i4", [2], 0).tolist()


@pytest.mark.parametrize(
    "fields",
    [
        (),
        ("<i4", [2]),
        ("<i4", [2], None),
        ("<i4", 2, FRAME),
        (4, [2], FRAME),
        ("<i4", [2.0], FRAME),
        ("<i4", [3], FRAME),
        ("<i4", [1], FRAME),
        ("<i4", [], FRAME),
        ("<i4", [2], FRAME[:7]),
        ("<i4", [2], b""),
        ("<i4", [2**64 - 1], FRAME),
        ("<i4", [2**62, 4], FRAME),
        ("<i4", [0, 2**63], b""),
        ("<i4", [1] * 70 + [2], FRAME),
        ("<i4", [2], 1),
        ("<i4", [2], [0, 1, 0]),
        ("<i4", [2], [0, 1]),
        ("<i4", [2], 2**63),
        ("no such type", [2], FRAME),
        ("<M8[foo]", [1], FRAME),
        ("", [2], FRAME),
        ("\0", [2], FRAME),
        ("S0", [2], FRAME),
    ],
    ids=repr,
)
def test_a_malformed_payload(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError, match="malformed array"):
        unpack(*fields)


@pytest.mark.parametrize(
    "fields",
    [
        ("<i4", [2], -1),
        ("<i4", [-1], FRAME),
        ("<i4", [-1, 1], FRAME),
    ],
    ids=["negative frame number", "negative shape", "one negative dimension"],
)
def test_negative_numbers_count_from_nowhere(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError, match="malformed array"):
        unpack(*fields)


@pytest.mark.parametrize("dtype", ["i4,(", ",,", "(1,)(1,)i4,,"])
def test_a_dtype_that_numpy_reads_as_python(dtype: str) -> None:
    """numpy parses comma strings with `ast.literal_eval`, which raises SyntaxError."""
    with pytest.raises(ProtocolError, match="malformed array"):
        unpack(dtype, [2], FRAME)


@pytest.mark.parametrize("dtype", ["O", "<i2,<i2", "(2,)i2", "T"])
def test_a_dtype_that_is_never_sent(dtype: str) -> None:
    for shape, data in (([2], FRAME), ([0], b"")):
        with pytest.raises(ProtocolError, match="malformed array"):
            unpack(dtype, shape, data)


def test_payloads_that_are_no_msgpack() -> None:
    for payload in (b"", b"\xc1", b"\x93", FRAME):
        with pytest.raises(ProtocolError, match="malformed array"):
            unpack_array(memoryview(payload), Inlet())


def test_frames_are_numbered_one_after_the_other() -> None:
    outlet = Outlet(INLINE)
    for number in range(3):
        packed = pack_array(np.zeros(100), outlet)
        assert packed.code == ARRAY_EXT
        assert msgspec.msgpack.decode(packed.data)[2] == number
    assert len(outlet.frames) == 3
