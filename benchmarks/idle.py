"""What an idle engine costs: CPU share of the client, the engine core and whatever else was started.

python -m benchmarks.idle [--seconds 10] [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

from benchmarks.measure import cpu_ns, descendants, show, write_json
from benchmarks.plots import add_outputs, bars
from benchmarks.stream import engine_pid
from outboard import AsyncLLM, EngineConfig, SamplingParams


async def measure(seconds: float) -> dict[str, float]:
    """CPU share (1 is one core) of each process while nothing happens, after one request has been served."""
    async with AsyncLLM(EngineConfig(engine="mock")) as llm:
        async for _ in llm.generate([1, 2, 3], SamplingParams(max_tokens=4)):
            pass
        names = {pid: f"helper of {command.split()[-1]}" for pid, command in descendants(os.getpid()).items()}
        names |= {os.getpid(): "client", engine_pid(llm.client): "engine core"}
        await asyncio.sleep(0.5)
        before = {pid: cpu_ns(pid) for pid in names}
        start = time.perf_counter()
        await asyncio.sleep(seconds)
        span = time.perf_counter() - start
        return {name: (cpu_ns(pid) - before[pid]) / span / 1e9 for pid, name in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description="CPU use with nothing to do.")
    parser.add_argument("--seconds", type=float, default=10.0)
    add_outputs(parser)
    args = parser.parse_args()
    shares = asyncio.run(measure(args.seconds))
    rows = [[name, f"{share * 100:.3f}"] for name, share in shares.items()]
    show(f"Idle for {args.seconds:g} s", ["process", "% of a core"], rows)
    if args.plot:
        bars(args.plot, {"% of a core": {name: [share * 100] for name, share in shares.items()}})
    if args.json:
        write_json(args.json, shares)


if __name__ == "__main__":
    main()
