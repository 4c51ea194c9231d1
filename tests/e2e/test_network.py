"""A head and a node in two network namespaces, with a link that is slow, lossy, cut, or visited by strangers."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
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

import namespaces
from namespaces import Network
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
TESTS = Path(namespaces.__file__).parent
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
    with Network(delay=0.005, loss=0.01, **getattr(request, "param", {})) as network, network.near.entered():
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
        parallel=ParallelConfig(data_parallel_size=2, policy="round_robin"),
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


async def serves_again(llm: AsyncLLM, group: EngineGroup, incarnation: int = 1) -> None:
    """The far rank is a new incarnation, which serves."""
    await until(lambda: group.engines[1].state is EngineState.READY, BACK)
    assert (group.engines[1].incarnation, group.engines[1].node) == (incarnation, "far")
    await until(lambda: llm.client.core_engines[1].incarnation == incarnation, 10)
    stream = Stream(llm, 100, rank=1)
    await ended([stream], 20)
    assert stream.error is None


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
                streams = [Stream(llm, 3000) for _ in range(32)]
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
