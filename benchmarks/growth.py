"""What a token costs as things grow: streams, front ends, the length of prompts. Each is to stay flat.

`mock` at a step every 20 ms. CPU time of the client is counted over some seconds while all streams run; each figure
stands beside that of the first row.

    python -m benchmarks.growth [--streams 1 10 100 1000 10000] [--front-ends 1 2 4] [--prompts 10 1000 100000]
                                [--seconds 2] [--reps 3] [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import importlib.util
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from benchmarks.measure import show, spread, write_json
from outboard import AsyncLLM, EngineConfig, ParallelConfig, SamplingParams, launch_engines

PACE_MS = 20.0
BOUND = 300.0  # seconds
FIELDS = {"streams": "streams", "front_ends": "front ends", "prompt": "tokens of the prompt"}


class Point(msgspec.Struct, frozen=True):
    """What grows, and to where."""

    what: str
    streams: int = 64
    front_ends: int = 1
    prompt: int = 10

    @property
    def size(self) -> int:
        """Of what grows."""
        size: int = getattr(self, self.what)
        return size


class Sample(msgspec.Struct, frozen=True):
    """Client CPU, in us, a token (prompts: a request until its first token), and bytes of memory a stream."""

    point: Point
    us: float


async def measure(point: Point, seconds: float) -> Sample:
    """One point, with an engine of its own."""
    parallel = ParallelConfig(client_count=point.front_ends)
    options = {"step_ms": PACE_MS, "max_num_seqs": 20_000}
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
                if started == point.streams:
                    all_run.set()

    readers = [asyncio.ensure_future(read(llms[i % len(llms)])) for i in range(point.streams)]
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


def report(samples: list[Sample], reps: int) -> None:
    """Prints a table for each thing that grows."""
    for what, title in FIELDS.items():
        mine = [one for one in samples if one.point.what == what]
        sizes = list(dict.fromkeys(one.point.size for one in mine))
        first: float | None = None
        rows = []
        for size in sizes:
            figure = spread([one.us for one in mine if one.point.size == size])
            first = first or figure.median
            rows.append([f"{size:,}", figure.text(2), f"{figure.median / first:.2f}"])
        if rows:
            unit = "us a request" if what == "prompt" else "us a token"
            show(f"Client CPU, median (least - most) of {reps}", [title, unit, "of the first"], rows)


def plot(samples: list[Sample], path: str) -> None:
    """Draws what `report` prints."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(FIELDS), figsize=(11, 3.2), layout="constrained")
    for axis, (what, title) in zip(axes, FIELDS.items(), strict=True):
        mine = [one for one in samples if one.point.what == what]
        sizes = list(dict.fromkeys(one.point.size for one in mine))
        axis.plot(sizes, [spread([one.us for one in mine if one.point.size == size]).median for size in sizes], "o-")
        axis.set(xscale="log", xlabel=title, ylim=(0, None))
        axis.set_ylabel("client us a request" if what == "prompt" else "client us a token")
        axis.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description="What a token costs as it grows.")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 10, 100, 1000, 10_000])
    parser.add_argument("--front-ends", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, nargs="*", default=[10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--plot", metavar="FILE", help="draw it; .svg or .png, by matplotlib")
    parser.add_argument("--json", metavar="FILE", help="write every measurement here")
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--plot needs matplotlib: pip install 'outboard[plots]'")
    points = [Point("streams", streams=size) for size in args.streams]
    points += [Point("front_ends", front_ends=size) for size in args.front_ends]
    points += [Point("prompt", prompt=size) for size in args.prompts]
    samples = [asyncio.run(measure(point, args.seconds)) for _ in range(args.reps) for point in points]
    report(samples, args.reps)
    if args.plot:
        plot(samples, args.plot)
    if args.json:
        write_json(args.json, msgspec.to_builtins(samples))


if __name__ == "__main__":
    main()
