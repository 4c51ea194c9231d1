"""Inputs over a Unix socket: both ends, the client's on real event loops of either kind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outboard.client.thread_loop import ThreadLoop
from outboard.engine.incoming import Incoming
from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackEncoder
from outboard.protocol.messages import AddRequest, EngineCoreRequestType, UtilityCall
from outboard.protocol.sampling import SamplingParams
from outboard.transport.framing import head_of, hello
from outboard.transport.outbox import Outbox
from outboard.transport.poller import SocketPoller
from outboard.transport.unix import SCHEME
from outboard.transport.unix_inputs import UnixInputReceiver, UnixInputSender

Run = Callable[[Awaitable[Any]], Any]

EPOCH = 2**63 + 7
TIGHT = 2  # a high-water mark: 16 KiB in all
ROOMY = 1000
LARGE = 20 << 20


class Wire:
    """Both ends. What `receive` and `receive_all` take is noted in `got`."""

    def __init__(self, path: Path, mark: int = ROOMY, most: int = 64 << 20) -> None:
        self.path = path
        self.most = most
        self.strangers: list[str] = []
        self.ends = 0
        self.got: list[list[bytes]] = []
        self.sender = UnixInputSender(str(path), EPOCH, mark, self._on_end, self.strangers.append)
        self.outbox = Outbox(self.sender)

    def connect(self) -> None:
        self.receiver = UnixInputReceiver(self.sender.address, EPOCH, self.most)
        assert self.sender.accept()

    def send(self, numbers: range) -> None:
        for number in numbers:
            assert self.sender.send(message(number))

    def receive(self) -> bool:
        """Takes a message, if it is there."""
        frames = self.receiver.receive()
        if frames is not None:
            self.got.append([bytes(frame) for frame in frames])
        return frames is not None

    def receive_all(self) -> int:
        """Takes all that is there; how many messages have been taken."""
        while self.receive():
            pass
        return len(self.got)

    async def take(self, count: int) -> None:
        """Takes until there are so many, while the loop runs."""
        async with asyncio.timeout(20):
            while self.receive_all() < count:
                await asyncio.sleep(0)

    @property
    def numbers(self) -> list[int]:
        return [int.from_bytes(frames[1][:4], "big") for frames in self.got]

    @property
    def raw(self) -> socket.socket:
        """The client's socket."""
        assert self.sender._socket is not None
        return self.sender._socket

    def _on_end(self) -> None:
        self.ends += 1

    def close(self) -> None:
        self.sender.stop()
        self.sender.close()
        if hasattr(self, "receiver"):
            self.receiver.close()


def message(number: int, *aux: bytes) -> list[bytes]:
    return [b"\x00", number.to_bytes(4, "big"), *aux]


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
def make(short_tmp: Path) -> Iterator[Callable[..., Wire]]:
    wires: list[Wire] = []

    def make(**limits: int) -> Wire:
        wires.append(Wire(short_tmp / f"in-{len(wires)}", **limits))
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


@pytest.fixture
def tight(make: Callable[..., Wire]) -> Wire:
    wire = make(mark=TIGHT)
    wire.connect()
    return wire


# --- messages --------------------------------------------------------------------------------------------------------


def test_messages_with_and_without_frames_arrive_in_order(wire: Wire) -> None:
    sent = [message(number, *([b"x" * (number % 7), b"", b"y" * 5000] * (number % 3))) for number in range(300)]
    for start in range(0, 300, 20):
        for frames in sent[start : start + 20]:
            assert wire.sender.send(frames)
        wire.receive_all()
    assert wire.got == sent
    assert not wire.receiver.ended
    assert not wire.receiver.pending()
    assert wire.sender.tracked == ()


def test_what_was_sent_before_the_loop_is_known_arrives(run: Run, wire: Wire) -> None:
    async def main() -> None:
        wire.send(range(20))
        wire.sender.attach(asyncio.get_running_loop())
        wire.send(range(20, 40))
        await wire.take(40)

    run(main())
    assert wire.numbers == list(range(40))
    assert (wire.ends, wire.strangers) == (0, [])


@pytest.mark.parametrize("mark", [TIGHT, ROOMY])
def test_frames_of_any_size_stay_together(run: Run, make: Callable[..., Wire], mark: int) -> None:
    wire = make(mark=mark)
    wire.connect()
    sizes = [0, 1, 65_518, 65_519, 65_520, 65_536, 200_000, 3_000_000]
    chosen = random.Random(1)
    sent = [message(number, *(os.urandom(chosen.choice(sizes)) for _ in range(number % 4))) for number in range(40)]
    sent += [[b"\x01", os.urandom(size)] for size in sizes] + [[b"\x03", b"many", *([b"x" * 10] * 3000)]]

    async def main() -> None:
        wire.sender.attach(asyncio.get_running_loop())
        for frames in sent:
            wire.outbox.send(frames)
        await wire.take(len(sent))

    run(main())
    assert wire.got == sent
    assert (len(wire.outbox), wire.outbox.sent) == (0, len(sent))


@pytest.mark.parametrize("mark", [TIGHT, ROOMY])
@pytest.mark.parametrize("pieces", [1, 20, 2000])
def test_large_frames_arrive_whole(run: Run, make: Callable[..., Wire], mark: int, pieces: int) -> None:
    """As one frame, or in pieces that share the memory of one."""
    wire = make(mark=mark)
    wire.connect()
    large = np.random.default_rng(pieces).integers(0, 256, LARGE, np.uint8)
    size = LARGE // pieces
    frames = [large[start : start + size].data for start in range(0, size * pieces, size)]

    async def main() -> None:
        wire.sender.attach(asyncio.get_running_loop())
        wire.outbox.send([b"\x00", b"large", *frames])
        wire.outbox.send(message(1))
        await wire.take(2)

    run(main())
    assert wire.got[0][:2] == [b"\x00", b"large"]
    assert wire.got[0][2:] == [bytes(frame) for frame in frames]
    assert wire.got[1] == message(1)


def test_a_message_that_comes_alone_takes_one_look(wire: Wire) -> None:
    """Once it has been read, the next is read as soon as that is told of."""
    poller = SocketPoller()

    def read() -> bool:
        wire.receive()
        return wire.receiver.pending()

    try:
        poller.add(wire.receiver.fd, read)
        poller.turn()
        for number in range(10):
            wire.send(range(number, number + 1))
            poller.turn()
            assert len(wire.got) == number + 1
        wire.send(range(10, 15))
        for _ in range(5):
            poller.turn()
    finally:
        poller.close()
    assert wire.numbers == list(range(15))


def test_what_was_decoded_does_not_change_with_the_next_message(wire: Wire) -> None:
    """Small messages are decoded where they lie, and the next ones lie there too."""
    incoming = Incoming(EPOCH)
    encode = MsgpackEncoder(inline_bytes=1000).encode
    items: list[Any] = []
    for number in range(50):
        ids = np.full(100, number, np.int32).tobytes()
        inputs = {"text": f"text {number}", "bytes": b"%d" % number, "array": np.full(50, number)}
        request = AddRequest(EPOCH, number, f"id-{number}", ids, SamplingParams(stop=[f"{number}"]), inputs)
        call = UtilityCall(EPOCH, number, f"method {number}", [np.full(500, number), b"%d" % number], {})
        assert wire.sender.send([EngineCoreRequestType.ADD.value, *encode(request)])
        assert wire.sender.send([EngineCoreRequestType.UTILITY.value, *encode(call)])
        while (frames := wire.receiver.receive()) is not None:
            items.append(incoming.decode(frames))
    assert not incoming.drops.counts
    assert len(items) == 100
    for number, (request, call) in enumerate(zip(items[::2], items[1::2], strict=True)):
        assert (request.handle, request.external_req_id) == (number, f"id-{number}")
        assert request.sampling_params.stop == [f"{number}"]
        assert np.frombuffer(request.prompt, np.int32).tolist() == [number] * 100
        assert (request.inputs["text"], request.inputs["bytes"]) == (f"text {number}", b"%d" % number)
        assert request.inputs["array"].tolist() == [number] * 50
        assert (call.method, call.args[1]) == (f"method {number}", b"%d" % number)
        assert call.args[0].tolist() == [number] * 500


def test_a_message_that_comes_in_small_parts(wire: Wire) -> None:
    data = b"".join([head_of([b"body"], b"\x07"), b"body", head_of([b"more", b"aux"], b"\x08"), b"more", b"aux"])
    for byte in data:
        wire.raw.send(bytes([byte]))
        wire.receive_all()
    assert wire.got == [[b"\x07", b"body"], [b"\x08", b"more", b"aux"]]


def test_an_empty_message_is_for_the_decoder_to_refuse(wire: Wire) -> None:
    wire.raw.send(head_of([b""]))
    wire.receive()
    assert wire.got == [[b"", b""]]
    incoming = Incoming(EPOCH)
    assert incoming.decode([b"", b""]) is None
    assert sum(incoming.drops.counts.values()) == 1


# --- a full socket ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aux", [[], [b"x"], [b"x" * 100_000, b"", b"y"]], ids=["body", "two frames", "four frames"])
def test_a_full_socket_refuses_whole_messages(run: Run, tight: Wire, aux: list[bytes]) -> None:
    sent = 0

    async def main() -> None:
        nonlocal sent
        tight.sender.attach(asyncio.get_running_loop())
        while tight.sender.send(message(sent, *aux)):
            sent += 1
            assert sent < 1000
        assert not tight.sender.send(message(99, *aux))
        await tight.take(sent)
        await until(lambda: tight.sender.send(message(sent, *aux)))
        await tight.take(sent + 1)

    run(main())
    assert tight.got == [message(number, *aux) for number in range(sent + 1)]


def test_what_is_refused_is_held_and_sent_in_order(run: Run, tight: Wire) -> None:
    async def main() -> None:
        tight.sender.attach(asyncio.get_running_loop())
        for number in range(500):
            tight.outbox.send(message(number, b"x" * 500), key=number)
        held = len(tight.outbox)
        assert 0 < held < 500
        assert tight.outbox.sent == 500 - held
        await turns()
        assert len(tight.outbox) == held  # nobody has made room
        assert not tight.outbox.take_back(0)  # it has been sent
        assert tight.outbox.take_back(498)
        await tight.take(300)
        tight.outbox.send(message(500, b"x" * 500))
        await tight.take(500)

    run(main())
    assert tight.numbers == [*range(498), 499, 500]
    assert (len(tight.outbox), tight.outbox.sent) == (0, 500)


def test_a_message_that_was_begun_is_finished_before_another(run: Run, tight: Wire) -> None:
    """Also where nothing else is sent, and nobody asked to be called."""
    large = os.urandom(1 << 20)

    async def main() -> None:
        tight.sender.attach(asyncio.get_running_loop())
        assert tight.sender.send(message(0, large))
        assert not tight.sender.send(message(1))
        tight.receive()  # takes a part
        assert not tight.sender.send(message(1))
        await tight.take(1)
        assert tight.sender.send(message(1))
        await tight.take(2)

    run(main())
    assert tight.got == [message(0, large), message(1)]


def test_who_waits_for_room_is_called_once(run: Run, tight: Wire) -> None:
    calls: list[int] = []

    async def main() -> None:
        tight.sender.attach(asyncio.get_running_loop())
        for round_ in range(3):
            while tight.sender.send(message(0, b"x" * 1000)):
                pass
            tight.sender.call_when_writable(lambda round_=round_: calls.append(round_))  # type: ignore[misc]
            await turns()
            assert len(calls) == round_
            tight.receive_all()
            await until(lambda round_=round_: len(calls) > round_)  # type: ignore[misc]
            tight.receive_all()
            await turns()

    run(main())
    assert calls == [0, 1, 2]


def test_the_loop_sleeps_while_a_socket_is_full_and_while_it_is_not(run: Run, tight: Wire) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        tight.sender.attach(loop)
        for _ in range(2):
            for number in range(100):
                tight.outbox.send(message(number, b"x" * 500))
            before = time.thread_time()
            await asyncio.sleep(0.2)
            assert time.thread_time() - before < 0.1
            await until(lambda: tight.receive_all() and not len(tight.outbox))
            before = time.thread_time()
            await asyncio.sleep(0.2)
            assert time.thread_time() - before < 0.1

    run(main())


def test_a_message_refused_before_there_was_a_loop(run: Run, tight: Wire) -> None:
    for number in range(100):
        tight.outbox.send(message(number, b"x" * 500))
    assert len(tight.outbox) > 0

    async def main() -> None:
        tight.sender.attach(asyncio.get_running_loop())
        await tight.take(100)

    run(main())
    assert tight.numbers == list(range(100))


def test_a_blocked_peer_delays_no_other(run: Run, make: Callable[..., Wire]) -> None:
    blocked, fine = make(mark=TIGHT), make(mark=TIGHT)
    for wire in (blocked, fine):
        wire.connect()

    async def main() -> None:
        for wire in (blocked, fine):
            wire.sender.attach(asyncio.get_running_loop())
        for start in range(0, 400, 40):
            for number in range(start, start + 40):
                blocked.outbox.send(message(number, b"x" * 1000))
                fine.outbox.send(message(number, b"x" * 1000))
            await fine.take(start + 40)
        assert len(fine.outbox) == 0
        assert len(blocked.outbox) > 300
        await blocked.take(400)

    run(main())
    assert fine.numbers == blocked.numbers == list(range(400))


def test_buffers_are_let_go_of_once_they_have_left(run: Run, tight: Wire) -> None:
    buffers = [bytearray(100_000), bytearray(100_000)]

    async def main() -> None:
        tight.sender.attach(asyncio.get_running_loop())
        assert tight.sender.send([b"\x00", b"body", *(memoryview(buffer) for buffer in buffers)])
        tight.outbox.send([b"\x00", b"held", memoryview(buffers[0])])
        begun, held = tight.outbox.in_use
        assert begun[1][-1] == buffers[1]
        assert held[1][-1] == buffers[0]
        with pytest.raises(BufferError):
            buffers[1].clear()
        del begun, held
        await tight.take(2)
        await turns()
        assert tight.outbox.in_use == []

    run(main())
    for buffer in buffers:
        buffer.clear()


def test_the_high_water_mark_bounds_what_the_socket_holds(make: Callable[..., Wire]) -> None:
    held = []
    for mark in (2, 20, 200, 10**12):
        wire = make(mark=mark)
        wire.connect()
        count = 0
        while wire.sender.send([b"\x00", b"x" * 2000]):
            count += 1
        held.append(count)
    assert held == sorted(held)
    assert 1 < held[0] < 10 <= held[1] < 40 <= held[2]


# --- the engine core closes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unread", [False, True])
def test_an_engine_core_that_closes_is_told_of_once(run: Run, wire: Wire, unread: bool) -> None:
    """What it has not read makes its end another one."""
    problems: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: problems.append(context))
        wire.sender.attach(loop)
        wire.send(range(3))
        if not unread:
            wire.receive_all()
        wire.receiver.close()
        await until(lambda: wire.ends)
        for _ in range(3):
            assert wire.sender.send(message(4))  # nobody takes it, and that is no error
            assert wire.sender.send(message(4, b"x" * 1_000_000))
        wire.sender.call_when_writable(lambda: problems.append("called"))
        await turns()
        wire.sender.stop()

    run(main())
    assert (wire.ends, problems) == (1, [])
    assert wire.sender._socket is None


def test_an_engine_core_that_is_found_gone_by_sending(run: Run, wire: Wire) -> None:
    """Before the loop tells: whoever sends hears nothing of it, and is not called back in the middle."""

    async def main() -> None:
        wire.sender.attach(asyncio.get_running_loop())
        wire.receiver.close()
        assert wire.sender.send(message(0))
        assert wire.sender.send(message(1, b"x"))
        assert wire.ends == 0
        await until(lambda: wire.ends)
        await turns()

    run(main())
    assert wire.ends == 1


def test_an_engine_core_that_reads_no_more_is_found_gone_by_sending(run: Run, wire: Wire) -> None:
    """Its end does not look closed otherwise."""

    async def main() -> None:
        wire.sender.attach(asyncio.get_running_loop())
        wire.receiver._socket.shutdown(socket.SHUT_RD)
        await turns()
        assert wire.ends == 0
        assert wire.sender.send(message(0))
        await until(lambda: wire.ends)

    run(main())
    assert wire.ends == 1


@pytest.mark.parametrize("held", [0, 10])
def test_an_engine_core_that_closes_in_the_middle_of_a_message(run: Run, tight: Wire, held: int) -> None:
    problems: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: problems.append(context))
        tight.sender.attach(loop)
        tight.outbox.send(message(0, b"x" * 1_000_000))
        for number in range(held):
            tight.outbox.send(message(number))
        assert len(tight.outbox) == held
        tight.receive()
        tight.receiver.close()
        await until(lambda: tight.ends)
        tight.outbox.send(message(99))
        await turns()

    run(main())
    assert (tight.ends, problems) == (1, [])


def test_an_engine_core_that_has_closed_before_there_was_a_loop(run: Run, wire: Wire) -> None:
    wire.receiver.close()
    assert wire.sender.send(message(0))

    async def main() -> None:
        wire.sender.attach(asyncio.get_running_loop())
        await until(lambda: wire.ends)

    run(main())
    assert wire.ends == 1


def test_what_an_engine_core_says_here_is_ignored(run: Run, wire: Wire) -> None:
    async def main() -> None:
        wire.sender.attach(asyncio.get_running_loop())
        wire.receiver._socket.send(b"x" * 100_000)
        await until(lambda: not _readable(wire.raw))
        wire.send(range(3))
        assert wire.ends == 0

    run(main())
    wire.receive_all()
    assert wire.numbers == [0, 1, 2]


def _readable(one: socket.socket) -> bool:
    try:
        return bool(one.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


# --- the client stops ------------------------------------------------------------------------------------------------


def test_after_stop_nothing_is_called_or_sent(run: Run, tight: Wire) -> None:
    calls: list[str] = []
    problems: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: problems.append(context))
        tight.sender.attach(loop)
        while tight.sender.send(message(0, b"x" * 1000)):
            pass
        tight.sender.call_when_writable(lambda: calls.append("writable"))
        tight.receive_all()  # there is room: the loop would tell in its next turn
        tight.sender.stop()
        tight.sender.stop()
        reused = [os.eventfd(1) for _ in range(20)]  # descriptors that are readable and writable
        await turns(20)
        assert tight.sender.send(message(1))
        for fd in reused:
            os.close(fd)

    run(main())
    assert (calls, problems, tight.ends) == ([], [], 0)
    tight.receive_all()
    assert 1 not in tight.numbers
    assert tight.receiver.ended


def test_stop_after_the_loop_was_closed(wire: Wire) -> None:
    loop = asyncio.new_event_loop()
    wire.sender.attach(loop)
    wire.receiver.close()
    loop.close()
    assert wire.sender.send(message(0))  # finds it gone
    wire.sender.stop()
    assert wire.ends == 0


def test_what_the_client_had_sent_is_read_after_it_has_closed(wire: Wire) -> None:
    wire.send(range(100))
    wire.sender.stop()
    wire.receive_all()
    assert wire.numbers == list(range(100))
    assert wire.receiver.ended
    assert wire.receiver.receive() is None


@pytest.mark.parametrize("part", [1, 16, 17, 40], ids=lambda part: f"{part} bytes")
def test_half_a_message_at_the_end_is_none(wire: Wire, part: int) -> None:
    wire.send(range(2))
    wire.raw.send((head_of([b"x" * 50], b"\x00") + b"x" * 30)[:part])
    wire.sender.stop()
    wire.receive_all()
    assert not wire.receive()  # takes another look
    assert wire.numbers == [0, 1]
    assert wire.receiver.ended


# --- junk ------------------------------------------------------------------------------------------------------------

JUNK: dict[str, bytes] = {
    "ones": b"\xff" * 100,
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a huge body": struct.pack("<QQ", 2**64 - 1, 0),
    "too large a body": struct.pack("<QQ", 1001, 0),
    "too large a frame": struct.pack("<QQQ", 5, 1, 1001) + b"text!",
    "too many frames": struct.pack("<QQ", 5, 2**40),
}


@pytest.mark.parametrize("data", JUNK.values(), ids=JUNK)
def test_junk_ends_it_once(make: Callable[..., Wire], data: bytes) -> None:
    wire = make(most=1000)
    wire.connect()
    assert wire.sender.send([b"\x00", b"x" * 999, b"y" * 1000])
    wire.raw.send(data)
    wire.send(range(3))
    assert wire.receive()
    with pytest.raises(ProtocolError):
        wire.receive()
    assert wire.receiver.ended
    assert not wire.receiver.pending()
    for _ in range(3):
        assert not wire.receive()
        wire.send(range(3))
    assert len(wire.got) == 1


# --- a loop in another thread ----------------------------------------------------------------------------------------


class Blocking:
    """As a blocking client has it: any thread sends, under a lock that the loop's callbacks take."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.loop = ThreadLoop(self.lock)
        self.problems: list[Any] = []
        self.loop._loop.set_exception_handler(lambda loop, context: self.problems.append(context))

    def in_loop(self, function: Callable[[], Any]) -> Any:
        """Calls it in the loop's thread, under the lock; its result."""
        done = threading.Event()
        results: list[Any] = []

        def call() -> None:
            results.append(function())
            done.set()

        self.loop.call_soon(call)
        assert done.wait(10)
        return results[0]

    def sync(self) -> None:
        """Returns when all that had been asked of the loop is done."""
        self.in_loop(lambda: None)
        self.in_loop(lambda: None)


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    blocking = Blocking()
    yield blocking
    blocking.loop.stop()
    blocking.loop.join(10)
    assert blocking.problems == []


def test_several_threads_send_under_a_lock(blocking: Blocking, tight: Wire, eventually: Callable[..., Any]) -> None:
    with blocking.lock:
        tight.sender.attach(blocking.loop)

    def feed(start: int) -> None:
        for number in range(start, start + 500):
            with blocking.lock:
                tight.outbox.send(message(number, b"x" * 100))

    threads = [threading.Thread(target=feed, args=(start,)) for start in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    eventually(lambda: tight.receive_all() == 1500)
    for thread in threads:
        thread.join(10)
    for start in (0, 1000, 2000):
        assert [number for number in tight.numbers if start <= number < start + 500] == list(range(start, start + 500))
    with blocking.lock:
        assert len(tight.outbox) == 0
    blocking.in_loop(tight.sender.stop)


def test_a_peer_found_gone_by_another_thread_is_closed_in_the_loop_s(
    blocking: Blocking, wire: Wire, eventually: Callable[..., Any]
) -> None:
    """Who sends must not close a descriptor that the loop still watches: its number would be somebody else's."""
    with blocking.lock:
        wire.sender.attach(blocking.loop)
    blocking.sync()
    closed_by: list[threading.Thread] = []
    wire.sender._on_end = lambda: closed_by.append(threading.current_thread())
    with blocking.lock:
        wire.receiver.close()
        assert wire.sender.send(message(0))
        assert wire.sender._socket is not None
        assert closed_by == []
    eventually(lambda: closed_by)
    blocking.sync()
    assert closed_by == [blocking.loop._thread]
    assert wire.sender._socket is None


def test_what_was_to_be_watched_and_was_closed_first_is_not(blocking: Blocking, tight: Wire) -> None:
    """A sender finds its socket full just when the loop closes it: the loop must watch no descriptor after that."""
    with blocking.lock:
        tight.sender.attach(blocking.loop)
    blocking.sync()
    may_go, stopped = threading.Event(), threading.Event()
    reused: list[int] = []

    def stop() -> None:
        may_go.wait(10)
        tight.sender.stop()
        reused.extend(os.eventfd(0) for _ in range(20))  # its number is somebody else's now, and always writable
        stopped.set()

    tight_fd = tight.raw.fileno()
    blocking.loop._loop.call_soon_threadsafe(stop)
    while tight.sender.send(message(0, b"x" * 1000)):
        pass
    tight.sender.call_when_writable(lambda: None)
    may_go.set()
    assert stopped.wait(10)
    blocking.sync()
    assert tight_fd not in blocking.loop._loop._selector.get_map()  # type: ignore[attr-defined]
    for fd in reused:
        os.close(fd)


# --- who may connect -------------------------------------------------------------------------------------------------


STRANGERS: dict[str, bytes] = {
    "silent": b"",
    "half a hello": hello(EPOCH)[:8],
    "another epoch": hello(EPOCH - 1),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "zeromq": b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL",
    "ones": b"\xff" * 100,
    "hello, late": b"x" + hello(EPOCH),
}


def test_strangers_are_told_apart(make: Callable[..., Wire]) -> None:
    wire = make()
    strangers = []
    for data in STRANGERS.values():
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(str(wire.path))
        stranger.send(data)
        strangers.append(stranger)
    wire.connect()
    assert len(wire.strangers) == len(STRANGERS)
    assert not wire.path.exists()
    wire.send(range(10))
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""  # it was closed, and got nothing
        stranger.close()
    wire.receive_all()
    assert wire.numbers == list(range(10))


def test_nobody_connects_twice(make: Callable[..., Wire]) -> None:
    wire = make()
    wire.connect()
    with pytest.raises(OSError, match="cannot connect to unix://"):
        UnixInputReceiver(wire.sender.address, EPOCH, 1000)


def test_a_connection_that_is_not_there(run: Run, make: Callable[..., Wire]) -> None:
    wire = make()
    assert not wire.sender.accept()
    assert not wire.path.exists()

    async def main() -> None:
        wire.sender.attach(asyncio.get_running_loop())  # nothing to watch
        assert wire.sender.send(message(0))
        await turns()

    run(main())
    assert wire.ends == 0


def test_addresses_that_cannot_be(short_tmp: Path) -> None:
    for path in (short_tmp / "nobody", Path("/dev/null"), short_tmp / ("x" * 200)):
        with pytest.raises(OSError, match="cannot connect to unix://"):
            UnixInputReceiver(SCHEME + str(path), EPOCH, 1000)
    for path in (short_tmp / "no" / "directory", Path("/dev/null"), short_tmp / ("x" * 200)):
        with pytest.raises(OSError, match="cannot listen on "):
            UnixInputSender(str(path), EPOCH, ROOMY, lambda: None, print)


def test_no_descriptor_is_left_to_accept_with(make: Callable[..., Wire]) -> None:
    wire = make()
    wire.receiver = UnixInputReceiver(wire.sender.address, EPOCH, 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wire.receiver.fd + 1, hard))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.eventfd(0))
        with pytest.raises(OSError, match="Too many open files"):
            wire.sender.accept()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    assert not wire.path.exists()


def test_programs_that_are_started_inherit_nothing(wire: Wire) -> None:
    for one in (wire.raw, wire.receiver._socket):
        assert not os.get_inheritable(one.fileno())


# --- messages of one turn of the loop --------------------------------------------------------------------------------


def test_the_first_of_a_turn_leaves_at_once_the_others_together_at_its_end(wire: Wire, run: Run) -> None:
    async def main() -> None:
        wire.sender.attach(asyncio.get_running_loop())
        wire.send(range(20))
        assert wire.receive_all() == 1
        await turns(2)
        assert wire.receive_all() == 20
        wire.send(range(20, 22))  # another turn
        assert wire.receive_all() == 21
        await wire.take(22)
        assert wire.numbers == list(range(22))

    run(main())


def test_what_the_other_end_can_read_at_once_does_not_wait_for_the_end_of_the_turn(wire: Wire, run: Run) -> None:
    async def main() -> None:
        wire.sender.attach(asyncio.get_running_loop())
        for number in range(40):
            assert wire.sender.send([b"\x00", number.to_bytes(4, "big") + bytes(4092)])
        assert wire.receive_all() == 33  # the first, and twice 64 KiB
        await wire.take(40)
        assert wire.numbers == list(range(40))

    run(main())


def test_what_waits_for_the_end_of_the_turn_leaves_before_the_end_of_all(wire: Wire, run: Run) -> None:
    async def main() -> None:
        wire.sender.attach(asyncio.get_running_loop())
        wire.send(range(5))
        wire.sender.stop()
        assert wire.receive_all() == 5

    run(main())


def test_a_blocking_client_has_no_turns(wire: Wire) -> None:
    loop = ThreadLoop(threading.RLock())
    try:
        wire.sender.attach(loop)
        wire.send(range(5))
        assert wire.receive_all() == 5
    finally:
        wire.sender.stop()
        loop.stop()
        loop.join(10)
