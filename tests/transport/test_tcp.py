"""The data channel by TCP: what comes through, who disturbs it in vain, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from outboard.config import NetworkConfig, TransportConfig
from outboard.errors import ConfigError
from outboard.transport.curve import KeyedContext, SessionKeys
from outboard.transport.network import connect
from outboard.transport.outbox import Outbox
from outboard.transport.sockets import ControlClient, ControlServer, ZmqSender
from outboard.transport.tcp import TcpInput, TcpInputSender, TcpReader, bind_input_tcp, listen_tcp
from outboard.transport.zmq_inputs import ZmqInputReceiver
from strangers import LOOPBACK, REQUEST, keyed, knocking, place, visit
from support import Run

KEYS = SessionKeys.make()
LIMITS = TransportConfig()
QUICK = NetworkConfig(listen="127.0.0.1", heartbeat_interval=0.1, patience=1.0)


class Channel:
    """A client's ends of a data channel, and what they tell."""

    def __init__(self, context: KeyedContext, network: NetworkConfig, limits: TransportConfig, within: float) -> None:
        self.got: list[tuple[bytes, list[bytes]]] = []
        self.ends: list[str] = []
        self.input: TcpInput = bind_input_tcp(context, network, limits, within=within)
        self.reader: TcpReader = listen_tcp(
            context, network, limits, self._take, self.ends.append, self.input, within=within
        )
        self.outbox = Outbox(TcpInputSender(self.input, b"engine core", self._call_later))
        self.loop: asyncio.AbstractEventLoop | None = None

    def _take(self, body: Any, frames: Sequence[Any]) -> None:
        self.got.append((bytes(body), [bytes(frame) for frame in frames]))

    def _call_later(self, delay: float, call: Callable[[], None]) -> object:
        assert self.loop is not None
        return self.loop.call_later(delay, call)

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        assert self.reader.accept()
        self.reader.attach(self.loop)

    async def until(self, condition: Callable[[], Any], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)

    def close(self) -> None:
        self.reader.stop()
        self.reader.close()
        self.input.close()


@contextlib.contextmanager
def open_channel(
    context: KeyedContext,
    network: NetworkConfig = LOOPBACK,
    limits: TransportConfig = LIMITS,
    within: float = 30.0,
) -> Iterator[Channel]:
    channel = Channel(context, network, limits, within)
    try:
        yield channel
    finally:
        channel.close()


def receive(receiver: ZmqInputReceiver, eventually: Callable[..., Any]) -> list[bytes]:
    return [bytes(frame) for frame in eventually(receiver.receive)]


@contextlib.contextmanager
def engine_core(channel: Channel, limits: TransportConfig = LIMITS) -> Iterator[tuple[ZmqInputReceiver, ZmqSender]]:
    """Its ends, of a context of its own."""
    with keyed(KEYS.for_peers()) as theirs:
        receiver = ZmqInputReceiver(theirs, channel.input.address, b"engine core", limits)
        sender = ZmqSender(theirs, channel.reader.address, limits)
        yield receiver, sender
        receiver.close()
        sender.close(0)


def test_messages_go_both_ways(run: Run, eventually: Callable[..., Any], nothing_left: None) -> None:
    async def scenario() -> None:
        with keyed(KEYS) as ours, open_channel(ours) as channel, engine_core(channel) as (receiver, sender):
            channel.start()
            for number in range(100):
                channel.outbox.send([b"\x00", b"%d" % number, *([b"x" * 100_000] if number % 10 == 0 else [])])
                assert sender.send([b"%d" % number, *([b"y" * 100_000, b""] if number % 10 == 0 else [])])
            got: list[list[bytes]] = []
            while len(got) < 100:
                await asyncio.sleep(0.001)
                while (frames := receiver.receive()) is not None:
                    got.append([bytes(frame) for frame in frames])
            assert [int(frames[1]) for frames in got] == list(range(100))
            assert [frames[2:] for frames in got[:2]] == [[b"x" * 100_000], []]
            await channel.until(lambda: len(channel.got) == 100)
            assert [int(body) for body, _ in channel.got] == list(range(100))
            assert [frames for _, frames in channel.got[:2]] == [[b"y" * 100_000, b""], []]
            assert not channel.ends
            assert ours.refused == {"wrong key": 0, "no handshake": 0}

    run(scenario())


# --- who disturbs it in vain -----------------------------------------------------------------------------------------

OTHERS = SessionKeys.make()
KNOCKERS: list[dict[str, bytes]] = [
    {},
    {
        "CURVE_SERVERKEY": KEYS.server_public.encode(),
        "CURVE_PUBLICKEY": OTHERS.client_public.encode(),
        "CURVE_SECRETKEY": OTHERS.client_secret.encode(),
    },
]
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
# None is said to the end: the handshake's time limit ends those that would go on.
WORDS = [b"", REQUEST, b"\x16\x03\x01\x02\x00\x01" + bytes(506), bytes(range(256)) * 300, GREETING[:11] + b"\x01" * 500]
# A command of 4 GiB, to a socket that takes such messages: it is never read to the end.
HUGE = GREETING + b"\x06" + (4 << 30).to_bytes(8, "big") + b"x" * 1000


def test_strangers_disturb_nothing_and_are_counted(run: Run, eventually: Callable[..., Any]) -> None:
    messages, scans, rounds = 3000, 100, 3

    async def scenario() -> None:
        with (
            keyed(KEYS) as ours,
            open_channel(ours) as channel,
            engine_core(channel) as (receiver, sender),
        ):
            channel.start()
            server = ControlServer(ours, "inproc://control", network=LOOPBACK)
            with keyed(KEYS.for_peers()) as theirs:
                client = ControlClient(theirs, server.tcp_address)
                client.send(b"hello")
                server.wait([], 10)
                peer, _ = server.receive() or (b"", [])
                channel.outbox.send([b"\x00", b"first"])
                await channel.until(lambda: receiver.pending())
                assert receiver.receive() == [b"\x00", b"first"]
                addresses = {
                    channel.reader.address: zmq.PUSH,
                    channel.input.address: zmq.DEALER,
                    server.tcp_address: zmq.DEALER,
                }
                disturbing = threading.Thread(target=disturb, args=(ours, addresses))
                disturbing.start()
                inputs = []
                for number in range(messages):
                    channel.outbox.send([b"\x00", b"%d" % number])
                    while not sender.send([b"%d" % number]):
                        await asyncio.sleep(0.001)
                    while (frames := receiver.receive()) is not None:
                        inputs.append(int(bytes(frames[1])))
                    if number % 10 == 0:
                        await asyncio.sleep(0.002)
                async with asyncio.timeout(30):
                    while disturbing.is_alive():
                        await asyncio.sleep(0.01)
                await channel.until(lambda: len(channel.got) == messages)
                while len(inputs) < messages:
                    inputs += [int(bytes(frames[1])) for _ in range(1) if (frames := receiver.receive()) is not None]
                    await asyncio.sleep(0)
                assert [int(body) for body, _ in channel.got] == list(range(messages)) == inputs
                server.send(peer, b"still here")
                assert client.receive() == b"still here"
                assert server.receive() is None
                client.close()
            assert not channel.ends
            sockets = 3
            wrong_key = sockets * rounds
            others = sockets * (scans + rounds * (len(WORDS) + len(KNOCKERS) - 1))
            assert ours.refused == {"wrong key": wrong_key, "no handshake": others}

    def disturb(ours: KeyedContext, addresses: dict[str, int]) -> None:
        def counted(count: int) -> None:
            eventually(lambda: sum(ours.refused.values()) == count)

        count = 0
        for address, kind in addresses.items():
            for _ in range(scans):
                visit(address)
            count += scans
            for _ in range(rounds):
                for words in WORDS:
                    visit(address, words)
                count += len(WORDS)
                counted(count)
                for options in KNOCKERS:
                    count += 1
                    with knocking(address, kind, **options):
                        counted(count)

    run(scenario())


def test_a_half_handshake_is_ended(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr("outboard.transport.network._HANDSHAKE", 0.3)

    async def scenario() -> None:
        with keyed(KEYS) as ours, open_channel(ours) as channel:
            channel.start()
            before = psutil.Process().memory_info().rss
            words = [GREETING[:5], GREETING, HUGE]
            visits = [asyncio.to_thread(visit, channel.reader.address, said) for said in words]
            await asyncio.gather(*visits)
            await channel.until(lambda: ours.refused == {"wrong key": 0, "no handshake": len(words)})
            assert psutil.Process().memory_info().rss - before < 64 << 20
            assert not channel.ends

    run(scenario())


# --- how it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["input", "output"])
def test_the_end_of_either_connection_ends_it(run: Run, which: str) -> None:
    async def scenario() -> None:
        with keyed(KEYS) as ours, open_channel(ours) as channel, engine_core(channel) as (receiver, sender):
            channel.start()
            assert sender.send([b"last words"])
            channel.outbox.send([b"\x00", b"x"])
            await channel.until(lambda: channel.got and receiver.pending())
            if which == "input":
                receiver.close()
            else:
                sender.close(0)
            await channel.until(lambda: channel.ends)
            assert channel.ends == [""]
            assert ours.refused == {"wrong key": 0, "no handshake": 0}

    run(scenario())


def test_nobody_comes(run: Run) -> None:
    async def scenario() -> None:
        with keyed(KEYS) as ours, open_channel(ours, within=0.2) as channel:
            channel.start()
            await asyncio.to_thread(visit, channel.reader.address, REQUEST)  # counts for nothing
            await channel.until(lambda: channel.ends)
            (reason,) = channel.ends
            addresses = [one.partition("#")[0] for one in (channel.reader.address, channel.input.address)]
            address = addresses[0] if addresses[0] in reason else addresses[1]
            assert reason == (
                f"nobody connected to {address} within 0.2 s; can that port be reached from where the engine core runs?"
            )

    run(scenario())


def test_one_that_comes_back_is_as_bad_as_one_that_is_gone(run: Run) -> None:
    """What was lost with the first connection would be missing."""

    async def scenario() -> None:
        with keyed(KEYS) as ours, open_channel(ours) as channel, engine_core(channel):
            channel.start()
            with keyed(KEYS.for_peers()) as theirs:
                ZmqSender(theirs, channel.reader.address, LIMITS)
                await channel.until(lambda: channel.ends)
            assert channel.ends == [""]

    run(scenario())


def test_who_comes_back_to_a_port_that_is_another_s_by_now_is_a_stranger(run: Run) -> None:
    async def scenario() -> None:
        with keyed(KEYS) as ours, keyed(KEYS.for_peers()) as theirs:
            with open_channel(ours) as earlier:
                port = place(earlier.reader.address)[1]
                stale = ZmqSender(theirs, earlier.reader.address, LIMITS)
                earlier.start()
                stale.send([b"to the earlier"])
                await earlier.until(lambda: earlier.got)
            stale.send([b"late"])
            network = NetworkConfig(listen="127.0.0.1", ports=f"{port}-{port}")
            got: list[bytes] = []
            ends: list[str] = []
            async with asyncio.timeout(10):
                while True:
                    try:
                        reader = listen_tcp(ours, network, LIMITS, lambda body, _: got.append(bytes(body)), ends.append)
                        break
                    except OSError:  # ZeroMQ closes the earlier one in a thread of its own
                        await asyncio.sleep(0.01)
            reader.attach(asyncio.get_running_loop())
            ZmqSender(theirs, reader.address, LIMITS).send([b"to this one"])
            await earlier.until(lambda: got and ours.refused["no handshake"])
            assert (got, ends) == ([b"to this one"], [])
            reader.stop()
            reader.close()

    run(scenario())


@pytest.mark.parametrize("key", ["zz", "00", "00" * 33])
def test_an_address_whose_key_is_none(key: str) -> None:
    with keyed(KEYS.for_peers()) as theirs:
        for connecting in (
            lambda: ZmqSender(theirs, f"tcp://127.0.0.1:9#{key}", LIMITS),
            lambda: ZmqInputReceiver(theirs, f"tcp://127.0.0.1:9#{key}", b"x", LIMITS),
        ):
            with pytest.raises(OSError, match="ZeroMQ: Invalid argument"):
                connecting()


def test_what_it_tells_before_anybody_listens_is_not_lost(run: Run) -> None:
    with keyed(KEYS) as ours, open_channel(ours) as channel:
        with engine_core(channel) as (receiver, sender):
            sender.send([b"last words"])
            channel.input.socket.poll(10_000)
            assert channel.reader._socket.poll(10_000)
            assert receiver is not None

        async def scenario() -> None:
            channel.start()
            await channel.until(lambda: channel.ends and channel.got)

        run(scenario())
        assert channel.got == [(b"last words", [])]


def test_it_is_stopped_and_closed_twice(run: Run, nothing_left: None) -> None:
    async def scenario() -> None:
        with keyed(KEYS) as ours, open_channel(ours) as channel, engine_core(channel) as (_, sender):
            channel.start()
            sender.send([b"x"])
            await channel.until(lambda: channel.got)
            channel.reader.stop()
            sender.close(0)
            channel.close()
            assert not channel.ends

    run(scenario())


@pytest.mark.parametrize("extra", [0, 1])
def test_too_large_an_output_ends_it(run: Run, extra: int) -> None:
    limits = TransportConfig(max_message_bytes=100_000)

    async def scenario() -> None:
        with keyed(KEYS) as ours, open_channel(ours, limits=limits) as channel, engine_core(channel) as (_, sender):
            channel.start()
            sender.send([b"x" * (100_000 + extra)])
            sender.send([b"behind it"])
            await channel.until(lambda: len(channel.got) == 2 or channel.ends)
            assert (len(channel.got), channel.ends) == ((2, []) if not extra else (0, [""]))

    run(scenario())


@pytest.mark.parametrize("extra", [0, 1])
def test_too_large_an_input_ends_it(run: Run, extra: int) -> None:
    limits = TransportConfig(max_message_bytes=100_000)

    async def scenario() -> None:
        with keyed(KEYS) as ours, open_channel(ours) as channel, engine_core(channel, limits) as (receiver, _):
            channel.start()
            channel.outbox.send([b"\x00", b"x" * (100_000 + extra)])
            await channel.until(lambda: receiver.pending() or channel.ends)
            assert (receiver.receive() is not None, channel.ends) == ((True, []) if not extra else (False, [""]))

    run(scenario())


def test_nothing_large_comes_in_where_inputs_go_out(run: Run) -> None:
    async def scenario() -> None:
        with keyed(KEYS) as ours, open_channel(ours) as channel, keyed(KEYS.for_peers()) as theirs:
            channel.start()
            dealer = theirs.socket(zmq.DEALER)
            connect(dealer, channel.input.address)
            dealer.send(b"x" * 5000)
            await channel.until(lambda: channel.ends)

    run(scenario())


def test_what_cannot_be_made_leaves_nothing(eventually: Callable[..., Any]) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    with keyed(KEYS) as ours:
        with pytest.raises(ConfigError, match="is no network interface"):
            bind_input_tcp(ours, NetworkConfig(listen="eth77"), LIMITS)
        with open_channel(ours) as channel:
            taken = NetworkConfig(listen="lo", ports="{0}-{0}".format(place(channel.reader.address)[1]))
            before = descriptors()
            for _ in range(10):
                with pytest.raises(OSError, match="is taken"):
                    listen_tcp(ours, taken, LIMITS, lambda *_: None, lambda _: None)
            eventually(lambda: descriptors() <= before)


# --- silence ---------------------------------------------------------------------------------------------------------

PEER = """
import sys, time
import msgspec
from outboard.config import NetworkConfig, TransportConfig
from outboard.transport.curve import SessionKeys
from outboard.transport.sockets import ControlServer, ZmqSender, make_context
from outboard.transport.zmq_inputs import ZmqInputReceiver

keys, connect_to = msgspec.json.decode(sys.stdin.readline(), type=tuple[SessionKeys, list[str]])
context = make_context(keys)
if connect_to:
    receiver = ZmqInputReceiver(context, connect_to[0], b"engine core", TransportConfig())
    sender = ZmqSender(context, connect_to[1], TransportConfig())
    while True:
        frames = receiver.receive()
        if frames is not None:
            sender.send([bytes(frames[1])])
        time.sleep(0.001)
network = NetworkConfig(listen="127.0.0.1", heartbeat_interval=0.1, patience=1.0)
server = ControlServer(context, "inproc://control", network=network)
print(server.tcp_address, flush=True)
server.wait([], None)
while True:
    server.send(server.receive()[0], b"answer")
    server.wait([], None)
"""


@contextlib.contextmanager
def peer_process(keys: SessionKeys, *addresses: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PEER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode((keys, addresses)).decode() + "\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()


def test_a_silent_peer_is_disconnected_once_patience_is_over(run: Run) -> None:
    async def scenario() -> None:
        with (
            keyed(KEYS) as ours,
            open_channel(ours, QUICK) as channel,
            peer_process(KEYS.for_peers(), channel.input.address, channel.reader.address) as process,
        ):
            channel.start()
            channel.outbox.send([b"\x00", b"0"])
            await channel.until(lambda: len(channel.got) == 1)
            process.send_signal(signal.SIGSTOP)  # for less than its patience
            channel.outbox.send([b"\x00", b"1"])
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGCONT)
            await channel.until(lambda: len(channel.got) == 2)
            assert not channel.ends
            started = asyncio.get_running_loop().time()
            process.send_signal(signal.SIGSTOP)
            await channel.until(lambda: channel.ends, 10)
            assert 0.8 < asyncio.get_running_loop().time() - started < 5
            assert channel.ends == [""]

    run(scenario())


def test_a_peer_that_is_killed_ends_it(run: Run) -> None:
    async def scenario() -> None:
        with (
            keyed(KEYS) as ours,
            open_channel(ours) as channel,
            peer_process(KEYS.for_peers(), channel.input.address, channel.reader.address) as process,
        ):
            channel.start()
            channel.outbox.send([b"\x00", b"0"])
            await channel.until(lambda: len(channel.got) == 1)
            process.kill()
            await channel.until(lambda: channel.ends, 5)
            assert channel.ends == [""]

    run(scenario())


def test_a_silent_listener_is_left_by_its_own_patience(eventually: Callable[..., Any]) -> None:
    """Whoever connects has been told of it by the heartbeats, and connects again once the listener is back."""
    with peer_process(KEYS) as process, keyed(KEYS.for_peers()) as theirs:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        dealer = theirs.socket(zmq.DEALER)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        connect(dealer, address)
        dealer.send(b"hello")
        assert dealer.poll(10_000)
        assert dealer.recv() == b"answer"
        assert monitor.poll(10_000)
        monitor.recv_multipart()
        assert not monitor.poll(500)  # heartbeats come
        process.send_signal(signal.SIGSTOP)
        assert monitor.poll(5000)
        monitor.recv_multipart()
        process.send_signal(signal.SIGCONT)
        assert monitor.poll(10_000)
        dealer.send(b"hello")
        assert dealer.poll(10_000)
        dealer.disable_monitor()
