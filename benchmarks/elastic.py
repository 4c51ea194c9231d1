"""Ranks that come and go under load: what streams feel of it, beside a run in which as many idle interpreters start.

`mock` engines at a step every --step-ms, each with room for --slots requests. Requests of 20 to 180 tokens follow each
other on --streams streams, more than there is room for; 16 more streams stay on rank 0 all the time and count the gaps
between their tokens. Both kinds of run do the same work at the same moments; in the control run the number of ranks
stays, and for each rank that would come an interpreter starts that imports what an engine core imports, and sleeps.

    python -m benchmarks.elastic [--engine mock] [--sizes 2 4 1 3] [--hold 2] [--streams 96] [--slots 32]
                                 [--step-ms 5] [--reps 3] [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.measure import show, spread, write_json
from benchmarks.plots import add_outputs
from outboard import AsyncLLM, EngineConfig, ParallelConfig, SamplingParams

STEADY = 16
KEYS = (
    "requests", "wrong", "ttft_calm_p50_ms", "ttft_calm_p99_ms", "ttft_changing_p50_ms", "ttft_changing_p99_ms",
    "gap_p50_ms", "gap_p999_ms",
)  # fmt: skip
IDLE_INTERPRETER = "import sys, zmq, msgspec, numpy; sys.stdin.read()"


@dataclass
class Record:
    """What one run showed. Times are in seconds since its start."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, how many tokens
    ends: list[float] = field(default_factory=list)  # of requests
    first_tokens: list[tuple[float, float]] = field(default_factory=list)  # when asked, how long it took
    gaps: list[float] = field(default_factory=list)
    changes: list[tuple[float, float, int]] = field(default_factory=list)  # from, to, ranks behind it
    wrong: int = 0


def quantile(values: list[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


class Run:
    """One run over one group of engine cores."""

    def __init__(self, args: argparse.Namespace, llm: AsyncLLM) -> None:
        self._args = args
        self._llm = llm
        self._start = time.monotonic()
        self._over = False
        self.record = Record()

    def _now(self) -> float:
        return time.monotonic() - self._start

    async def _requests(self, lengths: Random) -> None:
        while not self._over:
            length = lengths.randint(20, 180)
            params = SamplingParams(max_tokens=length, output_kind="delta", detokenize=False)
            asked, count = self._now(), 0
            async for output in self._llm.generate([1], params):
                now, new = self._now(), len(output.outputs[0].token_ids)
                if not count:
                    self.record.first_tokens.append((asked, now - asked))
                self.record.arrivals.append((now, new))
                count += new
            self.record.wrong += count != length
            self.record.ends.append(self._now())

    async def _steady(self) -> None:
        params = SamplingParams(max_tokens=10_000_000, output_kind="delta", detokenize=False)
        last = 0.0
        async for _ in self._llm.generate([1], params, data_parallel_rank=0):
            now = self._now()
            if last:
                self.record.gaps.append(now - last)
            last = now
            if self._over:
                return

    async def _change(self, size: int, idle: list[Any], scale: bool) -> None:
        started = self._now()
        if scale:
            await self._llm.scale_elastic_ep(size)
        else:
            while len(idle) > size:
                process = idle.pop()
                process.stdin.close()
                await process.wait()
            while len(idle) < size:
                command = (sys.executable, "-c", IDLE_INTERPRETER)
                idle.append(await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE))
        self.record.changes.append((started, self._now(), size))

    async def go(self, *, scale: bool) -> Record:
        """Runs all changes, each followed by `--hold` seconds."""
        args = self._args
        first = args.sizes[0]
        tasks = [asyncio.create_task(self._requests(Random(number))) for number in range(args.streams)]
        tasks += [asyncio.create_task(self._steady()) for _ in range(STEADY)]
        idle: list[Any] = []
        for _ in range(0 if scale else first):
            command = (sys.executable, "-c", IDLE_INTERPRETER)
            idle.append(await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE))
        await asyncio.sleep(args.hold)
        self.record = Record()  # what starting all of it costs is not the question
        self.record.changes.append((0.0, self._now(), first))
        for size in args.sizes[1:]:
            await self._change(size, idle, scale)
            await asyncio.sleep(args.hold)
        self._over = True
        await asyncio.gather(*tasks)
        for process in idle:
            process.stdin.close()
            await process.wait()
        return self.record


async def measure(args: argparse.Namespace, *, scale: bool) -> Record:
    """One run, with engine cores of its own."""
    config = EngineConfig(
        engine=args.engine,
        options={"step_ms": args.step_ms, "max_num_seqs": args.slots},
        parallel=ParallelConfig(data_parallel_size=args.sizes[0], max_size=max(args.sizes)),
    )
    async with AsyncLLM(config) as llm:
        return await Run(args, llm).go(scale=scale)


def row(name: str, record: Record) -> dict[str, Any]:
    """The figures of one run; those of first tokens for requests made while something changed."""
    changing = [took for asked, took in record.first_tokens if any(a <= asked <= b for a, b, _ in record.changes[1:])]
    calm = [took for asked, took in record.first_tokens if not any(a <= asked <= b for a, b, _ in record.changes[1:])]
    return {
        "run": name,
        "requests": len(record.ends),
        "wrong": record.wrong,
        "tokens": sum(count for _, count in record.arrivals),
        "ttft_changing_p50_ms": quantile(changing, 0.5) * 1e3,
        "ttft_changing_p99_ms": quantile(changing, 0.99) * 1e3,
        "ttft_calm_p50_ms": quantile(calm, 0.5) * 1e3,
        "ttft_calm_p99_ms": quantile(calm, 0.99) * 1e3,
        "gap_p50_ms": quantile(record.gaps, 0.5) * 1e3,
        "gap_p999_ms": quantile(record.gaps, 0.999) * 1e3,
        "changes_s": [round(end - start, 3) for start, end, _ in record.changes[1:]],
    }


def plot(record: Record, file: str) -> None:
    """Requests a second, and ranks, over time."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    width = 0.4
    begin, end = record.changes[0][1], max(record.ends)
    edges = [begin + width * i for i in range(int((end - begin) / width))]
    rates = [sum(edge <= when < edge + width for when in record.ends) / width for edge in edges]
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    axes.plot([edge - begin for edge in edges], rates, label="requests a second", color="tab:blue")
    axes.set(xlabel="seconds", ylabel="requests a second", ylim=(0, None))
    ranks = axes.twinx()
    times, sizes = [0.0], [record.changes[0][2]]
    for started, done, size in record.changes[1:]:
        axes.axvspan(started - begin, done - begin, color="tab:orange", alpha=0.25)
        times += [done - begin, done - begin]
        sizes += [sizes[-1], size]
    ranks.plot([*times, end - begin], [*sizes, sizes[-1]], color="tab:gray", label="ranks")
    ranks.set(ylabel="ranks", ylim=(0, max(sizes) + 1))
    axes.set_title("Ranks come and go under load; a change is under way where it is shaded")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engine", default="mock", choices=["mock", "lockstep_mock"])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[2, 4, 1, 3], help="numbers of ranks, one after another"
    )
    parser.add_argument("--hold", type=float, default=2.0, help="seconds between two changes")
    parser.add_argument("--streams", type=int, default=96, help="streams of requests that follow each other")
    parser.add_argument("--slots", type=int, default=32, help="requests that a rank works on at once; above 16")
    parser.add_argument("--reps", type=int, default=3, help="pairs of runs; figures are medians")
    parser.add_argument("--step-ms", type=float, default=5.0)
    add_outputs(parser)
    args = parser.parse_args()
    controls, scaled = [], []
    for _ in range(args.reps):
        controls.append(asyncio.run(measure(args, scale=False)))
        scaled.append(asyncio.run(measure(args, scale=True)))
    pairs = [(row("", control), row("", scale)) for control, scale in zip(controls, scaled, strict=True)]
    rows = [
        {"run": name, **{key: spread([pair[which][key] for pair in pairs]).median for key in KEYS}}
        for which, name in enumerate(("as many idle interpreters start", "scale"))
    ]
    show(
        f"{args.engine}: {' -> '.join(map(str, args.sizes))} ranks, a step every {args.step_ms:g} ms",
        ["run", "requests", "wrong", "first token, ms: p50", "p99", "meanwhile: p50", "p99", "gap, ms: p50", "p99.9"],
        [
            [
                str(one["run"]), f"{one['requests']:.0f}", f"{one['wrong']:.0f}", f"{one['ttft_calm_p50_ms']:.1f}",
                f"{one['ttft_calm_p99_ms']:.1f}", f"{one['ttft_changing_p50_ms']:.1f}",
                f"{one['ttft_changing_p99_ms']:.1f}", f"{one['gap_p50_ms']:.2f}", f"{one['gap_p999_ms']:.2f}",
            ]
            for one in rows
        ],
    )  # fmt: skip
    ratios = spread([scale["gap_p999_ms"] / control["gap_p999_ms"] for control, scale in pairs])
    print(f"p99.9 gap between tokens of streams on rank 0: {ratios.text(2)} of the control run's (goal: at most 1.5)")
    print(f"each change took {', '.join(f'{seconds:g} s' for seconds in pairs[-1][1]['changes_s'])}")
    if args.plot:
        plot(scaled[-1], args.plot)
    if args.json:
        write_json(args.json, {"pairs": pairs})


if __name__ == "__main__":
    main()
