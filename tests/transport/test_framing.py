"""Messages on a stream of bytes, cut anywhere."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboard.errors import ProtocolError
from outboard.protocol.codec import MAX_FRAMES
from outboard.transport.framing import Assembler, head_of

MOST = 300_000
ROOM = 64 << 10

Message = list[bytes]


def on_the_wire(messages: list[Message]) -> bytes:
    return b"".join(head_of(message) + b"".join(message) for message in messages)


def feed(assembler: Assembler, data: bytes) -> list[Message]:
    """Hands the bytes over as a socket would; the messages that they complete."""
    found = []
    while True:
        while (message := assembler.next()) is not None:
            found.append([bytes(message[0]), *map(bytes, message[1])])
        if not data:
            return found
        room = assembler.room()
        count = min(len(room), len(data))
        assert count
        room[:count] = data[:count]
        assembler.came(count)
        data = data[count:]


SIZES = st.one_of(st.integers(0, 40), st.integers(ROOM - 40, ROOM + 40), st.integers(0, MOST))
MESSAGES = st.lists(st.lists(SIZES, min_size=1, max_size=4), max_size=6)


@settings(deadline=None, max_examples=150)
@given(sizes=MESSAGES, cuts=st.lists(st.integers(0, 2 * ROOM), max_size=8))
def test_whatever_comes_in_whatever_pieces(sizes: list[list[int]], cuts: list[int]) -> None:
    numbers = iter(range(1000))
    messages = [[bytes([next(numbers) % 256]) * size for size in message] for message in sizes]
    data = on_the_wire(messages)
    assembler = Assembler(MOST)
    found = []
    for cut in cuts:
        found += feed(assembler, data[:cut])
        data = data[cut:]
    assert found + feed(assembler, data) == messages
    assert not assembler.holds


@pytest.mark.parametrize("message", [[b"abc"], [b"", b"", b"xy"], [b"abc", b"", b"d" * 100, b""]], ids=len)
def test_one_byte_at_a_time(message: Message) -> None:
    assembler = Assembler(MOST)
    data = on_the_wire([message, message])
    found = [one for position in range(len(data)) for one in feed(assembler, data[position : position + 1])]
    assert found == [message, message]


@pytest.mark.parametrize("sizes", [(1001,), (ROOM,), (2**63,), (1000, 1001), (10, 5, 2**64 - 1)], ids=str)
def test_too_large_a_frame_is_refused_before_memory_is_taken(sizes: tuple[int, ...]) -> None:
    assembler = Assembler(1000)
    head = struct.pack(f"<QQ{len(sizes) - 1}Q", sizes[0], len(sizes) - 1, *sizes[1:])
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"a frame of {max(sizes)} bytes; max_message_bytes"):
            feed(assembler, head + b"x" * 2000)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def test_frames_of_the_largest_size_are_taken() -> None:
    message = [b"x" * 1000, b"y" * 1000]
    assert feed(Assembler(1000), on_the_wire([message, message[:1]])) == [message, message[:1]]


def test_a_frame_that_gets_memory_of_its_own_from_the_system() -> None:
    message = [b"body", bytes(range(256)) * (40 << 10), b"end"]
    assert feed(Assembler(1 << 30), on_the_wire([message])) == [message]


@pytest.mark.parametrize("count", [MAX_FRAMES + 1, 2**40, 2**64 - 1])
def test_too_many_frames(count: int) -> None:
    with pytest.raises(ProtocolError, match="frames"):
        feed(Assembler(MOST), struct.pack("<QQ", 1, count))


@pytest.mark.parametrize("size", [2**46, 2**62, 2**63])
def test_more_than_there_is_memory_for(size: int) -> None:
    with pytest.raises(ProtocolError, match="no memory"):
        feed(Assembler(2**63), struct.pack("<QQ", size, 0))


def test_frames_stay_as_they_are_and_bodies_make_room() -> None:
    assembler = Assembler(MOST)
    data = on_the_wire([[b"body", b"f" * 10]])
    assembler.room()[: len(data)] = data
    assembler.came(len(data))
    message = assembler.next()
    assert message is not None
    assert feed(assembler, on_the_wire([[b"z" * 60_000]] * 3)) == [[b"z" * 60_000]] * 3
    assert (bytes(message[0]), bytes(message[1][0])) == (b"body", b"f" * 10)
