"""A head and a node in two network namespaces, with a link that is slow, lossy, cut, or visited by strangers."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import namespaces
from benchmarks.namespaces import Network
from network_engine import MixedEngine
from outboard import (
    AsyncLLM,
    DPLBAsyncMPClient,
    EngineConfig,
    EngineGroup,
    EngineRestartedError,
    EngineState,
    FaultConfig,
    ParallelConfig,
    RestartPolicy,
    SamplingParams,
    launch_engines,
)
from outboard.config import NetworkConfig
from outboard.transport.curve import new_token_file

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.xdist_group("network")]

ALPHABET = [97 + i % 26 for i in range(100_000)]
TESTS = Path(__file__).parents[1]
PORT = 5570
PATIENCE = 2.0
INTERVAL = 0.25
# A rank that was lost is noticed within the patience, and some intervals of looking; a busy machine takes longer.
NOTICED = PATIENCE + 4.0
# A node tries to join again after a pause that grows with the length of the cut, and then starts its engine core.
BACK = 30.0

why_not = functools.cache(namespaces.why_not)


@pytest.fixture
def network(nothing_left: None, request: pytest.FixtureRequest) -> Iterator[Network]:
    """The link, with 5 ms of delay and 1 % of loss; this thread is in the near namespace."""
    if why_not():
        pytest.skip(why_not())
    options = {"delay": 0.005, "loss": 0.01, **getattr(request, "param", {})}
    with Network(**options) as network, network.near.entered():
        yield network


@pytest.fixture
def token(nothing_left: None, short_tmp: Path) -> Iterator[Path]:
    path = short_tmp / "token"
    new_token_file(path)
    yield path
    path.unlink()


def config(network: Network, token: Path, **changes: Any) -> EngineConfig:
    faults = FaultConfig(
        restart=RestartPolicy.on_failure(backoff=0.05),
        shutdown_timeout=5.0,
        startup_timeout=30.0,
        in_flight=changes.pop("in_flight", "fail"),
    )
    return EngineConfig(
        engine=MixedEngine,
        options={"step_ms": 2.0, **changes.pop("options", {})},
        parallel=ParallelConfig(
            data_parallel_size=2, policy="round_robin", client_count=changes.pop("client_count", 1)
        ),
        faults=faults,
        network=NetworkConfig(
            listen=network.near.address,
            port=PORT,
            token_file=str(token),
            local_ranks=1,
            patience=changes.pop("patience", PATIENCE),
            heartbeat_interval=INTERVAL,
        ),
        **changes,
    )


@contextmanager
def joined_node(network: Network, token: Path, name: str = "far") -> Iterator[subprocess.Popen[bytes]]:
    """A node in the far namespace."""
    head = network.near.address
    command = [
        *(sys.executable, "-c", "from outboard.cli.main import run; run()", "node", "--name", name),
        *("--join", f"[{head}]:{PORT}" if ":" in head else f"{head}:{PORT}", "--token-file", str(token)),
    ]
    paths = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    node = network.far.popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
    try:
        yield node
    finally:
        if node.poll() is None:
            node.send_signal(signal.SIGCONT)
            node.terminate()
        try:
            node.wait(20)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()
            raise


@contextmanager
def running_group(
    network: Network, token: Path, **changes: Any
) -> Iterator[tuple[EngineGroup, subprocess.Popen[bytes]]]:
    """A group of two ranks, the second on a node in the far namespace, which outlives it."""
    with ExitStack() as stack:
        node = stack.enter_context(joined_node(network, token))
        yield stack.enter_context(launch_engines(config(network, token, **changes))), node
        network.heal()  # or the end takes as long as they are patient


def run(main: Awaitable[None], bound: float = 100.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(bound):
            await main

    asyncio.run(bounded())


async def until(condition: Callable[[], Any], bound: float) -> float:
    """Waits until it holds; how many seconds that took."""
    started = time.monotonic()
    async with asyncio.timeout(bound):
        while not condition():
            await asyncio.sleep(0.01)
    return time.monotonic() - started


class Stream:
    """One request, and what came of it."""

    def __init__(self, llm: AsyncLLM, count: int, rank: int | None = None) -> None:
        self.count = count
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self.longest_gap = 0.0
        self.task = asyncio.create_task(self._read(llm, rank))

    async def _read(self, llm: AsyncLLM, rank: int | None) -> None:
        params = SamplingParams(max_tokens=self.count, output_kind="delta", detokenize=False)
        last: float | None = None
        try:
            async for output in llm.generate([1, 2, 3], params, data_parallel_rank=rank):
                now = time.monotonic()
                self.longest_gap = max(self.longest_gap, now - (last or now))
                last = now
                self.tokens += output.outputs[0].token_ids
        except EngineRestartedError as error:
            self.error = error

    def check(self) -> None:
        """Every token is accounted for, once."""
        assert self.tokens == ALPHABET[: len(self.tokens)]
        assert (len(self.tokens) == self.count) == (self.error is None)


async def ended(streams: list[Stream], bound: float) -> None:
    """Waits until all have ended, and looks at what they got."""
    async with asyncio.timeout(bound):
        await asyncio.gather(*(stream.task for stream in streams))
    for stream in streams:
        stream.check()


def in_flight(llm: AsyncLLM) -> dict[int, int]:
    assert isinstance(llm.client, DPLBAsyncMPClient)
    return dict(llm.client.lb_engines)


def pid_of(llm: AsyncLLM, rank: int) -> int:
    return llm.client.core_engines[rank].pid


async def serves_again(llm: AsyncLLM, group: EngineGroup) -> None:
    """The far rank is the next incarnation, which serves."""
    await until(lambda: group.engines[1].state is EngineState.READY, BACK)
    assert (group.engines[1].incarnation, group.engines[1].node) == (1, "far")
    await until(lambda: llm.client.core_engines[1].incarnation == 1, 10)
    stream = Stream(llm, 100, rank=1)
    await ended([stream], 20)
    assert stream.error is None


def test_why_these_tests_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(namespaces, "TUN", "/dev/no-such-device")
        assert os.geteuid() or "/dev/no-such-device" in namespaces.why_not()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda program: None)
        assert os.geteuid() or "`ip`" in namespaces.why_not()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in namespaces.why_not()


# --- a slow link that loses packets ----------------------------------------------------------------------------------


async def mixed_load(llm: AsyncLLM) -> None:
    """Tokens, arrays and calls at once, each exact."""

    async def array(number: int) -> None:
        sent = np.arange(number, number + 50_000, dtype=np.float32).reshape(-1, 100)  # 200 KB: frames of its own
        [output] = [output async for output in llm.generate(inputs=sent, data_parallel_rank=number % 2)]
        np.testing.assert_array_equal(output.outputs[0].result, sent)

    async def calls(rank: int) -> None:
        for number in range(20):
            value = {"number": number, "text": "x" * 1000}
            assert await llm.client.call_utility_async("echo", value, rank=rank, timeout=20) == value

    streams = [Stream(llm, 300 + number, rank=number % 2) for number in range(64)]
    await asyncio.gather(ended(streams, 60), *(array(number) for number in range(12)), calls(0), calls(1))
    assert not any(stream.error for stream in streams)


@pytest.mark.parametrize("network", [{}, {"ipv6": True}], indirect=True, ids=["ipv4", "ipv6"])
def test_all_of_a_mixed_load_arrives_over_a_slow_and_lossy_link(network: Network, token: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(config(network, token)) as llm:
            assert await llm.client.call_utility_async("pid", rank=1) == pid_of(llm, 1)
            await mixed_load(llm)
            assert llm.client.stats()["dropped"] == {}

    with joined_node(network, token):
        run(main())
    counts = network.counts()
    assert counts["in"]["carried"] > 500
    assert counts["in"]["dropped"] > 0


# --- cuts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_a_cut_shorter_than_the_patience_costs_time_only(network: Network, token: Path, share: float) -> None:
    """In a cut nearly as long as the patience TCP comes to wait for longer than that before it sends anew."""
    patience = 4.0
    cut = share * patience
    with running_group(network, token, patience=patience) as (group, _):

        async def main() -> None:
            async with AsyncLLM(addresses=group.addresses) as llm:
                streams = [Stream(llm, 2000, rank=number % 2) for number in range(32)]
                call = asyncio.create_task(llm.client.call_utility_async("echo", "early", rank=1, timeout=20))
                await until(lambda: all(len(stream.tokens) > 50 for stream in streams), 20)
                network.cut()
                late = [Stream(llm, 50, rank=1) for _ in range(4)]
                await asyncio.sleep(cut)
                network.heal()
                await ended([*streams, *late], 60)
                assert not any(stream.error for stream in streams + late)
                assert max(stream.longest_gap for stream in streams[1::2]) > 0.9 * cut  # it was a cut
                assert max(stream.longest_gap for stream in streams[::2]) < 0.9 * cut
                assert await call == "early"
                assert await llm.client.call_utility_async("echo", "late", rank=1, timeout=20) == "late"
                assert llm.client.stats()["dropped"] == {}
            assert [(engine.state, engine.incarnation) for engine in group.engines] == [(EngineState.READY, 0)] * 2

        run(main())


@pytest.mark.parametrize("in_flight_policy", ["fail", "resubmit", "resume"])
def test_a_longer_cut_ends_the_epoch(network: Network, token: Path, in_flight_policy: str) -> None:
    options = {"max_num_seqs": 12}  # some of 16 must wait, and have no output yet
    with running_group(network, token, in_flight=in_flight_policy, options=options) as (group, _):

        async def main() -> None:
            async with AsyncLLM(addresses=group.addresses) as llm:
                streams = [Stream(llm, 1200) for _ in range(32)]
                await until(lambda: sum(len(stream.tokens) > 50 for stream in streams) == 24, 20)
                assert in_flight(llm) == {0: 16, 1: 16}
                call = asyncio.create_task(llm.client.call_utility_async("never", rank=1))
                await asyncio.sleep(0.1)
                far = psutil.Process(pid_of(llm, 1))
                network.cut()
                took = await until(lambda: group.engines[1].state is EngineState.RESTARTING, NOTICED)
                assert took > PATIENCE - 2 * INTERVAL
                await until(lambda: not far.is_running(), NOTICED)  # its node has ended it
                with pytest.raises(EngineRestartedError, match="far"):
                    await asyncio.wait_for(call, 10)
                await ended(streams, 60)  # the link is cut still
                failed = [stream for stream in streams if stream.error is not None]
                started = [stream for stream in failed if stream.tokens]
                want = {"fail": (16, 12), "resubmit": (12, 12), "resume": (0, 0)}
                assert (len(failed), len(started)) == want[in_flight_policy]
                assert all("node far has been silent for" in str(stream.error) for stream in failed)
                assert group.engines[1].state is EngineState.RESTARTING
                assert "no node has joined" in group.engines[1].waits
                network.heal()
                await serves_again(llm, group)
                assert llm.client.stats()["dropped"] == {}

        run(main())


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_link_that_is_cut_in_one_direction(network: Network, token: Path, way: str) -> None:
    """Either side loses the other, and neither goes on."""
    with running_group(network, token, in_flight="resume") as (group, node):

        async def main() -> None:
            async with AsyncLLM(addresses=group.addresses) as llm:
                streams = [Stream(llm, 1500) for _ in range(32)]
                await until(lambda: all(len(stream.tokens) > 50 for stream in streams), 20)
                far = psutil.Process(pid_of(llm, 1))
                network.cut(way)
                await until(lambda: group.engines[1].state is EngineState.RESTARTING, NOTICED)
                # Who hears the other still, does so until that has lost its patience.
                await until(lambda: not far.is_running(), PATIENCE + NOTICED)
                await ended(streams, 60)
                assert not any(stream.error for stream in streams)
                network.heal()
                await serves_again(llm, group)  # after a single restart
                assert [(one["name"], one["taken"]) for one in group.stats()["nodes"]] == [("far", 1)]
                assert engine_cores(node) == [pid_of(llm, 1)]
                assert llm.client.stats()["dropped"] == {}

        run(main())


# --- connections that are reset --------------------------------------------------------------------------------------


def reset(network: Network, ports: set[int]) -> int:
    """Has the system of the far side reset its connections to these ports; how many there were."""
    if shutil.which("ss") is None:
        pytest.skip("to reset connections needs the program `ss` (iproute2)")
    count = 0
    for port in ports:
        where = ["dst", network.near.address, "dport", "=", str(port)]
        command = ["ip", "netns", "exec", network.far.name, "ss", "-KHtn", "state", "established", *where]
        count += len(subprocess.run(command, capture_output=True, text=True).stdout.splitlines())
    return count


def test_connections_between_head_and_node_that_are_reset(network: Network, token: Path) -> None:
    with running_group(network, token) as (group, _):

        async def main() -> None:
            ports = listening_ports()
            async with AsyncLLM(addresses=group.addresses) as llm:
                streams = [Stream(llm, 1000) for _ in range(32)]
                await until(lambda: all(len(stream.tokens) > 50 for stream in streams), 20)
                if not reset(network, ports):
                    pytest.skip("this kernel resets no connections (CONFIG_INET_DIAG_DESTROY)")
                await asyncio.sleep(0.3)
                # Who comes now is introduced to the engine core over a connection that is a new one.
                async with AsyncLLM(addresses=group.addresses, client_index=1) as other:
                    late = [Stream(other, 200, rank=1) for _ in range(4)]
                    await ended([*streams, *late], 60)
                assert not any(stream.error for stream in streams + late)
                assert [engine.incarnation for engine in group.engines] == [0, 0]

        run(main())


def test_a_data_connection_that_is_reset_is_the_end_of_the_epoch(network: Network, token: Path) -> None:
    with running_group(network, token, in_flight="resume") as (group, _):

        async def main() -> None:
            others = listening_ports()
            async with AsyncLLM(addresses=group.addresses) as llm:
                ports = listening_ports() - others
                assert len(ports) == 2
                streams = [Stream(llm, 2000) for _ in range(32)]
                await until(lambda: all(len(stream.tokens) > 50 for stream in streams), 20)
                if not reset(network, {max(ports)}):
                    pytest.skip("this kernel resets no connections (CONFIG_INET_DIAG_DESTROY)")
                await until(lambda: group.engines[1].state is EngineState.RESTARTING, 15)
                assert "the connection to the engine core on node far has ended" in group.engines[1].death.reason
                await ended(streams, 60)
                assert not any(stream.error for stream in streams)
                await serves_again(llm, group)

        run(main())


# --- nodes that die or are stopped -----------------------------------------------------------------------------------


def engine_cores(node: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of those that a node runs."""
    family = psutil.Process(node.pid).children(recursive=True)
    return [one.pid for one in family if one.cmdline()[1:] == ["-P", "-m", "outboard.engine"]]


def test_a_node_that_is_killed(network: Network, token: Path) -> None:
    with running_group(network, token, in_flight="resume") as (group, node):

        async def main() -> None:
            async with AsyncLLM(addresses=group.addresses) as llm:
                streams = [Stream(llm, 1500) for _ in range(32)]
                await until(lambda: all(len(stream.tokens) > 50 for stream in streams), 20)
                far = psutil.Process(pid_of(llm, 1))
                node.kill()
                await until(lambda: not far.is_running(), 5)  # by its warden
                await until(lambda: group.engines[1].state is EngineState.RESTARTING, NOTICED)
                assert "far" in group.engines[1].death.reason
                await ended(streams, 60)
                assert not any(stream.error for stream in streams)
                with joined_node(network, token):
                    await serves_again(llm, group)
                    await llm.shutdown()
                    await asyncio.to_thread(group.shutdown)

        run(main())


def test_a_node_that_is_stopped_for_less_than_the_patience(network: Network, token: Path) -> None:
    with running_group(network, token) as (group, node):

        async def main() -> None:
            async with AsyncLLM(addresses=group.addresses) as llm:
                streams = [Stream(llm, 1000) for _ in range(32)]
                await until(lambda: all(len(stream.tokens) > 50 for stream in streams), 20)
                node.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.5 * PATIENCE)
                node.send_signal(signal.SIGCONT)
                await ended(streams, 60)
                assert not any(stream.error for stream in streams)
                assert max(stream.longest_gap for stream in streams) < 0.5 * PATIENCE  # the engine core went on
            assert [engine.incarnation for engine in group.engines] == [0, 0]

        run(main())


def test_a_node_that_is_stopped_for_longer(network: Network, token: Path) -> None:
    """Its engine core goes on, and answers to nobody; meanwhile its rank runs elsewhere."""
    with running_group(network, token, in_flight="resume") as (group, node), joined_node(network, token, "spare"):

        async def main() -> None:
            async with AsyncLLM(addresses=group.addresses) as llm:
                await until(lambda: len(group.stats()["nodes"]) == 2, 20)
                assert group.engines[1].node == "far"
                streams = [Stream(llm, 3000) for _ in range(32)]
                await until(lambda: all(len(stream.tokens) > 50 for stream in streams), 20)
                far = psutil.Process(pid_of(llm, 1))
                node.send_signal(signal.SIGSTOP)
                await until(lambda: group.engines[1].state is EngineState.RESTARTING, NOTICED)
                await until(lambda: group.engines[1].state is EngineState.READY, BACK)
                assert group.engines[1].node == "spare"
                assert far.is_running()
                more = [Stream(llm, 500, rank=1) for _ in range(8)]
                await asyncio.sleep(0.2)
                node.send_signal(signal.SIGCONT)
                await until(lambda: not far.is_running(), 10)
                await ended([*streams, *more], 60)
                assert not any(stream.error for stream in streams + more)
                await until(lambda: len(group.stats()["nodes"]) == 2, BACK)  # it has joined again
                assert group.engines[1].incarnation == 1
                assert engine_cores(node) == []
                assert llm.client.stats()["dropped"] == {}

        run(main())


# --- strangers -------------------------------------------------------------------------------------------------------


def listening_ports() -> set[int]:
    """Ports at which somebody listens in the namespace that this thread is in."""
    found = set()
    for line in Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]:
        local, _, state = line.split()[1:4]
        if state == "0A":
            found.add(int(local.split(":")[1], 16))
    return found


@pytest.mark.parametrize("network", [{"loss": 0.0}], indirect=True, ids=["no loss"])  # each visitor comes to be one
def test_strangers_under_load(network: Network, token: Path) -> None:
    with running_group(network, token, client_count=2) as (group, _):  # so there is a coordinator, too

        async def main() -> None:
            async with AsyncLLM(addresses=group.addresses) as llm:
                streams = [Stream(llm, 4000) for _ in range(32)]
                await until(lambda: all(len(stream.tokens) > 50 for stream in streams), 20)
                assert group.stats()["refused"] == llm.client.stats()["refused"] == {}
                ports = listening_ports()
                assert PORT in ports
                assert len(ports) == 5  # for nodes, control, the coordinator, and two for the data of rank 1
                command = [sys.executable, str(Path(__file__).with_name("strangers_program.py")), network.near.address]
                command += [group.addresses.keys.server_public, *map(str, sorted(ports))]
                with program(network, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as strangers:
                    made = int(await asyncio.to_thread(strangers.stdout.readline))
                    assert made == 13 * len(ports)

                    def refused(reason: str) -> int:
                        return sum(who.stats()["refused"].get(reason, 0) for who in (group, llm.client))

                    # Those with half a handshake are closed after 10 s.
                    await until(lambda: refused("wrong key") + refused("no handshake") == made, 30)
                    # At those ports whose server's key is this one, of control and of the coordinator at least.
                    assert 2 <= refused("wrong key") < len(ports)
                await ended(streams, 60)
                assert not any(stream.error for stream in streams)
                assert max(stream.longest_gap for stream in streams) < 1.5
                assert llm.client.stats()["dropped"] == group.stats()["dropped"] == {}
            assert [engine.incarnation for engine in group.engines] == [0, 0]

        run(main())


def test_a_node_with_another_token_does_not_join(network: Network, token: Path, short_tmp: Path) -> None:
    other = short_tmp / "other"
    new_token_file(other)
    with running_group(network, token) as (group, _), joined_node(network, other, "stranger") as stranger:

        async def main() -> None:
            async with AsyncLLM(addresses=group.addresses) as llm:
                streams = [Stream(llm, 1000) for _ in range(32)]
                await until(lambda: group.stats()["refused"].get("no handshake", 0) >= 2, 20)
                await ended(streams, 60)
                assert not any(stream.error for stream in streams)
            assert [one["name"] for one in group.stats()["nodes"]] == ["far"]
            assert stranger.poll() is None  # it tries on

        run(main())
    other.unlink()


# --- what can be seen of it ------------------------------------------------------------------------------------------


# The last that passes a link that is captured.
IN_CLEAR = b"as anybody may see"


@contextmanager
def program(network: Network, command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program in the far namespace, which is killed in the end."""
    with network.far.popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def tcpdump(network: Network, path: Path) -> Iterator[bool]:
    """Captures what the far side sees, where tcpdump is installed; whether it is."""
    if shutil.which("tcpdump") is None:
        yield False
        return
    command = ["tcpdump", "-i", namespaces.DEVICE, "--immediate-mode", "-U", "-Z", "root", "-w", str(path)]
    with program(network, command, stderr=subprocess.PIPE) as capture:
        assert b"listening on" in capture.stderr.readline()
        yield True
        deadline = time.monotonic() + 10
        while IN_CLEAR not in path.read_bytes():  # it is behind
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_capture_of_the_link_shows_nothing(network: Network, token: Path, short_tmp: Path) -> None:
    captures = [short_tmp / "relay.pcap", short_tmp / "tcpdump.pcap"]
    network.record(captures[0])
    options = {"tokens_per_step": 20}  # side by side in a message
    with (
        tcpdump(network, captures[1]) as installed,
        running_group(network, token, options=options) as (group, _),
    ):

        async def main() -> None:
            async with AsyncLLM(addresses=group.addresses) as llm:
                for _ in range(20):  # a text that is parted between two packets is not found
                    params = SamplingParams(max_tokens=60, output_kind="final_only")
                    async for output in llm.generate("the moon is made of cheese", params, data_parallel_rank=1):
                        assert output.outputs[0].text.startswith("abcdefghijklm")
                    echo = llm.client.call_utility_async("echo", "a well kept secret", rank=1)
                    assert await echo == "a well kept secret"
                    sent = np.full(50, 0x12345678, dtype=np.int64)
                    [output] = [output async for output in llm.generate(inputs=sent, data_parallel_rank=1)]

        run(main())
        addresses = group.addresses
        secret = token.read_text().strip()
        assert addresses.keys is not None
        hidden = {
            "prompt": b"moon is made",
            "prompt's token ids": np.frombuffer(b"moon is made", dtype=np.uint8).astype(np.int32).tobytes(),
            "prompt's token ids, packed": b"made of cheese",
            "tokens": b"abcdefghijklm",
            "argument of a call": b"well kept",
            "array": np.full(3, 0x12345678, dtype=np.int64).tobytes(),
            "session token": addresses.session_token.encode(),
            "secret of the token file": secret.encode(),
            "same, as bytes": bytes.fromhex(secret),
            "key of peers": addresses.keys.client_secret.encode(),
            "engine": b"MixedEngine",
        }
        with socket.create_server((network.near.address, 0)) as server:  # what can be seen of what is not encrypted
            script = "import socket, sys; socket.create_connection(sys.argv[1:3]).sendall(sys.argv[3].encode())"
            place = [network.near.address, str(server.getsockname()[1])]
            command = [sys.executable, "-c", script, *place, IN_CLEAR.decode()]
            with network.far.popen(command), server.accept()[0] as visitor:
                assert visitor.recv(100) == IN_CLEAR
    network.counts()
    for path in captures[: 1 + installed]:
        seen = path.read_bytes()
        path.unlink()
        assert IN_CLEAR in seen
        assert b"CURVE" in seen
        assert len(seen) > 50_000
        assert [what for what, pattern in hidden.items() if pattern in seen] == []


# --- as long as the issue says ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cut_of_a_minute(network: Network, token: Path) -> None:
    with running_group(network, token, in_flight="resume", patience=10.0) as (group, _):

        async def main() -> None:
            async with AsyncLLM(addresses=group.addresses) as llm:
                streams = [Stream(llm, 20_000) for _ in range(32)]
                await until(lambda: all(len(stream.tokens) > 50 for stream in streams), 20)
                far = psutil.Process(pid_of(llm, 1))
                network.cut()
                healed = asyncio.get_running_loop().call_later(60, network.heal)
                await until(lambda: group.engines[1].state is EngineState.RESTARTING, 15)
                await until(lambda: not far.is_running(), 5)
                await ended(streams, 120)
                assert not any(stream.error for stream in streams)
                await until(lambda: time.monotonic() > 0 and healed.when() < asyncio.get_running_loop().time(), 70)
                await serves_again(llm, group)

        run(main(), 250)
