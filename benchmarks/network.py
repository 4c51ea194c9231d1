"""Sockets between two processes: tokens a second, CPU time of the receiver a token, and a round trip.

What is sent has the size of an engine core's outputs, of 256 tokens and of one; it is encoded once, and not decoded.
The ways take turns in one run, so that whatever else the machine does meets them alike:

    ipc        between two processes of one host, by ZeroMQ
    tcp        not encrypted; only here, Outboard has no such sockets
    tcp+CURVE  between hosts

and the latter two once more with another host, which is a network namespace behind virtual cables, where this process
may make one, with a delay of 1 ms each way, where the kernel knows how (netem).

    python -m benchmarks.network [--messages 20000] [--trips 1000] [--reps 5] [--delay-ms 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.backend import Socket as SocketBase

from benchmarks.measure import show, spread, write_json
from benchmarks.namespaces import Far, NoNamespaceError, far_host
from outboard.config import NetworkConfig, TransportConfig
from outboard.protocol.messages import EngineCoreOutputs
from outboard.transport.curve import SessionKeys
from outboard.transport.network import local_address
from outboard.transport.poller import SocketPoller
from outboard.transport.reader import SocketReader
from outboard.transport.sockets import (
    ZmqContext,
    ZmqSender,
    ZmqSocket,
    bind_output,
    make_context,
    make_socket,
)
from outboard.transport.tcp import bind_input_tcp, listen_tcp
from outboard.transport.zmq_inputs import ZmqInputReceiver, bind_input

LIMITS = TransportConfig()
SIZES = {"256 tokens": 256, "1 token": 1}
WAYS = ("ipc", "tcp", "tcp+CURVE")
PEER = b"peer"


class Order(msgspec.Struct, frozen=True, array_like=True):
    """What the sender is to do: so many messages of so many tokens each, or, with 0 tokens, to answer each message."""

    messages: int
    tokens: int


class Place(msgspec.Struct, frozen=True):
    """What the sender is told when it starts."""

    way: str
    keys: SessionKeys | None
    input_address: str
    output_address: str


class Sample(msgspec.Struct, frozen=True):
    """One repetition of one way: by size of the messages, and the median of its round trips."""

    way: str
    tokens_per_second: dict[str, float]
    cpu_ns_per_token: dict[str, float]
    trip_us: float


# --- the sender: as an engine core has it ----------------------------------------------------------------------------


class _PlainReceiver(ZmqInputReceiver):
    """By TCP, not encrypted."""

    def __init__(self, context: ZmqContext, address: str) -> None:
        self._socket = make_socket(context, zmq.DEALER, LIMITS)
        self._socket.setsockopt(zmq.IDENTITY, PEER)
        self._socket.connect(address)
        self._socket.send(b"")
        self.fd = int(self._socket.getsockopt(zmq.FD))


class _PlainSender(ZmqSender):
    """By TCP, not encrypted."""

    def __init__(self, context: ZmqContext, address: str) -> None:
        self._socket = make_socket(context, zmq.PUSH, LIMITS)
        self._socket.connect(address)
        self._send = functools.partial(SocketBase.send, self._socket)


def outputs(tokens: int) -> bytes:
    """A message of an engine core that has a token for each of so many requests."""
    return msgspec.msgpack.encode(
        EngineCoreOutputs(0, 2**63, 1000, 1e5, list(range(10_000, 10_000 + tokens)), [i * 37 for i in range(tokens)])
    )


def send_as_told() -> None:
    """The sender's main: what to do comes by its input socket."""
    place = msgspec.json.decode(sys.stdin.buffer.readline(), type=Place)
    context = make_context(place.keys)
    if place.way == "tcp":
        receiver: ZmqInputReceiver = _PlainReceiver(context, place.input_address)
        sender: ZmqSender = _PlainSender(context, place.output_address)
    else:
        receiver = ZmqInputReceiver(context, place.input_address, PEER, LIMITS)
        sender = ZmqSender(context, place.output_address, LIMITS)

    def push(body: bytes) -> None:
        while not sender.send([body]):
            time.sleep(0.0002)

    def read() -> bool:
        while (frames := receiver.receive()) is not None:
            order = msgspec.msgpack.decode(frames[1], type=Order)
            body = outputs(order.tokens)
            for _ in range(order.messages):
                push(body)
        return False

    poller = SocketPoller()
    poller.add(receiver.fd, read)
    while True:  # until it is killed
        poller.turn()


# --- the receiver: as a client has it --------------------------------------------------------------------------------


class Receiver:
    """A client's ends of the data channel, by any of the ways."""

    def __init__(self, way: str, network: NetworkConfig, directory: str) -> None:
        self.keys = SessionKeys.make() if way == "tcp+CURVE" else None
        self.context = make_context(self.keys)
        self._way = way
        self._left = 0  # messages until `_done`
        self._tokens = 0  # of each
        self._done: asyncio.Future[None] | None = None
        self.reader: SocketReader
        if way == "tcp+CURVE":
            inputs = bind_input_tcp(self.context, network, LIMITS)
            reader = listen_tcp(self.context, network, LIMITS, self._take, self._end, inputs)
            self.reader, self._router = reader, inputs.socket
            self._close: list[Callable[[], None]] = [reader.stop, reader.close, inputs.close]
            self.place = Place(way, self.keys, inputs.address, reader.address)
        else:
            ends = [f"ipc://{directory}/{name}" for name in ("in", "out")]
            if way == "tcp":
                ends = [f"tcp://{local_address(network)}:*"] * 2
            self._router = bind_input(self.context, ends[0], LIMITS)
            pull = bind_output(self.context, ends[1], LIMITS)
            self.reader = SocketReader(pull, self._take)
            self._close = [self.reader.detach, pull.close, self._router.close]
            self.place = Place(way, None, *(_bound(socket) for socket in (self._router, pull)))

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


def _bound(socket: ZmqSocket) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


@contextmanager
def sender(place: Place, before: list[str]) -> Iterator[None]:
    """A process that sends."""
    command = [*before, sys.executable, "-m", "benchmarks.network", "--send"]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=root) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(place) + b"\n")
            process.stdin.flush()
            yield
        finally:
            process.kill()


async def measure(way: str, far: Far | None, messages: int, trips: int) -> Sample:
    """One way, with a sender of its own."""
    network = NetworkConfig(listen="127.0.0.1" if far is None else far.interface)
    speeds, cpu = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        receiver = Receiver(way, network, directory)
        try:
            with sender(receiver.place, [] if far is None else far.command):
                await receiver.wait_for_sender()
                for name, tokens in SIZES.items():
                    await receiver.take(Order(messages // 10, tokens))
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
    return Sample(way, speeds, cpu, spread(times).median)


def run(far: Far | None, messages: int, trips: int, reps: int) -> list[Sample]:
    """All ways in turn."""
    ways = WAYS if far is None else [way for way in WAYS if way != "ipc"]
    return [asyncio.run(measure(way, far, messages, trips)) for _ in range(reps) for way in ways]


def report(samples: list[Sample], heading: str, caption: str = "") -> None:
    """Prints one table."""
    columns = ["way"]
    for name in SIZES:
        columns += [f"k tokens/s, {name}", "CPU ns/token"]
    columns.append("round trip us")
    rows = []
    for way in dict.fromkeys(sample.way for sample in samples):
        mine = [sample for sample in samples if sample.way == way]
        row = [way]
        for name in SIZES:
            row.append(spread([sample.tokens_per_second[name] for sample in mine]).text(scale=1000.0))
            row.append(spread([sample.cpu_ns_per_token[name] for sample in mine]).text(1))
        rows.append([*row, spread([sample.trip_us for sample in mine]).text()])
    show(heading, columns, rows, caption)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description="Sockets between processes.")
    parser.add_argument("--messages", type=int, default=20_000, help="of each size")
    parser.add_argument("--trips", type=int, default=1000)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=1.0, help="of the other host, each way")
    parser.add_argument("--json", metavar="FILE", help="write every measurement here")
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send:
        send_as_told()
    note = f"median (least - most) of {args.reps}"
    results = {"here": run(None, args.messages, args.trips, args.reps)}
    report(results["here"], f"On one host: {args.messages:,} messages of each size, {note}")
    try:
        with far_host(args.delay_ms) as far:
            results["far"] = run(far, args.messages, max(args.trips // 4, 1), args.reps)
        how = "with no delay, which the kernel does not know" if far.no_delay else f"{args.delay_ms:g} ms away"
        report(results["far"], f"Another host, {how}: {note}", far.no_delay)
    except NoNamespaceError as error:
        print(f"skipped: another host, no network namespace can be made here: {error}")
    if args.json:
        write_json(args.json, msgspec.to_builtins(results))


if __name__ == "__main__":
    main()
