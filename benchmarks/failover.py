"""An engine core is killed: how long until everybody who waits for it has been told.

So many streams and utility calls wait on one engine; then it gets SIGKILL. What counts is the time from the signal to
the last of them that has its error, and to the first. With a restart policy, the time until a new request has its first
token, too, beside the time that the same engine needs to start.

    python -m benchmarks.failover [--streams 256] [--calls 64] [--reps 5] [--plot FILE.svg|png]
                                  [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time

import msgspec

from benchmarks.measure import show, spread, write_json
from benchmarks.plots import add_outputs, bars
from benchmarks.stream import engine_pid
from outboard import AsyncLLM, EngineConfig, EngineDeadError, FaultConfig, RestartPolicy, SamplingParams
from outboard.errors import OutboardError

BOUND = 60.0  # seconds


class Sample(msgspec.Struct, frozen=True):
    """Milliseconds from the signal; `start_ms`: an engine's start, `served_ms`: the first token of a new request."""

    first_ms: float
    last_ms: float
    start_ms: float
    served_ms: float


async def measure(streams: int, calls: int) -> Sample:
    """One engine, killed once."""
    faults = FaultConfig(restart=RestartPolicy.on_failure())
    began = time.perf_counter()
    async with AsyncLLM(EngineConfig(engine="mock", options={"step_ms": 20.0}, faults=faults)) as llm:
        started = time.perf_counter() - began
        told: list[float] = []
        running = asyncio.Event()
        params = SamplingParams(max_tokens=1_000_000, output_kind="delta", detokenize=False)

        async def read() -> None:
            try:
                async for _ in llm.generate([1, 2, 3], params):
                    running.set()
            except EngineDeadError:
                told.append(time.perf_counter())

        async def call() -> None:
            try:
                await llm.client.call_utility_async("pause_generation", "wait")  # answered once all have ended: never
            except EngineDeadError:
                told.append(time.perf_counter())

        tasks = [asyncio.ensure_future(read()) for _ in range(streams)]
        await running.wait()
        await asyncio.sleep(0.2)
        tasks += [asyncio.ensure_future(call()) for _ in range(calls)]
        await asyncio.sleep(0.2)
        killed = time.perf_counter()
        os.kill(engine_pid(llm.client), signal.SIGKILL)
        await asyncio.gather(*tasks)
        while True:
            try:
                async for _ in llm.generate([1], SamplingParams(max_tokens=1, detokenize=False)):
                    pass
            except OutboardError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.001)
            else:
                break
        served = time.perf_counter() - killed
    if len(told) != streams + calls:
        raise RuntimeError(f"{len(told)} of {streams + calls} were told")
    return Sample((min(told) - killed) * 1e3, (max(told) - killed) * 1e3, started * 1e3, served * 1e3)


def by_title(samples: list[Sample]) -> dict[str, list[float]]:
    """All figures."""
    titles = {
        "signal to the first that is told": "first_ms",
        "signal to the last that is told": "last_ms",
        "signal to the first token of a new request": "served_ms",
        "start of the same engine, beside it": "start_ms",
    }
    return {title: [getattr(one, field) for one in samples] for title, field in titles.items()}


def report(samples: list[Sample], streams: int, calls: int) -> None:
    """Prints the table."""
    rows = [[title, spread(values).text(1)] for title, values in by_title(samples).items()]
    title = f"SIGKILL under {streams} streams and {calls} calls, median (least - most) of {len(samples)}"
    show(title, ["time", "ms"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover", description="An engine core is killed.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--reps", type=int, default=5)
    add_outputs(parser)
    args = parser.parse_args()
    samples = [asyncio.run(asyncio.wait_for(measure(args.streams, args.calls), BOUND)) for _ in range(args.reps)]
    report(samples, args.streams, args.calls)
    if args.plot:
        bars(args.plot, {"ms": by_title(samples)})
    if args.json:
        write_json(args.json, msgspec.to_builtins(samples))


if __name__ == "__main__":
    main()
