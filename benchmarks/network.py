"""Many streams by each way between a client and its engine core, within one host and between two.

`AsyncLLM` over `mock`, 256 streams, no text, either free (the engine is at most 64 steps ahead of the readers) or paced
(a step every 10 ms); and one utility call after the other, when the engine is idle. The ways take turns in one run, so
that whatever else the machine does meets them alike:

    ipc          ZeroMQ on one host (`TransportConfig(sockets="zmq")`)
    unix         plain Unix sockets, the default on one host
    tcp          ZeroMQ by TCP, not encrypted; only here, Outboard has no such sockets
    tcp+CURVE    the engine core is on a node, which is another process of this host
    at 1 ms      the same through a link between two network namespaces that takes 1 ms each way, where they may be made

CPU time of the client is that of all its threads, so also that of ZeroMQ's, which encrypts. What encryption costs is to
be at most half of what the client costs without. A last table has the sockets alone, between two processes.

    python -m benchmarks.network [--streams 256] [--steps 400] [--calls 500] [--reps 5] [--delay-ms 1]
                                 [--messages 20000] [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import msgspec

from benchmarks.measure import Fifo, show, spread, write_json
from benchmarks.namespaces import DEVICE, Network, why_not
from benchmarks.plain_tcp import PlainMock, plain_tcp
from benchmarks.plots import add_outputs, bars
from benchmarks.socket_pair import measure_pairs, report_pairs
from benchmarks.stream import PROMPT, Job, engine_pid, options, read_streams
from outboard import AsyncLLM, EngineConfig, SamplingParams, TransportConfig, launch_engines
from outboard.config import NetworkConfig
from outboard.frontend.outputs import RequestOutput
from outboard.transport.curve import new_token_file

ROOT = Path(__file__).parents[1]
PACE_MS = 10.0
MODES = ("free", "paced")
PLAIN, CURVE = "tcp", "tcp+CURVE"
WAYS = ("ipc", "unix", PLAIN, CURVE)
# What is to hold: client CPU a token, of that by plain TCP.
MOST_OF_PLAIN = 1.5
BOUND = 300.0  # seconds that one measurement may take


class Sample(msgspec.Struct, frozen=True):
    """What one measurement gave."""

    way: str
    mode: str
    tokens_per_second: float
    client_ns_per_token: float
    engine_ns_per_token: float
    call_us: float


class Site(msgspec.Struct, frozen=True):
    """Where the head listens, an interface and its address, and what starts a program where the node is to be."""

    interface: str
    address: str
    start: Callable[..., subprocess.Popen[bytes]]


LOOPBACK = Site("lo", "127.0.0.1", subprocess.Popen)


@contextmanager
def joining_node(site: Site) -> Iterator[NetworkConfig]:
    """A node with room for one rank, and what the head must have for it to join."""
    with tempfile.TemporaryDirectory() as directory:
        token = f"{directory}/token"
        new_token_file(token)
        with socket.socket() as probe:
            probe.bind((site.address, 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-c", "from outboard.cli.main import run; run()", "node"]
        command += ["--join", f"{site.address}:{port}", "--token-file", token]
        with site.start(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                yield NetworkConfig(listen=site.interface, port=port, token_file=token, local_ranks=0)
            finally:
                process.terminate()
                _, said = process.communicate(timeout=30)
                if process.returncode:
                    print(f"the node has failed:\n{said.decode()}", file=sys.stderr)


async def run_job(job: Job, way: str, config: EngineConfig, fifo: Fifo, calls: int) -> Sample:
    """The streams, and then the calls, of a group that has its engine core on a node or here."""

    def generate(max_tokens: int) -> AsyncIterator[RequestOutput]:
        return llm.generate(PROMPT, SamplingParams(max_tokens=max_tokens, output_kind="delta", detokenize=False))

    with await asyncio.to_thread(launch_engines, config) as group:
        llm = AsyncLLM(addresses=group.addresses, client_index=0)
        with plain_tcp() if way == PLAIN else nullcontext():  # the launcher's sockets are there already
            await llm.start()
        async with llm:
            span, _ = await read_streams(job, fifo, engine_pid(llm.client), generate)
            times = []
            for _ in range(calls):
                before = time.perf_counter()
                await llm.client.call_utility_async("is_paused")
                times.append((time.perf_counter() - before) * 1e6)
    tokens = job.streams * job.steps
    return Sample(
        way,
        job.mode,
        tokens / span.wall,
        span.client_cpu_ns / tokens,
        span.engine_cpu_ns / tokens,
        statistics.median(times),
    )


def measure(way: str, job: Job, calls: int, site: Site | None) -> Sample:
    """One measurement with an engine core of its own, on a node where there is a site."""
    with ExitStack() as stack:
        fifo = stack.enter_context(Fifo.temporary())
        pace = {"step_ms": PACE_MS, "start_after": job.streams + 1} if job.mode == "paced" else options(job, fifo)
        config = EngineConfig(
            engine=PlainMock if way == PLAIN else "mock",
            options=pace,
            transport=TransportConfig(sockets=job.outputs),
            network=None if site is None else stack.enter_context(joining_node(site)),
        )
        return asyncio.run(asyncio.wait_for(run_job(job, way, config, fifo, calls), BOUND))


@contextmanager
def link(delay_ms: float) -> Iterator[Site]:
    """A link between two network namespaces. This thread, and what it starts, is at one end while this is entered."""
    with Network(delay=delay_ms / 1000) as network, network.near.entered():
        yield Site(DEVICE, network.near.address, network.far.popen)


def run(mode: str, streams: int, steps: int, calls: int, reps: int, delay_ms: float) -> list[Sample]:
    """All ways in turn."""
    samples = []
    for _ in range(reps):
        for way in WAYS:
            job = Job(mode, "zmq" if way == "ipc" else "unix", streams, steps, False)
            samples.append(measure(way, job, calls, LOOPBACK if way in (PLAIN, CURVE) else None))
        if delay_ms:
            with link(delay_ms) as site:
                samples.append(measure(at(delay_ms), job, calls, site))
    return samples


def at(delay_ms: float) -> str:
    """What the way through a link is called."""
    return f"at {delay_ms:g} ms"


def of(samples: list[Sample], mode: str, field: str) -> dict[str, list[float]]:
    """A field's values in this mode, by way."""
    found: dict[str, list[float]] = {}
    for one in samples:
        if one.mode == mode:
            found.setdefault(one.way, []).append(getattr(one, field))
    return found


def curve_ratio(samples: list[Sample], mode: str) -> float:
    """Client CPU by TCP with CURVE, of that without: the median over the runs, each against that next to it."""
    found = of(samples, mode, "client_ns_per_token")
    return statistics.median(mine / plain for mine, plain in zip(found[CURVE], found[PLAIN], strict=True))


def report(samples: list[Sample], mode: str, heading: str) -> None:
    """Prints one mode's table."""
    fields = {"tokens_per_second": 1000.0, "client_ns_per_token": 1.0, "engine_ns_per_token": 1.0, "call_us": 1.0}
    found = {field: of(samples, mode, field) for field in fields}
    rows = [
        [way, *(spread(found[field][way]).text(scale=scale) for field, scale in fields.items())]
        for way in found["call_us"]
    ]
    ratio = curve_ratio(samples, mode)
    verdict = "holds" if ratio <= MOST_OF_PLAIN else "does NOT hold"
    caption = f"client CPU a token, {CURVE} / {PLAIN}: {ratio:.2f}, to be at most {MOST_OF_PLAIN}: {verdict}"
    show(heading, ["way", "k tokens/s", "client CPU ns/token", "engine CPU ns/token", "a call, us"], rows, caption)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description="Within a host, and between two.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400, help="tokens a stream; paced: 120 at most")
    parser.add_argument("--calls", type=int, default=500, help="utility calls, one after the other")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=1.0, help="of the link, each way; 0: no link")
    parser.add_argument("--messages", type=int, default=20_000, help="of each size, of sockets alone; 0: no sockets")
    add_outputs(parser)
    args = parser.parse_args()
    logging.getLogger("outboard.launch").setLevel(logging.ERROR)  # that no node has joined yet is as it should be
    delay_ms = args.delay_ms
    if delay_ms and (reason := why_not()):
        print(f"skipped: the link with a delay: {reason}")
        delay_ms = 0.0
    samples: list[Sample] = []
    for mode in MODES:
        steps = min(args.steps, 120) if mode == "paced" else args.steps
        samples += run(mode, args.streams, steps, args.calls, args.reps, delay_ms)
        pace = f", a step every {PACE_MS:g} ms" if mode == "paced" else ""
        title = f"{mode}{pace}: {args.streams} streams of {steps} tokens, median (least - most) of {args.reps}"
        report(samples, mode, title)
    pairs = []
    if args.messages:
        pairs = measure_pairs(args.messages, args.calls, args.reps)
        report_pairs(
            pairs, f"Sockets alone: {args.messages:,} messages of each size, median (least - most) of {args.reps}"
        )
    if args.plot:
        panels = {f"{mode}: client CPU, ns a token": of(samples, mode, "client_ns_per_token") for mode in MODES}
        bars(args.plot, panels)
    if args.json:
        ratios = {mode: curve_ratio(samples, mode) for mode in MODES}
        write_json(args.json, msgspec.to_builtins({"clients": samples, "sockets": pairs, "curve_of_plain": ratios}))


if __name__ == "__main__":
    main()
