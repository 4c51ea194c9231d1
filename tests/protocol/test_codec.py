"""Structs to frames and back; whatever else arrives is a ProtocolError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackDecoder, MsgpackEncoder
from outboard.protocol.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreDead,
    EngineCoreOutputs,
    EngineInfo,
    ErrorReport,
    Failed,
    Hello,
    Init,
    OutputExtras,
    Ready,
    Refused,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
)
from outboard.protocol.sampling import SamplingParams
from outboard.protocol.tensors import ARRAY_EXT

EPOCH = 2**64 - 1  # any 64-bit number must fit
REPORT = ErrorReport("builtins.RuntimeError", "bo€m", "Traceback ...\n")
INFO = EngineInfo(max_model_len=77, vocab_size=99, max_num_seqs=3, model="m", extra={"answer": [1, None, "x"]})
EXTRAS = OutputExtras(
    logprobs={0: [{5: -0.5, 6: -1.5}]},
    results={1: {"text": "x", "bytes": b"\x00"}},
    errors={1: "why"},
    queue_times={0: 0.25},
    num_cached_tokens={0: 12},
)
ADD = AddRequest(EPOCH, 7, "user's id", b"\x01\x00\x00\x00", SamplingParams(n=2, stop="x"), {"image": b"i"}, 1, 2.5)
CALL = UtilityCall(EPOCH, 3, "method", [1, "two", None], {"three": 3.0})
OUTPUTS = EngineCoreOutputs(
    engine_index=1,
    epoch=EPOCH,
    sequence=9,
    timestamp=1.5,
    handles=[4, 5],
    tokens=[1, 2, 3],
    counts=[1, 2],
    finished=[(0, "stop", 13), (1, "length", None)],
    extras=EXTRAS,
    scheduler_stats=SchedulerStats(1, 2, 0.5),
    utility_output=UtilityOutput(3, {"a": 1}, REPORT),
    wave_complete=1,
    start_wave=2,
)
DEAD = EngineCoreDead(1, EPOCH, REPORT)
INIT = Init("m:C", {"o": 1}, ["", "/x"], 1, 2, 1000, 1 << 32, 1 << 16)
MESSAGES: list[Any] = [
    ADD,
    AbortRequests(EPOCH, [0, 1, 2**62]),
    CALL,
    REPORT,
    UtilityOutput(3, error=REPORT),
    UtilityOutput(-1, ["RECONFIGURE_FINISHED", 0]),
    EXTRAS,
    SchedulerStats(1, 2, 0.5),
    OUTPUTS,
    EngineCoreOutputs(0, 0, 0, 0.0),
    DEAD,
    INFO,
    Hello(1, "0.1.0", "secret", 1, 2, 3, 4),
    INIT,
    Ready("secret", INFO),
    Failed("secret", REPORT),
    Refused("because"),
]
WIRE_TYPES: list[Any] = [
    EngineCoreOutputs | EngineCoreDead,
    AddRequest,
    AbortRequests,
    UtilityCall,
    Hello | Ready | Failed,
    Init | Refused,
]
ENCODE = MsgpackEncoder(inline_bytes=64).encode


def round_trip(value: Any, type_: Any = Any) -> Any:
    body, *aux = ENCODE(value)
    return MsgpackDecoder[Any](type_).decode(body, aux)


# --- what is sent arrives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back(message: Any) -> None:
    assert round_trip(message, type(message)) == message


def test_the_output_union_is_told_apart_by_its_tag() -> None:
    decoder: MsgpackDecoder[Any] = MsgpackDecoder(EngineCoreOutputs | EngineCoreDead)
    assert decoder.decode(ENCODE(OUTPUTS)[0]) == OUTPUTS
    assert decoder.decode(ENCODE(DEAD)[0]) == DEAD
    assert isinstance(decoder.decode(ENCODE(EngineCoreOutputs(0, 0, 0, 0.0))[0]), EngineCoreOutputs)


def test_the_handshake_union_is_told_apart_by_its_tag() -> None:
    for message in (Hello(1, "0.1.0", "secret", 1, 2, 3, 4), Ready("secret", INFO), Failed("secret", REPORT)):
        assert round_trip(message, Hello | Ready | Failed) == message


def test_a_message_with_no_tensor_is_one_frame() -> None:
    assert all(len(ENCODE(message)) == 1 for message in MESSAGES)


def test_trailing_defaults_may_be_missing() -> None:
    decoder: MsgpackDecoder[Any] = MsgpackDecoder(EngineCoreOutputs | EngineCoreDead)
    body = msgspec.msgpack.encode([0, 1, 2, 3, 4.0, [5], [6]])
    assert decoder.decode(body) == EngineCoreOutputs(1, 2, 3, 4.0, handles=[5], tokens=[6])
    body = msgspec.msgpack.encode([0, 1, 2, 3, 4.0, [5], [6], None, None, [{}, {}, {0: "x"}]])
    assert decoder.decode(body).extras == OutputExtras(errors={0: "x"})


def test_an_empty_message_is_small() -> None:
    assert len(ENCODE(EngineCoreOutputs(1, 2, 3, 4.0))[0]) < 30


def test_defaults_are_not_shared_between_messages() -> None:
    first = round_trip(EngineCoreOutputs(0, 0, 0, 0.0), EngineCoreOutputs)
    first.handles.append(1)
    assert round_trip(EngineCoreOutputs(0, 0, 0, 0.0), EngineCoreOutputs).handles == []
    assert EngineCoreOutputs(0, 0, 0, 0.0).handles == []


def test_a_field_appended_by_a_later_version_is_ignored() -> None:
    body = msgspec.msgpack.encode([1, 0, 7, ["t", "m", "tb", "later"], "later"])
    assert MsgpackDecoder[Any](EngineCoreOutputs | EngineCoreDead).decode(body) == EngineCoreDead(
        0, 7, ErrorReport("t", "m", "tb")
    )


@pytest.mark.parametrize(
    ("scalar", "plain"),
    [
        (np.bool_(True), True),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.float16(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.str_("é"), "é"),
        (np.bytes_(b"x"), b"x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_numpy_scalar_arrives_as_a_plain_value(scalar: Any, plain: Any) -> None:
    value = round_trip({"x": [scalar]})["x"][0]
    assert value == plain
    assert type(value) is type(plain)


def test_numpy_ints_as_tokens_and_handles() -> None:
    message = EngineCoreOutputs(0, 0, 0, 0.0, handles=[1], tokens=list(np.arange(2, 4)), counts=[2])
    decoded = round_trip(message, EngineCoreOutputs)
    assert decoded.tokens == [2, 3]
    assert all(type(token) is int for token in decoded.tokens)


def test_dataclasses_structs_tuples_and_sets_are_carried() -> None:
    @dataclass
    class Point:
        x: int
        y: list[int]

    assert round_trip([Point(1, [2]), SchedulerStats(1, 2, 0.5), (1, 2), {3}]) == [
        {"x": 1, "y": [2]},
        [1, 2, 0.5],
        [1, 2],
        [3],
    ]


# --- what cannot be sent ---------------------------------------------------------------------------------------------


class Unknown:
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "builtins.object"),
        (Unknown(), f"{__name__}.Unknown"),
        (1j, "builtins.complex"),
        (np.complex64(1), "complex"),
        (len, "builtin_function_or_method"),
        (ValueError("x"), "builtins.ValueError"),
        (np.dtype("i4"), "numpy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_error_names_the_type_of_what_cannot_be_sent(value: Any, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        ENCODE(UtilityOutput(0, {"deep": [value]}))


def test_a_longdouble_scalar_is_a_type_error_or_a_float() -> None:
    """Its `item()` is a numpy longdouble again."""
    try:
        assert round_trip(np.longdouble(0.5)) == 0.5
    except TypeError as error:
        assert "longdouble" in str(error)


def test_a_value_that_holds_itself() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(RecursionError):
        ENCODE(cycle)


def test_an_encoder_goes_on_after_an_error() -> None:
    with pytest.raises(TypeError):
        ENCODE([np.zeros(1000), object()])
    body, *aux = ENCODE([np.ones(1000)])
    assert len(aux) == 1  # nothing of the message that failed
    assert MsgpackDecoder[Any](Any).decode(body, aux)[0].sum() == 1000


# --- what cannot be taken --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "body"),
    [
        (EngineCoreOutputs | EngineCoreDead, []),
        (EngineCoreOutputs | EngineCoreDead, [0, 0, 0, 0]),  # no timestamp
        (EngineCoreOutputs | EngineCoreDead, [2, 0, 0, 0, 0.0]),  # no such tag
        (EngineCoreOutputs | EngineCoreDead, {"engine_index": 0}),
        (EngineCoreOutputs | EngineCoreDead, None),
        (EngineCoreOutputs | EngineCoreDead, [0, 0, 0, 0, 0.0, ["1"], [2]]),
        (EngineCoreOutputs | EngineCoreDead, [0, 0, 0, 0, 0.0, [1], [2], None, [[0, "no such reason", None]]]),
        (EngineCoreOutputs | EngineCoreDead, [1, 0, 0, ["a", "b"]]),
        (AddRequest, [0, 0, "id", "text", {}]),
        (AddRequest, [0, 0, "id", b"", {"temperature": -1}]),
        (AddRequest, [0, 0, "id", b"", {"no_such_parameter": 1}]),
        (AbortRequests, [0, [1.5]]),
        (UtilityCall, [0, 0, "m", {}, []]),
        (UtilityCall, [0, 0, "m", [], {1: 2}]),
        (Hello, ["ready", "token", []]),
    ],
)
def test_a_message_of_another_shape(type_: Any, body: Any) -> None:
    with pytest.raises(ProtocolError, match=r"undecodable message: ."):
        MsgpackDecoder[Any](type_).decode(msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # never used in msgpack
        b"\xa1\xff",  # no UTF-8
        b"\x81\x80\x01",  # a key that cannot be hashed
        b"\xdd\xff\xff\xff\xff",  # 4 billion items, and none there
        b"\x91\xdf\xff\xff\xff\xff\x01",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 1_000_000,  # deeper than any stack
        b"\x01\x01",  # two values
        b"\xd7\xff" + b"\xff" * 8,  # a time stamp that is none
    ],
)
def test_malformed_msgpack(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        MsgpackDecoder[Any](Any).decode(body)


def test_an_unknown_extension_is_named() -> None:
    with pytest.raises(ProtocolError, match="extension 77"):
        MsgpackDecoder[Any](Any).decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(77, b"x")))


def test_a_bad_sampling_parameter_is_named() -> None:
    with pytest.raises(ProtocolError, match="top_p must be above 0 and at most 1, not 7"):
        MsgpackDecoder[Any](AddRequest).decode(msgspec.msgpack.encode([0, 0, "id", b"", {"top_p": 7.0}]))


def test_frames_that_are_missing() -> None:
    body, *aux = ENCODE([np.zeros(100), np.ones(100)])
    assert len(aux) == 2
    for there in ([], aux[:1]):
        with pytest.raises(ProtocolError, match="malformed array"):
            MsgpackDecoder[Any](Any).decode(body, there)


@pytest.mark.parametrize("value", [np.zeros(100), "no array at all"], ids=["one array", "no array"])
def test_frames_that_nothing_refers_to(value: Any) -> None:
    """Frames of the wrong count make a message garbage (DESIGN.md, section 8)."""
    body, *aux = ENCODE([value])
    with pytest.raises(ProtocolError):
        MsgpackDecoder[Any](Any).decode(body, [*aux, b"extra"])


def test_a_decoder_goes_on_after_an_error_and_keeps_no_frames_of_others() -> None:
    decoder: MsgpackDecoder[Any] = MsgpackDecoder(Any)
    body, *aux = ENCODE([np.ones(100)])
    with pytest.raises(ProtocolError):
        decoder.decode(b"\xc1", aux)
    with pytest.raises(ProtocolError):
        decoder.decode(body)
    assert decoder.decode(body, aux)[0].sum() == 100


# --- random junk -----------------------------------------------------------------------------------------------------

DECODERS: list[MsgpackDecoder[Any]] = [MsgpackDecoder(type_) for type_ in WIRE_TYPES]
WITH_ARRAYS: list[Any] = [
    UtilityCall(EPOCH, 3, "method", [np.arange(3), np.zeros(50)], {"a": np.ones((2, 50), "f2")}),
    EngineCoreOutputs(0, 0, 0, 0.0, [1], [2], extras=OutputExtras(results={0: np.zeros(50, ">i4")})),
]
VALID = [ENCODE(message) for message in MESSAGES + WITH_ARRAYS]


def only_protocol_errors(body: bytes, aux: list[Any]) -> None:
    for decoder in DECODERS:
        try:
            decoder.decode(body, aux)
        except ProtocolError as error:
            assert str(error)


@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=2))
def test_random_bytes_are_decoded_or_a_protocol_error(body: bytes, aux: list[bytes]) -> None:
    only_protocol_errors(body, aux)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[bytes, list[Any]]:
    frames = draw(st.sampled_from(VALID))
    body = bytearray(frames[0])
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(body)))
        match draw(st.sampled_from(["flip", "cut", "insert", "delete"])):
            case "flip" if position < len(body):
                body[position] = draw(st.integers(0, 255))
            case "cut":
                del body[position:]
            case "insert":
                body[position:position] = draw(st.binary(min_size=1, max_size=4))
            case "delete":
                del body[position : position + draw(st.integers(1, 4))]
    aux = draw(st.sampled_from([frames[1:], frames[1:2], [], [b"", *frames[1:]]]))
    return bytes(body), list(aux)


@given(mutated())
def test_mutated_messages_are_decoded_or_a_protocol_error(frames: tuple[bytes, list[Any]]) -> None:
    only_protocol_errors(*frames)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=14) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner),
    max_leaves=20,
)


@given(json_like)
def test_well_formed_values_of_a_wrong_shape(value: Any) -> None:
    only_protocol_errors(msgspec.msgpack.encode(value), [])


@given(json_like)
def test_any_msgpack_value_comes_back(value: Any) -> None:
    decoded = round_trip(UtilityOutput(0, value), UtilityOutput).result
    assert msgspec.msgpack.encode(decoded) == msgspec.msgpack.encode(value)


@given(
    dtype=st.text(max_size=6) | st.text("i4f,()[]{}<>|0123456789 OSUVMmTa:\"'", max_size=8),
    shape=st.lists(st.integers(-(2**63), 2**64 - 1) | st.integers(0, 4), max_size=4),
    data=st.binary(max_size=16) | st.integers(-(2**63), 2**64 - 1),
)
@example(dtype="i4,(", shape=[1], data=b"abcd")
def test_random_arrays_are_decoded_or_a_protocol_error(dtype: str, shape: list[int], data: Any) -> None:
    payload = msgspec.msgpack.encode((dtype, shape, data))
    only_protocol_errors(
        msgspec.msgpack.encode([0, 0, "method", [msgspec.msgpack.Ext(ARRAY_EXT, payload)], {}]), [b"12345678"]
    )
