"""Guards what was won: ratios against the plain designs, in one run, that must not fall below their floors.

Only ratios that do not depend on the machine count, and their floors leave room for a busy one: what they catch is a
change that makes a path several times as dear. The figures themselves are the other benchmarks' to print.

    python -m benchmarks.check [--quick] [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

from benchmarks import serve, stream
from benchmarks.measure import show, write_json
from benchmarks.plots import add_outputs, bars

QUICK = (256, 200, 1)  # streams, steps, repetitions
WHOLE = (256, 400, 3)


def stream_ratio(mode: str, design: str, field: str, size: tuple[int, int, int]) -> float:
    """How many times as much the plain design takes a token."""
    streams, steps, reps = size
    job = stream.Job(mode, "unix", streams, steps, False)
    ratios = []
    for _ in range(reps):
        plain: float = getattr(stream.measure("plain", job, "default"), field)
        mine: float = getattr(stream.measure(design, job, "default"), field)
        ratios.append(plain / mine)
    return statistics.median(ratios)


def serve_ratio(size: tuple[int, int, int]) -> float:
    """How many times as many tokens a CPU-second as the plain server."""
    streams, _, reps = size
    job = serve.Job(streams, 10.0, 1.0)
    ratios = []
    for _ in range(reps):
        plain = serve.measure("plain", job).tokens_per_cpu_second
        ratios.append(serve.measure("outboard", job).tokens_per_cpu_second / plain)
    return statistics.median(ratios)


CHECKS: list[tuple[str, float, Callable[[tuple[int, int, int]], float]]] = [
    ("streams, free: client", 4.0, lambda size: stream_ratio("free", "streams", "client_ns_per_token", size)),
    ("streams, windowed: client", 1.5, lambda size: stream_ratio("windowed", "streams", "client_ns_per_token", size)),
    ("columns, free: client", 10.0, lambda size: stream_ratio("free", "columns", "client_ns_per_token", size)),
    ("HTTP streams: API process", 1.2, serve_ratio),
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description="Floors under what was won.")
    parser.add_argument("--quick", action="store_true", help="smaller and once; for every change")
    add_outputs(parser)
    args = parser.parse_args()
    size = QUICK if args.quick else WHOLE
    rows, missed = [], []
    values: dict[str, float] = {}
    for name, floor, ratio in CHECKS:
        value = ratio(size)
        if value < floor:  # a busy machine may have hit the one and not the other
            value = max(value, ratio(size))
        values[name] = value
        rows.append([name, f"{value:.1f}", f"{floor:g}", "ok" if value >= floor else "MISSED"])
        if value < floor:
            missed.append(name)
    show("Times less than the plain design takes", ["path", "here", "at least", ""], rows)
    floors = {name: floor for name, floor, _ in CHECKS}
    if args.plot:
        bars(args.plot, {"times less than the plain design; line: floor": {k: [v] for k, v in values.items()}}, floors)
    if args.json:
        write_json(args.json, {name: {"ratio": value, "floor": floors[name]} for name, value in values.items()})
    if missed:
        sys.exit(f"below the floor: {', '.join(missed)}")


if __name__ == "__main__":
    main()
