"""Outputs over a Unix socket: both ends, on real event loops of either kind."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outboard.protocol.codec import MsgpackDecoder, MsgpackEncoder
from outboard.transport.framing import head_of, hello
from outboard.transport.poller import SocketPoller
from outboard.transport.reader import MAX_MESSAGES, MAX_TOKENS
from outboard.transport.unix import SCHEME
from outboard.transport.unix_outputs import UnixReader, UnixSender

Run = Callable[[Awaitable[Any]], Any]

EPOCH = 2**63 + 7
TIGHT = 2  # a high-water mark: 16 KiB in all
ROOMY = 1000


class Wire:
    """Both ends. `wait(n)` waits until `n` messages have come; those with a number of 4 bytes are noted by it."""

    def __init__(self, path: Path, mark: int = ROOMY, most: int = 64 << 20) -> None:
        self.path = path
        self.poller = SocketPoller()
        self.writable: list[bool] = []
        self.strangers: list[str] = []
        self.ends: list[str] = []
        self.got: list[tuple[bytes, list[bytes]]] = []
        self.on_number: Callable[[int], None] = lambda number: None
        self.tokens = 0  # that each message is said to hold
        self.reader = UnixReader(str(path), EPOCH, most, self._on_message, self.ends.append, self.strangers.append)
        self.mark = mark
        self._wanted = 0
        self._there: asyncio.Event | None = None

    def connect(self) -> None:
        self.sender = UnixSender(self.reader.address, EPOCH, self.mark, self.poller, lambda: self.writable.append(True))
        assert self.reader.accept()

    @property
    def numbers(self) -> list[int]:
        return [int.from_bytes(body[:4], "big") for body, _ in self.got]

    def send(self, numbers: range) -> None:
        for number in numbers:
            assert self.sender.send([number.to_bytes(4, "big")])

    def drain(self, count: int = 1 << 30) -> None:
        """Takes all that is there, without a loop."""
        while len(self.got) < count and self.reader.drain(1):
            pass

    def _on_message(self, body: Any, aux: Sequence[Any]) -> int:
        self.got.append((bytes(body), [bytes(frame) for frame in aux]))
        if self._there is not None and len(self.got) >= self._wanted:
            self._there.set()
        self.on_number(int.from_bytes(body[:4], "big"))
        return self.tokens

    async def wait(self, count: int) -> None:
        self._wanted, self._there = count, asyncio.Event()
        if len(self.got) < count:
            async with asyncio.timeout(20):
                await self._there.wait()

    def close(self) -> None:
        self.reader.stop()
        self.reader.close()
        if hasattr(self, "sender"):
            self.sender.close(0)
        self.poller.close()


@pytest.fixture
def make(short_tmp: Path) -> Iterator[Callable[..., Wire]]:
    wires: list[Wire] = []

    def make(**limits: int) -> Wire:
        wires.append(Wire(short_tmp / f"out-{len(wires)}", **limits))
        return wires[-1]

    yield make
    for wire in wires:
        wire.close()
    assert not list(short_tmp.iterdir())


@pytest.fixture
def wire(make: Callable[..., Wire]) -> Wire:
    wire = make()
    wire.connect()
    return wire


# --- reading ---------------------------------------------------------------------------------------------------------


def test_every_message_arrives_in_order_although_a_burst_came_before(run: Run, wire: Wire) -> None:
    async def main() -> None:
        wire.send(range(200))
        wire.reader.attach(asyncio.get_running_loop())
        wire.send(range(200, 300))
        await wire.wait(300)
        for start in range(300, 3000, 100):
            wire.send(range(start, start + 100))
            await wire.wait(start + 100)

    run(main())
    assert wire.numbers == list(range(3000))
    assert (wire.strangers, wire.ends) == ([], [])


def test_messages_of_another_thread_arrive_as_they_come(run: Run, wire: Wire) -> None:
    seen = threading.Semaphore(0)
    wire.on_number = lambda number: seen.release()
    lost: list[int] = []

    def feed() -> None:
        for number in range(500):
            wire.send(range(number, number + 1))
            if not seen.acquire(timeout=10):
                lost.append(number)
                return

    async def main() -> None:
        wire.reader.attach(asyncio.get_running_loop())
        await asyncio.to_thread(feed)

    run(main())
    assert not lost
    assert wire.numbers == list(range(500))


@pytest.mark.parametrize(("tokens", "most"), [(0, MAX_MESSAGES), (MAX_TOKENS // 3, 4), (MAX_TOKENS, 1)])
def test_others_get_turns_during_a_flood(run: Run, wire: Wire, tokens: int, most: int) -> None:
    """Also when one look at the socket brought many messages, and while more come all the time."""
    wire.tokens = tokens
    turns: list[int] = []
    sent = 0

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def turn() -> None:
            nonlocal sent
            turns.append(len(wire.got))
            while sent < 4000 and wire.sender.send([sent.to_bytes(4, "big") + bytes(100)]):
                sent += 1
            if len(wire.got) < 4000:
                loop.call_soon(turn)

        wire.reader.attach(loop)
        loop.call_soon(turn)
        await wire.wait(4000)

    run(main())
    steps = [after - before for before, after in itertools.pairwise(turns)]
    assert max(steps) <= most
    assert wire.numbers == list(range(4000))


def test_drain_stops_after_many_tokens(wire: Wire) -> None:
    wire.tokens = MAX_TOKENS // 2
    wire.send(range(5))
    assert [wire.reader.drain(5) for _ in range(4)] == [2, 2, 1, 0]
    assert wire.numbers == list(range(5))


def test_messages_behind_one_that_raises_are_not_stuck(run: Run, wire: Wire) -> None:
    problems: list[Any] = []

    def on_number(number: int) -> None:
        if number in (2, 19):
            raise ValueError("bad message")

    wire.on_number = on_number

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: problems.append(context["exception"]))
        wire.send(range(20))
        wire.reader.attach(loop)
        await wire.wait(20)

    run(main())
    assert wire.numbers == list(range(20))
    assert [type(problem) for problem in problems] == [ValueError] * 2


def test_nothing_is_read_after_stop(run: Run, wire: Wire) -> None:
    def on_number(number: int) -> None:
        if number == 3:
            wire.reader.stop()
            wire.reader.stop()

    wire.on_number = on_number
    problems: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: problems.append(context))
        wire.send(range(20))
        wire.reader.attach(loop)
        await wire.wait(4)
        for _ in range(10):
            await asyncio.sleep(0)

    run(main())
    assert wire.numbers == [0, 1, 2, 3]
    assert wire.reader.drain(1) == 0
    assert (problems, wire.ends) == ([], [])
    wire.send(range(20, 22))  # nobody takes it, and that is no error
    assert wire.sender.writable()


def test_stop_after_the_loop_was_closed(wire: Wire) -> None:
    loop = asyncio.new_event_loop()
    wire.reader.attach(loop)
    loop.close()
    wire.reader.stop()


def test_drain_takes_at_most_its_limit(wire: Wire) -> None:
    assert wire.reader.drain(5) == 0
    wire.send(range(12))
    assert [wire.reader.drain(5) for _ in range(4)] == [5, 5, 2, 0]
    assert wire.numbers == list(range(12))


@pytest.mark.parametrize("mark", [TIGHT, ROOMY])
def test_frames_of_any_size_stay_together(run: Run, make: Callable[..., Wire], mark: int) -> None:
    wire = make(mark=mark)
    wire.connect()
    sizes = [0, 1, 65_519, 65_520, 65_521, 65_536, 200_000, 3_000_000]
    chosen = random.Random(1)
    messages = [
        [b"%04d" % number, *(os.urandom(chosen.choice(sizes)) for _ in range(number % 4))] for number in range(40)
    ]
    messages += [[os.urandom(size)] for size in sizes] + [[b"many", *([b"x" * 10] * 3000)]]

    async def main() -> None:
        wire.reader.attach(asyncio.get_running_loop())
        for number, message in enumerate(messages):
            while not wire.sender.send(message):
                await asyncio.sleep(0)
            while not wire.sender.flush():
                await asyncio.sleep(0)
            await wire.wait(number + 1)

    run(main())
    assert wire.got == [(body, aux) for body, *aux in messages]


def test_what_was_decoded_does_not_change_with_the_next_message(wire: Wire) -> None:
    """Small messages are decoded where they lie, and the next ones lie there too."""
    decoder = MsgpackDecoder[Any](Any)
    values: list[Any] = []
    wire.reader._on_message = lambda body, aux: values.append(decoder.decode(body, aux))
    encode = MsgpackEncoder(inline_bytes=1000).encode
    for number in range(50):
        value = {
            "text": f"text {number}",
            "bytes": b"%d" % number,
            "small": np.full(50, number),
            "large": np.full(500, number),
        }
        assert wire.sender.send(encode(value))
        wire.drain()
    for number, value in enumerate(values):
        assert (value["text"], value["bytes"]) == (f"text {number}", b"%d" % number)
        assert value["small"].tolist() == [number] * 50
        assert value["large"].tolist() == [number] * 500
    assert len(values) == 50


# --- the end ---------------------------------------------------------------------------------------------------------


def test_what_was_sent_before_the_end_is_read(run: Run, wire: Wire) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wire.send(range(100))
        wire.sender.close(0)
        wire.reader.attach(loop)
        await wire.wait(100)
        while not wire.ends:
            await asyncio.sleep(0)
        assert not wire.reader._socket

    run(main())
    assert wire.numbers == list(range(100))
    assert wire.ends == [""]


def test_half_a_message_at_the_end_is_none(wire: Wire) -> None:
    wire.send(range(2))
    wire.sender._socket.send(head_of([b"x" * 50]) + b"x" * 30)
    wire.sender.close(0)
    wire.drain()
    assert (wire.numbers, wire.ends) == ([0, 1], [""])


@pytest.mark.parametrize("frames", [[b"x" * 1001], [b"x", b"y" * 1001], [b"x" * 100_000]], ids=lambda f: str(len(f)))
def test_too_large_a_message_ends_it(make: Callable[..., Wire], frames: list[bytes]) -> None:
    wire = make(most=1000)
    wire.connect()
    assert wire.sender.send([b"x" * 1000, b"y" * 1000])
    assert wire.sender.send(frames)
    wire.send(range(1))
    wire.drain()
    assert len(wire.got) == 1
    assert len(wire.ends) == 1 and "max_message_bytes" in wire.ends[0]
    wire.send(range(1))
    wire.drain()
    assert len(wire.got) == len(wire.ends) == 1


# --- sending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aux", [[], [b"x"], [b"x" * 100_000, b"", b"y"]], ids=["body", "two frames", "four frames"])
def test_a_sender_refuses_whole_messages_when_it_is_full(make: Callable[..., Wire], aux: list[bytes]) -> None:
    wire = make(mark=TIGHT)
    wire.connect()
    sent = 0
    while wire.sender.send([sent.to_bytes(4, "big"), *aux]):
        sent += 1
        assert sent < 1000
    assert not wire.sender.writable()
    assert not wire.sender.send([b"refused", *aux])
    while len(wire.got) < sent:
        wire.drain()
        wire.sender.flush()
    assert wire.sender.writable()
    assert wire.sender.send([sent.to_bytes(4, "big"), *aux])
    while len(wire.got) < sent + 1:
        wire.drain()
        wire.sender.flush()
    assert wire.numbers == list(range(sent + 1))
    assert all(frames == aux for _, frames in wire.got)


def test_a_message_that_was_begun_is_finished_before_another(make: Callable[..., Wire]) -> None:
    wire = make(mark=TIGHT)
    wire.connect()
    large = os.urandom(1 << 20)
    assert wire.sender.send([b"first", large])
    assert not wire.sender.flush()
    assert not wire.sender.send([b"second"])
    wire.reader.drain(1)  # takes a part
    assert wire.got == []
    assert not wire.sender.send([b"second"])
    while not wire.sender.flush():
        wire.drain()
    assert wire.sender.send([b"second"])
    wire.drain()
    assert wire.got == [(b"first", [large]), (b"second", [])]


def test_buffers_are_let_go_of_once_they_have_left(make: Callable[..., Wire]) -> None:
    wire = make(mark=TIGHT)
    wire.connect()
    buffers = [bytearray(100_000), bytearray(100_000)]
    assert wire.sender.send([b"x", *(memoryview(buffer) for buffer in buffers)])
    with pytest.raises(BufferError):
        buffers[1].clear()
    while not wire.sender.flush():
        wire.drain()
    wire.drain()
    assert len(wire.got) == 1
    for buffer in buffers:
        buffer.clear()


def test_the_poller_tells_when_there_is_room_again(make: Callable[..., Wire]) -> None:
    wire = make(mark=TIGHT)
    wire.connect()
    ready = os.eventfd(0)
    try:
        wire.poller.add(ready, lambda: not os.eventfd_read(ready))  # so that a turn ends although the socket is full
        for _ in range(3):
            while wire.sender.send([b"1234", b"x" * 1000]):
                pass
            os.eventfd_write(ready, 1)
            wire.poller.turn()
            assert wire.writable == []
            wire.drain()
            wire.poller.turn()
            assert wire.writable == [True]
            os.eventfd_write(ready, 1)
            wire.poller.turn()  # once
            assert wire.writable.pop() and not wire.writable
    finally:
        os.close(ready)


def test_a_client_that_is_gone_takes_all(wire: Wire) -> None:
    wire.reader.stop()
    for _ in range(3):
        assert wire.sender.writable()
        assert wire.sender.send([b"body"])
        assert wire.sender.send([b"body", b"x" * 1_000_000])
        assert wire.sender.flush()


def test_a_client_that_goes_while_a_message_is_under_way(make: Callable[..., Wire]) -> None:
    wire = make(mark=TIGHT)
    wire.connect()
    assert wire.sender.send([b"body", b"x" * 1_000_000])
    assert not wire.sender.flush()
    wire.reader.stop()
    assert wire.sender.flush()


def test_what_was_begun_leaves_while_it_closes(make: Callable[..., Wire]) -> None:
    wire = make(mark=TIGHT)
    wire.connect()
    large = os.urandom(2_000_000)
    assert wire.sender.send([b"large", large])
    closing = threading.Thread(target=wire.sender.close, args=(10_000,), daemon=True)
    closing.start()
    while not wire.ends:
        wire.drain()
    closing.join(10)
    assert not closing.is_alive()
    assert wire.got == [(b"large", [large])]
    wire.sender.close(0)


def test_closing_is_bounded(make: Callable[..., Wire]) -> None:
    wire = make(mark=TIGHT)
    wire.connect()
    assert wire.sender.send([b"large", b"x" * 2_000_000])
    started = time.monotonic()
    wire.sender.close(50)
    assert 0.04 < time.monotonic() - started < 5
    while not wire.ends:
        wire.drain()
    assert (wire.got, wire.ends) == ([], [""])


def test_the_high_water_mark_bounds_what_the_socket_holds(make: Callable[..., Wire]) -> None:
    held = []
    for mark in (2, 20, 200, 10**12):
        wire = make(mark=mark)
        wire.connect()
        count = 0
        while wire.sender.send([b"x" * 2000]):
            count += 1
        held.append(count)
    assert held == sorted(held)
    assert 1 < held[0] < 10 <= held[1] < 40 <= held[2]


# --- who may connect -------------------------------------------------------------------------------------------------


STRANGERS: dict[str, bytes] = {
    "silent": b"",
    "one byte": b"o",
    "half a hello": hello(EPOCH)[:8],
    "another epoch": hello(EPOCH - 1),
    "no hello": head_of([b"body"]) + b"body",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00",
    "zeromq": b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL",
    "ones": b"\xff" * 100,
    "zeros": bytes(10_000),
    "hello, late": b"x" + hello(EPOCH),
    "huge": hello(0) + head_of([b""])[:8] + b"\xff" * 8,
    "message of another epoch": hello(12345) + head_of([b"body"]) + b"body",
}


def test_thirteen_strangers_are_told_apart(make: Callable[..., Wire]) -> None:
    wire = make()
    strangers = []
    for data in STRANGERS.values():
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(str(wire.path))
        stranger.send(data)
        strangers.append(stranger)
    wire.connect()
    assert len(wire.strangers) == len(STRANGERS) == 13
    assert not wire.path.exists()
    for stranger in strangers:
        with pytest.raises(OSError):
            stranger.send(hello(EPOCH) + head_of([b"forged"]) + b"forged")
        stranger.close()
    wire.send(range(10))
    wire.drain()
    assert (wire.numbers, wire.ends) == (list(range(10)), [])


def test_nobody_connects_twice(make: Callable[..., Wire]) -> None:
    wire = make()
    second = socket.socket(socket.AF_UNIX)
    first = UnixSender(wire.reader.address, EPOCH, ROOMY, wire.poller, lambda: None)
    second.connect(str(wire.path))
    second.send(hello(EPOCH))
    assert wire.reader.accept()
    assert len(wire.strangers) == 1
    assert first.send([b"true"])
    wire.drain()
    assert wire.got == [(b"true", [])]
    first.close(0)
    second.close()
    with pytest.raises(OSError, match="cannot connect to unix://"):
        UnixSender(wire.reader.address, EPOCH, ROOMY, wire.poller, lambda: None)


def test_a_connection_that_is_not_there(make: Callable[..., Wire]) -> None:
    wire = make()
    assert not wire.reader.accept()
    assert not wire.path.exists()
    assert wire.reader.drain(1) == 0
    loop = asyncio.new_event_loop()
    wire.reader.attach(loop)  # nothing to read
    loop.close()


def test_addresses_that_cannot_be(short_tmp: Path) -> None:
    poller = SocketPoller()
    reader: Any = (EPOCH, 1, print, print, print)
    for path in (short_tmp / "nobody", Path("/dev/null"), short_tmp / ("x" * 200)):
        with pytest.raises(OSError, match="cannot connect to unix://"):
            UnixSender(SCHEME + str(path), EPOCH, ROOMY, poller, lambda: None)
    for path in (short_tmp / "no" / "directory", Path("/dev/null"), short_tmp / ("x" * 200)):
        with pytest.raises(OSError, match="cannot listen on "):
            UnixReader(str(path), *reader)
    poller.close()


def test_programs_that_are_started_inherit_nothing(wire: Wire) -> None:
    assert wire.reader._socket is not None
    for one in (wire.reader._socket, wire.sender._socket):
        assert not os.get_inheritable(one.fileno())
