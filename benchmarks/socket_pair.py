"""The data channel's sockets between two processes, with no client around them: a part of `benchmarks.network`.

What is sent has the size of an engine core's outputs, of 256 tokens and of one; it is encoded once, and not decoded.
The sender is `python -m benchmarks.socket_pair`, and is told by its stdin where to connect.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks.measure import show, spread
from benchmarks.plain_tcp import plain_tcp
from outboard.config import NetworkConfig, TransportConfig
from outboard.protocol.messages import EngineCoreOutputs
from outboard.transport.curve import SessionKeys
from outboard.transport.poller import SocketPoller
from outboard.transport.reader import SocketReader
from outboard.transport.sockets import ZmqSender, bind_output, make_context
from outboard.transport.tcp import bind_input_tcp, listen_tcp
from outboard.transport.zmq_inputs import ZmqInputReceiver, bind_input

__all__ = ["PairSample", "measure_pairs", "report_pairs"]

LIMITS = TransportConfig()
LOOPBACK = NetworkConfig(listen="127.0.0.1")
SIZES = {"256 tokens": 256, "1 token": 1}
WAYS = ("ipc", "tcp", "tcp+CURVE")
PEER = b"peer"


class Order(msgspec.Struct, frozen=True, array_like=True):
    """What the sender is to send: so many messages of so many tokens each."""

    messages: int
    tokens: int


class Place(msgspec.Struct, frozen=True):
    """What the sender is told when it starts."""

    way: str
    keys: SessionKeys | None
    input_address: str
    output_address: str


class PairSample(msgspec.Struct, frozen=True):
    """One repetition of one way: by size of the messages, and the median of its round trips."""

    way: str
    tokens_per_second: dict[str, float]
    cpu_ns_per_token: dict[str, float]
    trip_us: float


def outputs(tokens: int) -> bytes:
    """A message of an engine core that has a token for each of so many requests."""
    return msgspec.msgpack.encode(
        EngineCoreOutputs(0, 2**63, 1000, 1e5, list(range(10_000, 10_000 + tokens)), [i * 37 for i in range(tokens)])
    )


def send_as_told() -> None:
    """The sender's main, with the sockets of an engine core: what to do comes by its input socket."""
    place = msgspec.json.decode(sys.stdin.buffer.readline(), type=Place)
    with ExitStack() as stack:
        if place.way == "tcp":
            stack.enter_context(plain_tcp())
        context = make_context(place.keys)
        receiver = ZmqInputReceiver(context, place.input_address, PEER, LIMITS)
        sender = ZmqSender(context, place.output_address, LIMITS)

    def read() -> bool:
        while (frames := receiver.receive()) is not None:
            order = msgspec.msgpack.decode(frames[1], type=Order)
            body = [outputs(order.tokens)]
            for _ in range(order.messages):
                while not sender.send(body):
                    time.sleep(0.0002)
        return False

    poller = SocketPoller()
    poller.add(receiver.fd, read)
    while True:  # until it is killed
        poller.turn()


class Receiver:
    """A client's ends of the data channel, by any of the ways."""

    def __init__(self, way: str, directory: str) -> None:
        self._left = 0  # messages until `_done`
        self._tokens = 0  # of each
        self._done: asyncio.Future[None] | None = None
        self.reader: SocketReader
        keys = None if way == "ipc" else SessionKeys.make()
        self.context = make_context(keys)
        if way == "ipc":
            ends = [f"ipc://{directory}/{name}" for name in ("in", "out")]
            self._router = bind_input(self.context, ends[0], LIMITS)
            pull = bind_output(self.context, ends[1], LIMITS)
            self.reader = SocketReader(pull, self._take)
            self._close: list[Callable[[], None]] = [self.reader.detach, pull.close, self._router.close]
        else:
            with plain_tcp() if way == "tcp" else ExitStack():
                inputs = bind_input_tcp(self.context, LOOPBACK, LIMITS)
                reader = listen_tcp(self.context, LOOPBACK, LIMITS, self._take, self._end, inputs)
            ends = [inputs.address, reader.address]
            self.reader, self._router = reader, inputs.socket
            self._close = [reader.stop, reader.close, inputs.close]
        self.place = Place(way, keys and keys.for_peers(), *ends)

    def _take(self, body: Any, frames: Sequence[Any]) -> int:
        self._left -= 1
        if not self._left:
            assert self._done is not None
            self._done.set_result(None)
        return self._tokens

    def _end(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(reason or "the sender has ended"))

    async def take(self, order: Order) -> None:
        """Has something sent, and returns when all of it is here."""
        self._done = asyncio.get_running_loop().create_future()
        self._left, self._tokens = order.messages, order.tokens
        self._router.send_multipart([PEER, b"\x00", msgspec.msgpack.encode(order)], zmq.NOBLOCK)
        await asyncio.wait_for(self._done, 120)

    async def wait_for_sender(self) -> None:
        """Returns when it has connected, by both sockets."""
        if not self._router.poll(20_000):
            raise RuntimeError("the sender has not connected")
        self._router.recv_multipart()
        self.reader.attach(asyncio.get_running_loop())
        await self.take(Order(1, 1))

    def close(self) -> None:
        for close in self._close:
            close()
        self.context.term()


@contextmanager
def sender(place: Place) -> Iterator[None]:
    """A process that sends."""
    command = [sys.executable, "-m", "benchmarks.socket_pair"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[1]) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(place) + b"\n")
            process.stdin.flush()
            yield
        finally:
            process.kill()


async def _measure(way: str, messages: int, trips: int) -> PairSample:
    """One way, with a sender of its own."""
    speeds, cpu = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        receiver = Receiver(way, directory)
        try:
            with sender(receiver.place):
                await receiver.wait_for_sender()
                for name, tokens in SIZES.items():
                    await receiver.take(Order(max(1, messages // 10), tokens))
                    gc.collect()
                    cpu_before, before = time.process_time_ns(), time.perf_counter()
                    await receiver.take(Order(messages, tokens))
                    speeds[name] = messages * tokens / (time.perf_counter() - before)
                    cpu[name] = (time.process_time_ns() - cpu_before) / (messages * tokens)
                times = []
                for _ in range(trips):
                    before = time.perf_counter()
                    await receiver.take(Order(1, 1))
                    times.append((time.perf_counter() - before) * 1e6)
        finally:
            receiver.close()
    return PairSample(way, speeds, cpu, spread(times).median)


def measure_pairs(messages: int, trips: int, reps: int) -> list[PairSample]:
    """All ways in turn."""
    return [asyncio.run(_measure(way, messages, trips)) for _ in range(reps) for way in WAYS]


def report_pairs(samples: list[PairSample], heading: str) -> None:
    """Prints the table."""
    columns = ["way"]
    for name in SIZES:
        columns += [f"k tokens/s, {name}", "CPU ns/token"]
    columns.append("round trip us")
    rows = []
    for way in WAYS:
        mine = [sample for sample in samples if sample.way == way]
        row = [way]
        for name in SIZES:
            row.append(spread([sample.tokens_per_second[name] for sample in mine]).text(scale=1000.0))
            row.append(spread([sample.cpu_ns_per_token[name] for sample in mine]).text(1))
        rows.append([*row, spread([sample.trip_us for sample in mine]).text()])
    show(heading, columns, rows)


if __name__ == "__main__":
    send_as_told()
