"""What a token costs as things grow: streams, ranks, front ends, the length of prompts. Each is to stay flat.

`mock` at a step every 20 ms; where streams grow every 100 ms, or 10,000 of them would be more than one core can read.
CPU time of the client is counted over some seconds while all streams run; each figure stands beside that of the first
row. There are 64 streams, over each rank or over all front ends, unless they grow.

    python -m benchmarks.growth [--streams 1 10 100 1000 10000] [--ranks 1 2 4 8 16] [--front-ends 1 2 3 4]
                                [--prompts 10 100 1000 10000 100000] [--seconds 2] [--reps 3]
                                [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec

from benchmarks.measure import show, spread, write_json
from benchmarks.plots import add_outputs, lines
from outboard import AsyncLLM, EngineConfig, ParallelConfig, SamplingParams, launch_engines

PACE_MS, PACE_OF_MANY_MS = 20.0, 100.0
STREAMS = 64
BOUND = 300.0  # seconds


class Grows(NamedTuple):
    """Something that grows, and why the cost is not the same everywhere."""

    title: str
    unit: str
    why: str


GROWS = {
    "streams": Grows(
        "streams",
        "us a token",
        "A step is one message, which costs the same whatever it carries: a stream alone bears all of it, many share "
        "it. From 1,000 on it is flat.",
    ),
    "ranks": Grows(
        "ranks",
        "us a token",
        "Flat or falling: of many ranks more messages are read in one turn of the event loop.",
    ),
    "front_ends": Grows(
        "front ends",
        "us a token",
        "The same streams over more front ends: each step is a message to each of them, with fewer tokens in it.",
    ),
    "prompt": Grows(
        "tokens of the prompt",
        "us a request",
        "Flat to 1,000 tokens. Beyond, what is done for each of them shows, some 30 ns: Python's integers are packed "
        "into 32 bits each, and copied into the socket.",
    ),
}


class Point(msgspec.Struct, frozen=True):
    """What grows, and to where."""

    what: str
    streams: int = STREAMS
    ranks: int = 1
    front_ends: int = 1
    prompt: int = 10

    @property
    def size(self) -> int:
        """Of what grows."""
        size: int = getattr(self, self.what)
        return size


class Sample(msgspec.Struct, frozen=True):
    """Client CPU, in us, a token (prompts: a request until its first token)."""

    point: Point
    us: float


async def measure(point: Point, seconds: float) -> Sample:
    """One point, with an engine of its own."""
    parallel = ParallelConfig(data_parallel_size=point.ranks, client_count=point.front_ends)
    options = {"step_ms": PACE_OF_MANY_MS if point.what == "streams" else PACE_MS, "max_num_seqs": 20_000}
    config = EngineConfig(engine="mock", options=options, parallel=parallel)
    with await asyncio.to_thread(launch_engines, config) as group:
        async with AsyncExitStack() as stack:
            llms = [
                await stack.enter_async_context(AsyncLLM(addresses=group.addresses, client_index=index))
                for index in range(point.front_ends)
            ]
            if point.what == "prompt":
                return await _requests(point, llms[0])
            return await _streams(point, llms, seconds)


async def _streams(point: Point, llms: list[AsyncLLM], seconds: float) -> Sample:
    tokens = started = 0
    all_run = asyncio.Event()
    params = SamplingParams(max_tokens=1_000_000, output_kind="delta", detokenize=False)

    async def read(llm: AsyncLLM) -> None:
        nonlocal tokens, started
        first = True
        async for output in llm.generate([1] * point.prompt, params):
            tokens += len(output.outputs[0].token_ids)
            if first:
                first = False
                started += 1
                if started == point.streams * point.ranks:
                    all_run.set()

    readers = [asyncio.ensure_future(read(llms[i % len(llms)])) for i in range(point.streams * point.ranks)]
    await asyncio.wait_for(all_run.wait(), BOUND)
    await asyncio.sleep(0.2)
    gc.collect()
    before, cpu = tokens, time.process_time()
    await asyncio.sleep(seconds)
    used, count = time.process_time() - cpu, tokens - before
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return Sample(point, used / count * 1e6)


async def _requests(point: Point, llm: AsyncLLM) -> Sample:
    count = max(5, min(200, 1_000_000 // point.prompt))
    params = SamplingParams(max_tokens=1, detokenize=False)
    prompt = [1] * point.prompt
    cpu = time.process_time()
    for _ in range(count):
        async for _ in llm.generate(prompt, params):
            pass
    return Sample(point, (time.process_time() - cpu) / count * 1e6)


def by_size(samples: list[Sample], what: str) -> dict[float, list[float]]:
    """All figures of what grows."""
    found: dict[float, list[float]] = {}
    for one in samples:
        if one.point.what == what:
            found.setdefault(one.point.size, []).append(one.us)
    return found


def report(samples: list[Sample], reps: int) -> None:
    """Prints a table for each thing that grows."""
    for what, grows in GROWS.items():
        spreads = {size: spread(values) for size, values in by_size(samples, what).items()}
        if spreads:
            first = next(iter(spreads.values())).median
            rows = [[f"{size:,}", one.text(2), f"{one.median / first:.2f}"] for size, one in spreads.items()]
            title = f"Client CPU, median (least - most) of {reps}"
            show(title, [grows.title, grows.unit, "of the first"], rows, grows.why)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description="What a token costs as it grows.")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 10, 100, 1000, 10_000])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--front-ends", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--prompts", type=int, nargs="*", default=[10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--reps", type=int, default=3)
    add_outputs(parser)
    args = parser.parse_args()
    points = [Point("streams", streams=size) for size in args.streams]
    points += [Point("ranks", ranks=size) for size in args.ranks]
    points += [Point("front_ends", front_ends=size) for size in args.front_ends]
    points += [Point("prompt", prompt=size) for size in args.prompts]
    samples = [asyncio.run(measure(point, args.seconds)) for _ in range(args.reps) for point in points]
    report(samples, args.reps)
    if args.plot:
        panels = {
            grows.title: (f"client CPU, {grows.unit}", {grows.title: found})
            for what, grows in GROWS.items()
            if (found := by_size(samples, what))
        }
        lines(args.plot, panels)
    if args.json:
        write_json(args.json, msgspec.to_builtins(samples))


if __name__ == "__main__":
    main()
