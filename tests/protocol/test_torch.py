"""torch tensors inside messages. Without torch only what happens where it is missing is tested."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import msgspec
import numpy as np
import pytest

from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackDecoder, MsgpackEncoder
from outboard.protocol.messages import EngineCoreOutputs, OutputExtras, UtilityCall, UtilityOutput
from outboard.protocol.shm import SlotPool, SlotReader
from outboard.protocol.tensors import TENSOR_EXT

WAYS = ["inline", "frame", "slot"]
NAMES = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16"]
NAMES += ["float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]
NAMES += ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (2, 0, 3), (3, 4), (1, 5, 1)]


@pytest.fixture(scope="session")
def torch() -> Any:
    return pytest.importorskip("torch")


class Path:
    """Encoder and decoder by which everything goes the same way."""

    def __init__(self, way: str) -> None:
        self.pool = SlotPool(1 << 20)
        assert self.pool.address is not None
        reader = SlotReader(self.pool.address)
        self.encoder = MsgpackEncoder(1 << 20 if way == "inline" else 0, 0 if way == "slot" else 1 << 30, self.pool)
        self.decoder: MsgpackDecoder[Any] = MsgpackDecoder(Any, reader)

    def through(self, value: Any) -> Any:
        body, *aux = self.encoder.encode(value)
        return self.decoder.decode(body, aux)


def bits(torch: Any, tensor: Any) -> bytes:
    """A tensor's bytes, in the order of its items."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def made(torch: Any, name: str, shape: tuple[int, ...]) -> Any:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    count = int(np.prod(shape))
    if name == "bool":
        return (torch.arange(count) % 2 == 0).reshape(shape)
    data = bytearray(b"\x01\x23\x42\x11\x05" * (count * dtype.itemsize))[: count * dtype.itemsize]
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_comes_back(torch: Any, name: str, shape: tuple[int, ...], way: str) -> None:
    tensor = made(torch, name, shape)
    back = Path(way).through({"x": [tensor]})["x"][0]
    assert type(back) is torch.Tensor
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bits(torch, back) == bits(torch, tensor)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "complex64"])
def test_views_arrive_as_what_they_show(torch: Any, name: str, way: str) -> None:
    path = Path(way)
    tensor = made(torch, name, (6, 10))
    views = [tensor.T, tensor[::2], tensor[:, 3:5], tensor[2, 3], tensor[0].expand(4, 10), tensor[3:3], tensor[None]]
    if name == "complex64":
        views += [tensor.conj(), tensor.conj().imag]
    for view in views:
        back = path.through(view)
        assert back.shape == view.shape
        assert bits(torch, back) == bits(torch, view)


@pytest.mark.parametrize("way", WAYS)
def test_what_arrives_is_writable_and_its_own(torch: Any, way: str) -> None:
    path = Path(way)
    tensor = torch.ones(100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        body, *aux = path.encoder.encode(tensor)
        back = path.decoder.decode(body, [bytes(frame) for frame in aux])
    back += 1
    assert (back == 2).all() and (tensor == 1).all()
    assert path.pool.held == (way == "slot")
    part = back[5:].reshape(5, 19)[2]
    del back
    assert path.pool.held == (way == "slot")
    del part
    assert path.pool.held == 0


def test_gradients_stay_behind(torch: Any) -> None:
    for tensor in (torch.ones(3, requires_grad=True) * 2, torch.nn.Parameter(torch.ones(3))):
        back = Path("inline").through(tensor)
        assert type(back) is torch.Tensor
        assert not back.requires_grad and torch.equal(back, tensor.detach())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_has_no_plain_memory_here_is_refused(torch: Any) -> None:
    path = Path("slot")
    for tensor, why in [
        (torch.zeros(3, device="meta"), "on meta"),
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8"),
    ]:
        with pytest.raises(TypeError, match=why):
            path.encoder.encode([torch.ones(100), tensor])
        assert path.pool.held == 0


def test_numpy_and_torch_keep_apart(torch: Any) -> None:
    back = Path("slot").through([torch.ones(3), np.ones(3), torch.ones(1).item()])
    assert [type(value) for value in back] == [torch.Tensor, np.ndarray, float]


# --- where torch is missing ------------------------------------------------------------------------------------------


def ext(dtype: Any = "float32", shape: Any = (2,), data: Any = b"12345678") -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(TENSOR_EXT, msgspec.msgpack.encode((dtype, shape, data)))


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.usefixtures("no_torch")
def test_without_torch_a_message_of_one_thing_fails_with_what_to_do() -> None:
    encode = MsgpackEncoder(64).encode
    decoder: MsgpackDecoder[Any] = MsgpackDecoder(UtilityCall)
    with pytest.raises(ProtocolError, match="import torch there"):
        decoder.decode(encode(UtilityCall(1, 2, "m", [[ext()]], {}))[0])
    with pytest.raises(ProtocolError, match="import torch there"):
        decoder.decode(encode(UtilityCall(1, 2, "m", [], {"x": ext(data=0)}))[0], [b"frame"])
    assert "torch" not in sys.modules


@pytest.mark.usefixtures("no_torch")
def test_without_torch_only_the_results_with_tensors_fail() -> None:
    outputs = EngineCoreOutputs(
        0,
        1,
        2,
        0.0,
        handles=[7, 8, 9, 10],
        tokens=[1, 2, 3, 4],
        finished=[(0, "stop", None), (1, "length", None)],
        extras=OutputExtras(results={0: {"a": [ext()]}, 1: "fine", 2: ext(), 3: [1]}),
        utility_output=UtilityOutput(5, [ext()]),
    )
    decoder: MsgpackDecoder[Any] = MsgpackDecoder(EngineCoreOutputs)
    back = decoder.decode(MsgpackEncoder(64).encode(outputs)[0])
    assert back.extras.results == {1: "fine", 3: [1]}
    assert sorted(back.extras.errors) == [0, 2] and "import torch" in back.extras.errors[2]
    assert sorted(back.finished) == [(0, "error", None), (1, "length", None), (2, "error", None)]
    assert back.utility_output.result is None
    assert back.utility_output.error.type == "outboard.errors.ProtocolError"


@pytest.mark.usefixtures("no_torch")
def test_without_torch_slots_are_freed_all_the_same() -> None:
    path = Path("slot")
    body = path.encoder.encode(np.arange(100.0))[0]
    slot = msgspec.msgpack.decode(msgspec.msgpack.decode(body).data)[2]
    assert path.pool.held == 1
    with pytest.raises(ProtocolError, match="import torch"):
        path.through([ext("float64", (100,), slot)])
    assert path.pool.held == 0


def test_malformed_tensors(torch: Any) -> None:
    for wrong in [
        ext(shape=(3,)),
        ext(shape=(-2,)),
        ext(data=b"1234567"),
        ext(data=3),
        ext(data=-1),
        ext(dtype=4),
        ext(shape=(2**62, 4)),
        msgspec.msgpack.Ext(TENSOR_EXT, b"\xc1"),
    ]:
        with pytest.raises(ProtocolError, match="malformed tensor"):
            Path("inline").decoder.decode(msgspec.msgpack.encode(wrong))
    for unknown in ("no_such_type", "nn", "Tensor"):
        with pytest.raises(ProtocolError, match="has no such type"):
            Path("inline").decoder.decode(msgspec.msgpack.encode(ext(dtype=unknown)))
