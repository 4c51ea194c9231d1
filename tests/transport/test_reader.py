"""A PULL socket on a real event loop, of either kind, with real sockets."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from outboard.config import NetworkConfig, TransportConfig
from outboard.transport.curve import KeyedContext, SessionKeys
from outboard.transport.network import bind_tcp, connect
from outboard.transport.reader import MAX_MESSAGES, MAX_TOKENS, SocketReader
from outboard.transport.sockets import ZmqContext, ZmqSender, ZmqSocket, bind_output

Run = Callable[[Awaitable[Any]], Any]
ROOMY = TransportConfig(high_water_mark=50_000)


class Wire:
    """A PULL with a reader, and a PUSH into it. `wait(n)` waits until `n` messages have come."""

    def __init__(self, context: ZmqContext, address: str) -> None:
        self.pull: ZmqSocket = bind_output(context, address, ROOMY)
        self.push = ZmqSender(context, address, ROOMY)
        self.got: list[int] = []
        self.on_number: Callable[[int], None] = lambda number: None
        self.tokens = 0  # that each message is said to hold
        self.reader = SocketReader(self.pull, self.on_message)
        self._wanted = 0
        self._there: asyncio.Event | None = None

    def send(self, numbers: range) -> None:
        for number in numbers:
            assert self.push.send([number.to_bytes(4, "big")])

    def on_message(self, body: Any, aux: Sequence[Any]) -> int:
        number = int.from_bytes(body, "big")
        self.got.append(number)
        if self._there is not None and len(self.got) >= self._wanted:
            self._there.set()
        self.on_number(number)
        return self.tokens

    async def wait(self, count: int) -> None:
        self._wanted, self._there = count, asyncio.Event()
        if len(self.got) < count:
            async with asyncio.timeout(20):
                await self._there.wait()


@pytest.fixture
def wire(context: ZmqContext, short_tmp: Path) -> Iterator[Wire]:
    wire = Wire(context, f"ipc://{short_tmp}/output")
    yield wire
    wire.pull.close()
    wire.push.close(0)


def test_every_message_arrives_in_order_although_a_burst_came_before(run: Run, wire: Wire) -> None:
    async def main() -> None:
        wire.send(range(5_000))
        assert wire.pull.poll(10_000)  # the edge has come and gone
        wire.reader.attach(asyncio.get_running_loop())
        wire.send(range(5_000, 7_000))
        await wire.wait(7_000)
        wire.send(range(7_000, 10_000))
        await wire.wait(10_000)
        wire.reader.detach()

    run(main())
    assert wire.got == list(range(10_000))


def test_messages_of_another_thread_arrive_as_they_come(run: Run, wire: Wire) -> None:
    """One at a time, each after the last was seen: each needs an edge of its own."""
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
        wire.reader.detach()

    run(main())
    assert not lost
    assert wire.got == list(range(500))


@pytest.mark.parametrize(("tokens", "most"), [(0, MAX_MESSAGES), (MAX_TOKENS // 3, 4), (MAX_TOKENS, 1)])
def test_others_get_turns_during_a_flood(run: Run, wire: Wire, tokens: int, most: int) -> None:
    """While more come all the time, each of which may make the descriptor readable."""
    wire.tokens = tokens
    turns: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        wire.send(range(1000))
        assert wire.pull.poll(10_000)
        sent = 1000

        def turn() -> None:
            nonlocal sent
            turns.append(len(wire.got))
            if sent < 10_000:
                wire.send(range(sent, sent + 20))
                sent += 20
            wire.reader.look_again()
            if len(wire.got) < 10_000:
                loop.call_soon(turn)

        wire.reader.attach(loop)
        loop.call_soon(turn)
        await wire.wait(10_000)
        wire.reader.detach()

    run(main())
    steps = [after - before for before, after in itertools.pairwise(turns)]
    assert max(steps) <= most
    assert wire.got == list(range(10_000))


def test_frames_of_a_message_stay_together(run: Run, context: ZmqContext, short_tmp: Path) -> None:
    address = f"ipc://{short_tmp}/output"
    pull, push = bind_output(context, address, ROOMY), ZmqSender(context, address, ROOMY)
    got: list[tuple[bytes, list[bytes]]] = []

    async def main() -> None:
        done = asyncio.Event()

        def on_message(body: Any, aux: Sequence[Any]) -> None:
            got.append((bytes(body), [bytes(frame) for frame in aux]))
            if len(got) == 4:
                done.set()

        reader = SocketReader(pull, on_message)
        reader.attach(asyncio.get_running_loop())
        for frames in ([b"one"], [b"two", b"a" * 100_000, b""], [b"", b"b"], [b"four"]):
            assert push.send(frames)
        await asyncio.wait_for(done.wait(), 10)
        reader.detach()

    run(main())
    assert got == [(b"one", []), (b"two", [b"a" * 100_000, b""]), (b"", [b"b"]), (b"four", [])]
    push.close(0)


def test_spurious_wake_ups_do_nothing(run: Run, wire: Wire) -> None:
    async def main() -> None:
        wire.reader.attach(asyncio.get_running_loop())
        for _ in range(20):
            wire.reader._on_readable()
            await asyncio.sleep(0)
        assert wire.got == []
        wire.send(range(100))
        for _ in range(20):  # they eat the edge at odd times
            wire.reader._on_readable()
            await asyncio.sleep(0)
        await wire.wait(100)
        wire.reader.detach()

    run(main())
    assert wire.got == list(range(100))


def test_nothing_is_read_after_detach(run: Run, wire: Wire) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wire.send(range(1000))
        assert wire.pull.poll(10_000)
        wire.reader.attach(loop)
        await wire.wait(1)
        wire.reader.detach()  # a callback that re-armed itself is still on the loop
        wire.reader.detach()
        before = len(wire.got)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(wire.got) == before
        assert not loop.remove_reader(wire.pull.getsockopt(zmq.FD))
        wire.reader.attach(loop)
        await wire.wait(1000)
        wire.reader.detach()

    run(main())
    assert wire.got == list(range(1000))


def test_a_reader_can_move_to_another_loop(run: Run, wire: Wire) -> None:
    async def part(start: int) -> None:
        wire.reader.attach(asyncio.get_running_loop())
        wire.send(range(start, start + 100))
        await wire.wait(start + 100)
        wire.reader.detach()

    run(part(0))
    wire.send(range(100, 150))
    run(part(150))
    assert wire.got == list(range(250))


def test_detach_after_the_loop_was_closed(wire: Wire) -> None:
    loop = asyncio.new_event_loop()
    wire.reader.attach(loop)
    loop.close()
    wire.reader.detach()


def test_the_socket_may_be_closed_by_a_message(run: Run, wire: Wire) -> None:
    def on_number(number: int) -> None:
        if number == 3:
            wire.reader.detach()
            wire.pull.close()

    wire.on_number = on_number
    problems: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: problems.append(context))
        wire.send(range(20))
        assert wire.pull.poll(10_000)
        wire.reader.attach(loop)
        await wire.wait(4)
        for _ in range(10):
            await asyncio.sleep(0)

    run(main())
    assert wire.got == [0, 1, 2, 3]
    assert problems == []


def test_messages_behind_one_that_raises_are_not_stuck(run: Run, wire: Wire) -> None:
    """The exception goes to the loop's handler, and no edge comes for what was there already."""
    problems: list[Any] = []

    def on_number(number: int) -> None:
        if number == 2:
            raise ValueError("bad message")

    wire.on_number = on_number

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: problems.append(context["exception"]))
        wire.send(range(20))
        assert wire.pull.poll(10_000)
        wire.reader.attach(loop)
        try:
            async with asyncio.timeout(2):
                await wire.wait(20)
        finally:
            wire.reader.detach()

    run(main())
    assert wire.got == list(range(20))
    assert [type(problem) for problem in problems] == [ValueError]


def test_drain_stops_after_many_tokens(wire: Wire) -> None:
    wire.tokens = MAX_TOKENS // 2
    wire.send(range(5))
    while len(wire.got) < 5:
        assert wire.pull.poll(10_000)
        assert 1 <= wire.reader.drain(5) <= 2
    assert wire.got == list(range(5))


def test_drain_takes_at_most_its_limit(wire: Wire) -> None:
    assert wire.reader.drain(5) == 0
    wire.send(range(12))
    taken = 0
    while taken < 12:
        assert wire.pull.poll(10_000)
        count = wire.reader.drain(5)
        assert 1 <= count <= 5
        taken += count
    assert wire.reader.drain(5) == 0
    assert wire.got == list(range(12))


def test_a_heartbeat_before_the_first_message_is_none() -> None:
    """ZeroMQ then has the peer's credentials to read, which it gives to nobody."""
    network = NetworkConfig(listen="127.0.0.1", heartbeat_interval=0.05, patience=1.0)
    context = KeyedContext(SessionKeys.make())
    try:
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        got: list[bytes] = []
        reader = SocketReader(pull, lambda body, _: got.append(bytes(body)))
        connect(push, bind_tcp(pull, network, 0))
        assert pull.poll(10_000)
        assert reader.drain(MAX_MESSAGES) == 0
        push.send(b"first")
        assert pull.poll(10_000)
        assert reader.drain(MAX_MESSAGES) == 1
        assert got == [b"first"]
    finally:
        context.destroy(linger=0)
