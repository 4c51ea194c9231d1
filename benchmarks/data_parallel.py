"""One front end over 1 to 16 ranks with as many streams each: what a token costs must not grow with their number.

Each rank is a `mock` that takes a step every 20 ms, one token for each of its streams. Once every stream has had a
token, tokens and the client's CPU time are counted for some seconds. The numbers of ranks take turns, so that whatever
else the machine does meets them alike.

    python -m benchmarks.data_parallel [--ranks 1 2 4 8 16] [--streams 64] [--seconds 3] [--reps 5]
                                       [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time

import msgspec

from benchmarks.measure import show, spread, write_json
from benchmarks.plots import add_outputs, lines
from benchmarks.stream import PROMPT, loop_factory
from outboard import AsyncLLM, EngineConfig, ParallelConfig, SamplingParams

PACE_MS = 20.0
# What is to hold: the cost with the most ranks, as against one.
MOST_GROWTH = 1.3


class Sample(msgspec.Struct, frozen=True):
    """What one measurement gave. `share_of_pace`: tokens that came, of those that the engines were to produce."""

    ranks: int
    loop: str
    client_ns_per_token: float
    tokens_per_second: float
    share_of_pace: float


async def run(ranks: int, streams: int, seconds: float, loop: str) -> Sample:
    """One measurement."""
    tokens = 0
    started = 0
    all_started = asyncio.Event()

    async def read() -> None:
        nonlocal tokens, started
        first = True
        params = SamplingParams(max_tokens=1_000_000, output_kind="delta", detokenize=False)
        async for output in llm.generate(PROMPT, params):
            tokens += len(output.outputs[0].token_ids)
            if first:
                first = False
                started += 1
                if started == streams * ranks:
                    all_started.set()

    config = EngineConfig(
        engine="mock", options={"step_ms": PACE_MS}, parallel=ParallelConfig(data_parallel_size=ranks)
    )
    async with AsyncLLM(config) as llm:
        readers = [asyncio.create_task(read()) for _ in range(streams * ranks)]
        async with asyncio.timeout(60):
            await all_started.wait()
        gc.collect()
        before, wall, cpu = tokens, time.perf_counter(), time.process_time_ns()
        await asyncio.sleep(seconds)
        count, wall, cpu = tokens - before, time.perf_counter() - wall, time.process_time_ns() - cpu
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    wanted = streams * ranks * wall * 1000 / PACE_MS
    return Sample(ranks, loop, cpu / count, count / wall, count / wanted)


def measure(ranks: int, streams: int, seconds: float, loop: str) -> Sample:
    """One measurement with engines and a loop of its own."""
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        return runner.run(asyncio.wait_for(run(ranks, streams, seconds, loop), 120))


def report(samples: list[Sample], streams: int) -> None:
    """Prints the table; each cost also as a share of that with the fewest ranks, run by run."""
    rows = []
    fewest = min(sample.ranks for sample in samples)
    for loop, ranks in sorted({(sample.loop, sample.ranks) for sample in samples}):
        mine = [sample for sample in samples if (sample.loop, sample.ranks) == (loop, ranks)]
        base = [sample for sample in samples if (sample.loop, sample.ranks) == (loop, fewest)]
        costs = [sample.client_ns_per_token for sample in mine]
        growth = [cost / one.client_ns_per_token for cost, one in zip(costs, base, strict=True)]
        rows.append(
            [
                f"{ranks} x {streams} streams, {loop}",
                spread(costs).text(),
                spread(growth).text(2),
                spread([sample.tokens_per_second for sample in mine]).text(1, 1000.0),
                f"{spread([sample.share_of_pace for sample in mine]).median:.2f}",
            ]
        )
    columns = ["ranks, loop", "client CPU ns/token", f"of {fewest} rank", "k tokens/s", "of the pace"]
    show("client cost of a token by ranks", columns, rows, f"to hold: at most {MOST_GROWTH} of one rank's")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_parallel", description="Several ranks, no model.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--streams", type=int, default=64, help="on each rank")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--loop", choices=("default", "uvloop", "both"), default="default")
    add_outputs(parser)
    args = parser.parse_args()
    loops = ("default", "uvloop") if args.loop == "both" else (args.loop,)
    samples = [
        measure(ranks, args.streams, args.seconds, loop)
        for _ in range(args.reps)
        for loop in loops
        for ranks in args.ranks
    ]
    report(samples, args.streams)
    if args.plot:
        found = {
            loop: {
                ranks: [one.client_ns_per_token for one in samples if (one.loop, one.ranks) == (loop, ranks)]
                for ranks in args.ranks
            }
            for loop in loops
        }
        lines(args.plot, {"ranks": ("client CPU, ns a token", found)})
    if args.json:
        write_json(args.json, msgspec.to_builtins(samples))


if __name__ == "__main__":
    main()
