"""vLLM's own client and Outboard on the same work, in turn, in one run.

What is measured is the way between a front end and its engine core, not a model: both engines cost next to nothing
(`sides/vllm_engine.py`, `benchmarks.engines.GatedMock`), and their `step` is taken off the engine's CPU time.
vLLM runs in an environment of its own, named by OUTBOARD_PEER_VLLM, with its own processes, sockets and codec. The
work "http" is that of its whole OpenAI server, beside `outboard serve`; see `benchmarks.peers.http`.

    OUTBOARD_PEER_VLLM=path/to/python python -m benchmarks.peers.vllm [--reps 5] [--loop uvloop|default]
                                       [--works columns streams http ...] [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from benchmarks.measure import show, spread, write_json
from benchmarks.peers import http
from benchmarks.plots import add_outputs, bars
from benchmarks.serve import Job

PEER = "OUTBOARD_PEER_VLLM"
ROOT = Path(__file__).parents[2]
ANSWER_BOUND = 300.0  # seconds
MIB = 1 << 20
HTTP = Job(streams=256, step_ms=10.0, seconds=3.0)
Found = dict[str, dict[str, list[dict[str, float]]]]  # answers by job and side


class Side:
    """A process that takes jobs."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.ready = self._read()["ready"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def do(self, **job: Any) -> dict[str, float]:
        """Has a job done; the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}; run its side by hand to see why")


class Work(NamedTuple):
    """One row: a job, the figure that counts, and whether less of it is better."""

    work: str
    title: str
    job: dict[str, Any]
    figure: str
    unit: str
    less: bool
    goal: float | None = None


def works() -> list[Work]:
    """All rows, in order."""
    rows = [Work("utility", "utility call, sequential", {"calls": 2000}, "p50_us", "us, p50", True, 2)]
    for pace in (0.0, 0.01):
        how = "paced 10 ms" if pace else "free"
        for streams in (1, 16, 64, 256, 1024):
            tokens = 60 if pace else max(64, min(4000, 64_000 // streams))
            job = {"streams": streams, "tokens": tokens, "pace": pace}
            per_message = pace and streams == 1
            figure, unit = (
                ("client_us_per_message", "us/message") if per_message else ("client_us_per_token", "us/token")
            )
            goal = (6 if not pace else None) if streams == 256 else (4 if per_message else None)
            name = f"get_output_async, {streams} streams, {how}"
            rows.append(Work("columns", f"{name}: client", {**job, "objects": False}, figure, unit, True, goal))
            if streams == 256:
                rows.append(Work("columns", f"{name}: `.outputs` read", {**job, "objects": True}, figure, unit, True))
                goal = 5 if not pace else None
                title = f"{name}: engine but for step"
                rows.append(Work("columns", title, {**job, "objects": False}, "engine_us_per_token", unit, True, goal))
        for streams in (1, 64, 256, 1024):
            job = {"streams": streams, "tokens": 60 if pace else max(64, min(2000, 32_000 // streams)), "pace": pace}
            goal = (5 if pace else 10) if streams == 256 else None
            title = f"AsyncLLM.generate, {streams} streams, {how}: client"
            rows.append(Work("streams", title, job, "client_us_per_token", "us/token", True, goal))
            if streams == 256:
                title = f"AsyncLLM.generate, {streams} streams, {how}: wakes"
                rows.append(Work("streams", title, job, "wakes_per_token", "a token", True))
    requests = {"count": 2000, "prompt": 1000}
    title = "1000-token requests, both sides"
    rows.append(Work("requests", title, requests, "per_cpu_second", "per CPU-second", False, 4))
    for way, goal in (("out", 3), ("in", 2)):
        tensor = {"size": 64 * MIB, "way": way}
        where = "in an output" if way == "out" else "in a request"
        rows.append(Work("tensor", f"64 MiB tensor {where}", tensor, "gb_per_second", "GB/s", False, goal))
        rows.append(Work("tensor", f"64 MiB tensor {where}: client CPU", tensor, "client_ms", "ms", True))
    rows.append(Work("idle", "idle: client", {"seconds": 5}, "client_share", "of a core", True))
    rows.append(Work("idle", "idle: engine", {"seconds": 5}, "engine_share", "of a core", True))
    return rows


def measure(rows: list[Work], sides: list[Side], reps: int) -> Found:
    """Answers by job and side; the sides take turns."""
    found: Found = {}
    for row in rows:
        key = json.dumps([row.work, row.job])
        if key in found:
            continue
        found[key] = {side.name: [] for side in sides}
        for turn in range(reps + 1):
            for side in sides:
                answer = side.do(work=row.work, **row.job)
                if turn:  # the first warms up
                    found[key][side.name].append(answer)
        print(f"  {row.title}", file=sys.stderr, flush=True)
    return found


def ratios(row: Work, found: Found) -> list[float]:
    """How many times better Outboard's figure is, of each turn."""
    answers = found[json.dumps([row.work, row.job])]
    ours, theirs = ([answer[row.figure] for answer in answers[name]] for name in ("outboard", "vllm"))
    return [(b / a if row.less else a / b) for a, b in zip(ours, theirs, strict=True) if a and b]


def report(rows: list[Work], found: Found, reps: int, loop: str) -> None:
    """Prints the table."""
    lines = []
    for row in rows:
        answers = found[json.dumps([row.work, row.job])]
        ours, theirs = ([answer[row.figure] for answer in answers[name]] for name in ("outboard", "vllm"))
        pairs = ratios(row, found)
        ratio = spread(pairs).text(1) if pairs else ""
        typical = spread(theirs).median
        digits = 5 if typical < 0.01 else 3 if typical < 10 else 1 if typical < 100 else 0
        goal = "" if row.goal is None else f"{row.goal:g}"
        lines.append([row.title, row.unit, spread(ours).text(digits), spread(theirs).text(digits), ratio, goal])
    columns = ["work", "unit", "Outboard", "vLLM", "times better", "goal"]
    show(f"Beside vLLM, {loop}, median (least - most) of {reps}", columns, lines)


def plot(path: str, rows: list[Work], found: Found, over_http: http.Found | None) -> None:
    """Draws how many times better each is, and the goals."""
    panel = {row.title: pairs for row in rows if row.work != "idle" and (pairs := ratios(row, found))}
    goals = {row.title: row.goal for row in rows if row.goal is not None}
    if over_http is not None:
        for title, pairs, goal in http.ratios(over_http):
            panel[title] = pairs
            if goal is not None:
                goals[title] = goal
    bars(path, {"times better than vLLM; line: goal": panel}, goals, log=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.vllm", description="Beside vLLM's own client.")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--loop", choices=("default", "uvloop"), default="uvloop")
    parser.add_argument("--outputs", choices=("unix", "zmq"), default="unix")
    names = sorted({"http", *(row.work for row in works())})
    parser.add_argument("--works", nargs="+", choices=names, default=names, help="default: all")
    add_outputs(parser)
    args = parser.parse_args()
    peer = os.environ.get(PEER)
    if not peer:
        print(f"skipped: there is no vLLM to measure against; name its Python in {PEER}")
        return
    rows = [row for row in works() if row.work in args.works]
    found: Found = {}
    ready: dict[str, float] = {}
    if rows:
        ours = Side("outboard", [sys.executable, "-m", "benchmarks.peers.sides.outboard_side", args.loop, args.outputs])
        with ours, Side("vllm", [peer, str(Path(__file__).with_name("sides") / "vllm_side.py"), args.loop]) as theirs:
            found = measure(rows, [ours, theirs], args.reps)
            ready = {side.name: side.ready for side in (ours, theirs)}
        print(f"start to ready, two engines: outboard {ready['outboard']:.1f} s, vllm {ready['vllm']:.1f} s")
        report(rows, found, args.reps, args.loop)
    over_http = http.measure(peer, HTTP, args.reps) if "http" in args.works else None
    if over_http is not None:
        http.report(over_http, HTTP, args.reps)
    if args.plot:
        plot(args.plot, rows, found, over_http)
    if args.json:
        write_json(args.json, {"ready": ready, "answers": found, "http": msgspec.to_builtins(over_http)})


if __name__ == "__main__":
    main()
