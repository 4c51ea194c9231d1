"""Leased shared-memory slots, both ends in one process: who holds what, and until when."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboard.engine.incoming import Incoming
from outboard.engine.port import SocketPort
from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackDecoder, MsgpackEncoder
from outboard.protocol.extents import Extents
from outboard.protocol.messages import AddRequest, EngineCoreOutputs, UtilityCall, UtilityOutput
from outboard.protocol.sampling import SamplingParams
from outboard.protocol.shm import GRANULE, MAX_LEASES, ArenaAddress, SlotPool, SlotReader, SlotRef
from outboard.protocol.shm_pair import SharedMemory

MIB = 1 << 20
LIMIT = 4 * MIB


@pytest.fixture
def pair() -> Iterator[tuple[SlotPool, SlotReader]]:
    pool = SlotPool(LIMIT)
    reader = SlotReader(address_of(pool))
    yield pool, reader
    reader.close()
    pool.close()


def address_of(pool: SlotPool) -> ArenaAddress:
    assert pool.address is not None
    return pool.address


def leased(pool: SlotPool, size: int) -> SlotRef:
    lease = pool.lease(size)
    assert lease is not None
    return lease[0]


def codecs(pool: SlotPool, reader: SlotReader, type_: Any = Any) -> tuple[MsgpackEncoder, MsgpackDecoder[Any]]:
    return MsgpackEncoder(64, 1024, pool), MsgpackDecoder(type_, reader)


# --- the life of a slot ----------------------------------------------------------------------------------------------


def test_what_is_written_is_seen_and_freed_with_the_last_view(pair: tuple[SlotPool, SlotReader]) -> None:
    pool, reader = pair
    lease = pool.lease(1000)
    assert lease is not None
    ref, slot = lease
    slot[:] = bytes(range(250)) * 4
    view = reader.open(ref, 1000)
    assert view.tobytes() == bytes(range(250)) * 4
    assert (pool.held, reader.held) == (1, 1)
    part = memoryview(view[10:20]).toreadonly()
    del view
    assert pool.held == 1
    del part
    assert (pool.held, reader.held) == (0, 0)


def test_a_view_may_die_in_any_thread(pair: tuple[SlotPool, SlotReader]) -> None:
    pool, reader = pair
    views = [reader.open(leased(pool, 1000), 1000) for _ in range(5)]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert pool.held == 0


def test_memory_is_used_again(pair: tuple[SlotPool, SlotReader]) -> None:
    pool, reader = pair
    for size in [MIB, 3 * MIB, 1, 2 * MIB] * 20:
        reader.open(leased(pool, size), size)  # dies at once
    assert pool.reserved <= 3 * MIB


def test_at_the_bound_there_is_no_slot_until_one_is_freed(pair: tuple[SlotPool, SlotReader]) -> None:
    pool, reader = pair
    views = [reader.open(leased(pool, MIB), MIB) for _ in range(4)]
    assert pool.lease(1) is None
    assert pool.reserved == LIMIT
    del views[1]
    assert pool.lease(MIB + 1) is None
    ref = leased(pool, MIB)
    pool.give_back(ref)
    views.clear()
    assert pool.lease(LIMIT + 1) is None
    leased(pool, LIMIT)


def test_the_number_of_leases_is_bounded() -> None:
    pool = SlotPool((MAX_LEASES + 10) * GRANULE)
    reader = SlotReader(address_of(pool))
    refs = [leased(pool, 1) for _ in range(MAX_LEASES)]
    assert pool.lease(1) is None
    reader.free(refs[7])
    assert leased(pool, 1).index == refs[7].index


def test_no_receiver_no_slot() -> None:
    assert SlotPool(LIMIT).lease(1) is None


def test_what_is_not_sent_is_given_back_once(pair: tuple[SlotPool, SlotReader]) -> None:
    pool, reader = pair
    old = leased(pool, 1)
    pool.give_back(old)
    new = leased(pool, 1)
    pool.give_back(old)
    reader.free(old)
    assert new.index == old.index
    assert pool.held == 1


def test_no_memory_no_slot(pair: tuple[SlotPool, SlotReader], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pool, _ = pair
    leased(pool, MIB)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert pool.lease(MIB) is None
    assert pool.reserved == MIB
    with pytest.raises(OSError, match="No space"):
        SlotPool(LIMIT)
    assert SharedMemory.offer(LIMIT).address is None


def test_an_older_kernel_that_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outboard.protocol.shm._MADV_POPULATE_WRITE", 99999)
    pool = SlotPool(LIMIT)
    reader = SlotReader(address_of(pool))
    lease = pool.lease(MIB)
    assert lease is not None
    lease[1][:] = b"x" * MIB
    assert reader.open(lease[0], MIB).tobytes() == b"x" * MIB


# --- the end ---------------------------------------------------------------------------------------------------------


def test_views_outlive_both_ends() -> None:
    pool = SlotPool(LIMIT)
    fd = address_of(pool).fd
    reader = SlotReader(address_of(pool))
    lease = pool.lease(1000)
    assert lease is not None
    lease[1][:] = b"y" * 1000
    view = reader.open(lease[0], 1000)
    pool.close()
    pool.close()
    reader.close()
    assert pool.lease(1) is None and pool.address is None and (pool.held, reader.held) == (0, 0)
    del lease
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(fd)
    assert view.tobytes() == b"y" * 1000
    with pytest.raises(ValueError, match="closed"):
        reader.open(SlotRef(0, 1, 0), 1)


def test_a_dropped_pool_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    pool = SlotPool(LIMIT)
    reader = SlotReader(address_of(pool))
    del pool, reader
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_a_forked_copy_frees_nothing(pair: tuple[SlotPool, SlotReader]) -> None:
    pool, reader = pair
    view: Any = reader.open(leased(pool, 1000), 1000)
    pid = os.fork()
    if not pid:
        del view
        os._exit(0)
    os.waitpid(pid, 0)
    assert pool.held == 1
    del view
    assert pool.held == 0


# --- who does not belong here ----------------------------------------------------------------------------------------


def test_only_the_announced_arena_is_opened() -> None:
    pool, other = SlotPool(LIMIT), SlotPool(LIMIT)
    address = address_of(pool)
    for wrong in (
        ArenaAddress(address.pid, address_of(other).fd, address.key, address.length),
        ArenaAddress(address.pid, address.fd, address.key ^ 1, address.length),
        ArenaAddress(address.pid, address.fd, address.key, address.length + 4096),
        ArenaAddress(address.pid, 10**6, address.key, address.length),
        ArenaAddress(2**31 - 1, address.fd, address.key, address.length),
        ArenaAddress(1, 0, address.key, address.length),
    ):
        with pytest.raises(OSError):
            SlotReader(wrong)
        assert SharedMemory.join(wrong).pool is None
    assert pool.lease(1) is None
    SlotReader(address)
    assert pool.lease(1) is not None


def test_references_to_what_is_not_leased(pair: tuple[SlotPool, SlotReader]) -> None:
    pool, reader = pair
    ref = leased(pool, MIB)
    for wrong, size in [
        (SlotRef(ref.index + 1, ref.number, ref.offset), 1),
        (SlotRef(-1, ref.number, ref.offset), 1),
        (SlotRef(MAX_LEASES, ref.number, ref.offset), 1),
        (SlotRef(ref.index, ref.number + 1, ref.offset), 1),
        (SlotRef(ref.index - 1, 0, ref.offset), 1),
        (SlotRef(ref.index, ref.number, 0), 1),
        (SlotRef(ref.index, ref.number, -8), 1),
        (ref, LIMIT + 1),
    ]:
        with pytest.raises(ValueError, match="not leased"):
            reader.open(wrong, size)
    assert pool.held == 1


def test_the_two_sides_find_each_other() -> None:
    client = SharedMemory.offer(LIMIT)
    engine = SharedMemory.join(client.address)
    assert engine.pool is not None and client.pool is not None
    assert client.pool.lease(1) is not None
    assert engine.pool.lease(1) is None  # before the client has attached
    client.attach(os.getpid())
    assert engine.pool.lease(1) is not None
    client.close()
    engine.close()
    assert client.pool.lease(1) is None and engine.pool.lease(1) is None


def test_shared_memory_that_is_off() -> None:
    for limit in (0, GRANULE - 1):
        client = SharedMemory.offer(limit)
        assert client.address is None
        engine = SharedMemory.join(client.address)
        client.attach(os.getpid())
        assert (client.pool, client.reader, engine.pool, engine.reader) == (None,) * 4
        client.close()


# --- inside messages -------------------------------------------------------------------------------------------------


def test_above_the_threshold_arrays_are_views_of_slots(pair: tuple[SlotPool, SlotReader]) -> None:
    pool, reader = pair
    encoder, decoder = codecs(pool, reader)
    value = {"small": np.arange(8), "frame": np.arange(128), "slot": [np.arange(129), np.arange(300.0)[::-2]]}
    body, *aux = encoder.encode(value)
    assert (len(aux), pool.held) == (1, 2)
    back = decoder.decode(body, aux)
    for sent, got in zip([*value["slot"], value["frame"]], [*back["slot"], back["frame"]], strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype and not got.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            got.flags.writeable = True
    part = back["slot"][0][5:6]
    del back, got
    assert pool.held == 1
    del part
    assert pool.held == 0


@pytest.mark.parametrize("dtype", ["?", "f2", ">f8", "G", "M8[ns]", "U3", "V5", "S5"])
def test_every_dtype_fits_a_slot(pair: tuple[SlotPool, SlotReader], dtype: str) -> None:
    encoder, decoder = codecs(*pair)
    array = np.zeros((3, 4000), np.uint8).view("u1")[:, :3000].copy()
    array[...] = np.arange(3000) % 100
    array = np.resize(array.reshape(-1)[: 9000 // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize], 2880)
    if dtype == "U3":
        shaped: Any = np.full((2, 120), "abc", dtype)
    else:
        shaped = (array % 2 if dtype == "?" else array).view(dtype).reshape(2, -1)
    for value in (shaped, shaped.T, shaped[:, ::-1]):
        (body,) = encoder.encode(value)
        back = decoder.decode(body)
        assert (back.dtype.str, back.shape, back.tobytes()) == (value.dtype.str, value.shape, value.tobytes())


def test_a_message_that_cannot_be_encoded_holds_nothing(pair: tuple[SlotPool, SlotReader]) -> None:
    encoder, _ = codecs(*pair)
    with pytest.raises(TypeError, match="cannot be sent"):
        encoder.encode([np.zeros(1000), object()])
    assert pair[0].held == 0


def test_a_message_that_is_not_sent_is_given_back(pair: tuple[SlotPool, SlotReader]) -> None:
    encoder, _ = codecs(*pair)
    message = UtilityCall(1, 2, "m", [{"a": np.zeros(1000), "b": [np.zeros(2000)]}], {"c": np.zeros(99)})
    body = encoder.encode(message)[0]
    encoder.encode(np.zeros(1000))
    assert pair[0].held == 3
    encoder.give_back(body)
    assert pair[0].held == 1


def test_an_output_that_is_refused_and_encoded_again_holds_one_slot(pair: tuple[SlotPool, SlotReader]) -> None:
    class Sender:
        taken = False

        def writable(self) -> bool:
            return self.taken

        def send(self, frames: Any, more: bool = False) -> bool:
            return self.taken

        def flush(self) -> bool:
            return True

    sender: Any = Sender()
    port = SocketPort(sender, codecs(*pair)[0], SharedMemory(), 20_000)
    message: Any = np.zeros(1000)
    for _ in range(5):
        assert not port.send(port.encode(message))
        assert pair[0].held == 1
    sender.taken = True
    for held in range(1, 4):
        assert port.send(port.encode(message))
        assert pair[0].held == held
    port.encode(message)  # only to see whether it can be sent
    with pytest.raises(ValueError, match="max_message_bytes"):
        port.encode([message, b"x" * 20_000])
    assert port.send(port.encode(message))
    assert pair[0].held == 4


def test_undecodable_messages_free_their_slots(pair: tuple[SlotPool, SlotReader]) -> None:
    pool, reader = pair
    encoder, decoder = codecs(pool, reader, AddRequest)
    good = AddRequest(1, 2, "id", b"", SamplingParams(), [np.zeros(1000), np.zeros(1000)])
    bodies = [
        encoder.encode([1, 2, "id", b"", {"top_p": 7.0}, good.inputs])[0],  # fails before the arrays
        encoder.encode([1, 2, "id", b"", {}, [*good.inputs, msgspec.msgpack.Ext(77, b"")]])[0],  # behind them
        encoder.encode([1, 2, "id", b"", {}, good.inputs, "no index"])[0],
        encoder.encode({"not": good.inputs})[0],
    ]
    for held, body in zip((8, 6, 4, 2), bodies, strict=True):
        assert pool.held == held
        with pytest.raises(ProtocolError):
            decoder.decode(body)
    assert pool.held == 0
    with pytest.raises(ProtocolError, match="auxiliary frames"):
        decoder.decode(encoder.encode(good)[0], [b"extra"])
    assert pool.held == 0


def test_messages_that_an_engine_core_drops_free_their_slots(pair: tuple[SlotPool, SlotReader]) -> None:
    pool, reader = pair
    encoder, _ = codecs(pool, reader)
    incoming = Incoming(7, reader)
    call = UtilityCall(8, 0, "m", [np.zeros(1000)], {})  # of another epoch
    assert incoming.decode([b"\x03", *encoder.encode(call)]) is None
    assert incoming.decode([b"\x77", *encoder.encode(call)]) is None
    assert incoming.decode([b"\x03", *encoder.encode({"no": call})]) is None
    assert pool.held == 0


def test_without_a_free_slot_arrays_are_frames(pair: tuple[SlotPool, SlotReader]) -> None:
    encoder, decoder = codecs(*pair)
    bodies = [encoder.encode(np.full(MIB, i, np.uint8)) for i in range(6)]
    assert [len(frames) for frames in bodies] == [1, 1, 1, 1, 2, 2]
    for i, (body, *aux) in enumerate(bodies):
        assert (decoder.decode(body, aux) == i).all()
    assert pair[0].held == 0
    assert len(encoder.encode(np.zeros(MIB))) == 2  # larger than all there is
    assert len(encoder.encode(np.zeros(MIB, "f4"))) == 1


def test_a_slot_where_shared_memory_is_off(pair: tuple[SlotPool, SlotReader]) -> None:
    encoder, _ = codecs(*pair)
    with pytest.raises(ProtocolError, match="shared memory is off"):
        MsgpackDecoder[Any](EngineCoreOutputs).decode(
            encoder.encode(EngineCoreOutputs(0, 1, 0, 0.0, utility_output=UtilityOutput(0, np.zeros(1000))))[0]
        )


# --- extents ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40) | st.integers(-10, -1), max_size=60))
def test_extents_give_each_piece_once_and_join_what_comes_back(steps: list[int]) -> None:
    """A positive step takes so much; a negative one brings something back."""
    extents = Extents()
    extents.add(0, 100)
    taken: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            offset = extents.take(step)
            if offset is not None:
                assert all(offset + step <= start or start + size <= offset for start, size in taken)
                assert 0 <= offset <= 100 - step
                taken.append((offset, step))
        elif taken:
            extents.add(*taken.pop(step % len(taken)))
    for piece in taken:
        extents.add(*piece)
    assert extents.room_before(100) == 100
    assert extents.take(100) == 0
    assert extents.take(1) is None
