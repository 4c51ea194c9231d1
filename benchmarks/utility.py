"""Utility calls to an engine that is idle: how long one takes, and what many at once cost.

All designs are up at once and take short turns, so that whatever else the machine does meets them alike. One call after
the other:

    utility   `AsyncMPClient.call_utility_async("is_paused")`
    sync      `SyncMPClient.call_utility("is_paused")`
    bare      a ping-pong over the same sockets: a reader on the loop, and in the child an input thread and a queue
    raw       the same with neither loop nor thread, both ends block

and 64 at once:

    utility   as above
    plain     the plain design: zmq.asyncio, and in the child a thread and a queue each way

The last three are in `benchmarks.baselines.pingpong`.

    python -m benchmarks.utility [--calls 3000] [--concurrent 64] [--reps 5] [--loop default|uvloop]
                                 [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from benchmarks.baselines.pingpong import BareClient, PlainClient, RawClient
from benchmarks.measure import Span, show, spread, write_json
from benchmarks.plots import add_outputs, bars
from benchmarks.stream import engine_pid, loop_factory
from outboard import AsyncMPClient, EngineConfig, SyncMPClient

METHOD = "is_paused"
TURNS = 10  # of each design in one measurement
WARM_UP = 20  # calls that are not counted, each turn
# What is to hold.
MOST_OF_BARE = 1.5
LEAST_OF_PLAIN = 1.5


class Design(NamedTuple):
    """Something to be called, and the process that answers."""

    call: Callable[[], Awaitable[Any]]
    pid: int


class Latency(msgspec.Struct, frozen=True):
    """What calls one after the other gave."""

    design: str
    loop: str
    p50_us: float
    p99_us: float


class Cost(msgspec.Struct, frozen=True):
    """What calls at once gave."""

    design: str
    loop: str
    calls_per_second: float
    calls_per_cpu_second: float
    client_cpu_us: float
    engine_cpu_us: float


# --- the designs -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def utility() -> AsyncIterator[Design]:
    client = await AsyncMPClient.launch(EngineConfig(engine="echo"))
    try:
        yield Design(lambda: client.call_utility_async(METHOD), engine_pid(client))
    finally:
        client.shutdown()


@asynccontextmanager
async def sync() -> AsyncIterator[Design]:
    client = SyncMPClient(EngineConfig(engine="echo"))

    async def call() -> Any:
        return client.call_utility(METHOD)

    try:
        yield Design(call, client.core_engines[0].pid)
    finally:
        client.shutdown()


@asynccontextmanager
async def raw() -> AsyncIterator[Design]:
    with RawClient() as client:

        async def call() -> Any:
            return client.call(METHOD)

        yield Design(call, client.pid)


@asynccontextmanager
async def bare() -> AsyncIterator[Design]:
    with BareClient() as client:
        yield Design(lambda: client.call(METHOD), client.pid)


@asynccontextmanager
async def plain() -> AsyncIterator[Design]:
    with PlainClient() as client:
        yield Design(lambda: client.call(METHOD), client.pid)


Designs = dict[str, Callable[[], AbstractAsyncContextManager[Design]]]
SEQUENTIAL: Designs = {"raw": raw, "bare": bare, "utility": utility, "sync": sync}
AT_ONCE: Designs = {"plain": plain, "utility": utility}


@asynccontextmanager
async def opened(designs: Designs) -> AsyncIterator[dict[str, Design]]:
    """All of these, to be called in turn."""
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(open_()) for name, open_ in designs.items()}


# --- measuring -------------------------------------------------------------------------------------------------------


async def time_calls(call: Callable[[], Awaitable[Any]], count: int) -> list[int]:
    """Nanoseconds of each call, one after the other."""
    clock = time.perf_counter_ns
    times = []
    for _ in range(count):
        start = clock()
        await call()
        times.append(clock() - start)
    return times


async def call_at_once(call: Callable[[], Awaitable[Any]], count: int, tasks: int) -> None:
    """Makes so many calls in each of so many tasks."""

    async def work() -> None:
        for _ in range(count):
            await call()

    await asyncio.gather(*(work() for _ in range(tasks)))


async def measure_latency(calls: int, loop: str) -> list[Latency]:
    """One measurement of each design, with processes of its own."""
    async with opened(SEQUENTIAL) as designs:
        times: dict[str, list[int]] = {name: [] for name in designs}
        for _ in range(TURNS):
            for name, design in designs.items():
                await time_calls(design.call, WARM_UP)
                times[name] += await time_calls(design.call, calls // TURNS)
    percentiles = {name: statistics.quantiles(values, n=100) for name, values in times.items()}
    return [Latency(name, loop, values[49] / 1000, values[98] / 1000) for name, values in percentiles.items()]


async def measure_cost(calls: int, tasks: int, loop: str) -> list[Cost]:
    """One measurement of each design, with processes of its own."""
    count = max(1, calls // TURNS // tasks)
    async with opened(AT_ONCE) as designs:
        spans: dict[str, list[Span]] = {name: [] for name in designs}
        for _ in range(TURNS):
            for name, design in designs.items():
                await call_at_once(design.call, 1, tasks)
                with Span(design.pid) as span:
                    await call_at_once(design.call, count, tasks)
                spans[name].append(span)
    return [cost(name, loop, count * tasks * TURNS, mine) for name, mine in spans.items()]


def cost(design: str, loop: str, calls: int, spans: Sequence[Span]) -> Cost:
    """What so many calls took in these spans together."""
    client_ns = sum(span.client_cpu_ns for span in spans)
    engine_ns = sum(span.engine_cpu_ns for span in spans)
    return Cost(
        design,
        loop,
        calls / sum(span.wall for span in spans),
        calls / (client_ns + engine_ns) * 1e9,
        client_ns / calls / 1000,
        engine_ns / calls / 1000,
    )


# --- reporting -------------------------------------------------------------------------------------------------------


def ratio(samples: Sequence[Latency] | Sequence[Cost], field: str, design: str, base: str) -> float:
    """A design's share of another's figure: the median over the runs, each against that next to it."""
    mine, others = ([getattr(s, field) for s in samples if s.design == name] for name in (design, base))
    return spread([value / other for value, other in zip(mine, others, strict=True)]).median


def report_latency(samples: Sequence[Latency], heading: str) -> None:
    rows = []
    for design in SEQUENTIAL:
        row = [design]
        for field in ("p50_us", "p99_us"):
            row.append(spread([getattr(s, field) for s in samples if s.design == design]).text(digits=1))
            row.append(f"{ratio(samples, field, design, 'bare'):.2f}")
        rows.append(row)
    measured = ratio(samples, "p50_us", "utility", "bare")
    caption = f"p50 of utility / p50 of bare: {measured:.2f}, to be at most {MOST_OF_BARE}"
    show(heading, ["design", "p50 us", "of bare", "p99 us", "of bare"], rows, caption)


def report_cost(samples: Sequence[Cost], heading: str) -> None:
    columns = ["design"]
    for title in ("k calls/s", "k calls/CPU-s", "client CPU us/call", "engine CPU us/call"):
        columns += [title, "of plain"]
    rows = []
    for design in AT_ONCE:
        row = [design]
        for field, scale in (
            ("calls_per_second", 1000.0),
            ("calls_per_cpu_second", 1000.0),
            ("client_cpu_us", 1.0),
            ("engine_cpu_us", 1.0),
        ):
            row.append(spread([getattr(s, field) for s in samples if s.design == design]).text(1, scale))
            row.append(f"{ratio(samples, field, design, 'plain'):.2f}")
        rows.append(row)
    measured = ratio(samples, "calls_per_cpu_second", "utility", "plain")
    caption = f"calls/CPU-s of utility / of plain: {measured:.2f}, to be at least {LEAST_OF_PLAIN}"
    show(heading, columns, rows, caption)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.utility", description="Utility calls, engine idle.")
    parser.add_argument("--calls", type=int, default=3000, help="calls of one measurement; at once: twice as many")
    parser.add_argument("--concurrent", type=int, default=64, help="how many are under way at once")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--loop", choices=("default", "uvloop"), default="default")
    add_outputs(parser)
    args = parser.parse_args()
    suffix = f"{args.loop} loop, median (least - most) of {args.reps}"
    latencies: list[Latency] = []
    costs: list[Cost] = []
    for _ in range(args.reps):
        with asyncio.Runner(loop_factory=loop_factory(args.loop)) as runner:
            latencies += runner.run(asyncio.wait_for(measure_latency(args.calls, args.loop), 300))
    report_latency(latencies, f"{args.calls} calls one after the other, {suffix}")
    for _ in range(args.reps):
        with asyncio.Runner(loop_factory=loop_factory(args.loop)) as runner:
            costs += runner.run(asyncio.wait_for(measure_cost(2 * args.calls, args.concurrent, args.loop), 300))
    report_cost(costs, f"{2 * args.calls} calls, {args.concurrent} at once, {suffix}")
    if args.plot:
        one_by_one = {name: [one.p50_us for one in latencies if one.design == name] for name in SEQUENTIAL}
        at_once = {name: [one.client_cpu_us for one in costs if one.design == name] for name in AT_ONCE}
        bars(
            args.plot,
            {"one after the other: p50, us": one_by_one, f"{args.concurrent} at once: client CPU, us a call": at_once},
        )
    if args.json:
        write_json(args.json, msgspec.to_builtins({"sequential": latencies, "concurrent": costs}))


if __name__ == "__main__":
    main()
