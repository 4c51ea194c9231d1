"""`python -m chaos`: many schedules in worker processes, and a table of what was survived."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import faulthandler
import json
import os
import pprint
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

import numpy as np

from chaos.ledger import Violation
from chaos.plan import draw
from chaos.schedule import Report, run_plan
from outboard import EngineConfig, SyncMPClient, TransportConfig

# No schedule takes this long; one that does has blocked its whole process.
_LONGEST = 90.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="run the schedules of this many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one, and show its plan")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="schedules at once")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return _work()
    if arguments.seed is not None:
        pprint.pprint(draw(arguments.seed), width=120)
        seeds = [arguments.seed]
    else:
        seeds = list(range(arguments.first, arguments.first + arguments.seeds))
    started = time.monotonic()
    reports = _run_all(seeds, arguments.jobs)
    return _tell(reports, time.monotonic() - started)


# --- a worker ---


def warm_up() -> None:
    """What a process makes once and keeps is there before the first look."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))
    client = SyncMPClient(EngineConfig(engine="chaos.engines:ChaosEngine", transport=TransportConfig(sockets="zmq")))
    client.call_utility("mirror", np.zeros(30_000))  # in a frame that ZeroMQ does not copy
    client.shutdown()


def _work() -> int:
    """Runs the seeds that come in, line by line, and answers each with a report."""
    with os.fdopen(os.dup(1), "w") as answers, os.fdopen(os.dup(2), "w") as stderr:
        os.dup2(2, 1)
        warm_up()
        _answer(answers, stderr)
    return 0


def _answer(answers: TextIO, stderr: TextIO) -> None:
    for line in sys.stdin:
        faulthandler.dump_traceback_later(_LONGEST - 10, file=stderr)
        report = run_plan(draw(int(line)))
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(dataclasses.asdict(report)), file=answers, flush=True)


# --- all of them ---


def _run_all(seeds: list[int], jobs: int) -> list[Report]:
    todo: SimpleQueue[int] = SimpleQueue()
    for seed in seeds:
        todo.put(seed)
    reports: list[Report] = []
    threads = [threading.Thread(target=_serve, args=(todo, reports)) for _ in range(min(jobs, len(seeds)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(reports, key=lambda report: report.seed)


def _serve(todo: SimpleQueue[int], reports: list[Report]) -> None:
    """Feeds one worker after the other: one that hangs or dies is a failure of its seed."""
    worker: subprocess.Popen[str] | None = None
    with contextlib.suppress(Empty):
        while True:
            seed = todo.get_nowait()
            if worker is None:
                worker = _start_worker()
            report, alive = _ask(worker, seed)
            if not alive:
                worker.kill()
                worker.wait()
                worker = None
            reports.append(report)
            _tell_of(report)
    if worker is not None:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


def _start_worker() -> subprocess.Popen[str]:
    tests = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": _path(tests), "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m", "chaos", "--worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _path(first: str) -> str:
    return os.pathsep.join(filter(None, [first, os.environ.get("PYTHONPATH")]))


def _ask(worker: subprocess.Popen[str], seed: int) -> tuple[Report, bool]:
    assert worker.stdin is not None and worker.stdout is not None
    timer = threading.Timer(_LONGEST, worker.kill)
    timer.start()
    started = time.monotonic()
    try:
        worker.stdin.write(f"{seed}\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except OSError:
        line = ""
    finally:
        timer.cancel()
    if line:
        answer: dict[str, Any] = json.loads(line)
        answer["violations"] = [Violation(**one) for one in answer["violations"]]
        return Report(**answer), True
    took = time.monotonic() - started
    what = f"the whole process {'hung' if took >= _LONGEST - 1 else 'died'} after {took:.0f} s"
    return Report(seed, took, {}, 0, 0, 0, [Violation("hung", what)]), False


def _tell_of(report: Report) -> None:
    faults = ", ".join(report.struck)
    print(
        f"{report.seed:5} {report.seconds:5.1f} s  {'FAILED' if report.violations else 'ok    '}  {faults}", flush=True
    )
    for violation in report.violations:
        print(f"      {violation.sort}: {violation.text}", flush=True)
    if report.stderr:
        print("      stderr:\n" + "\n".join(f"      | {line}" for line in report.stderr.splitlines()[-40:]), flush=True)


def _tell(reports: list[Report], seconds: float) -> int:
    injected: Counter[str] = Counter()
    schedules: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for report in reports:
        injected.update(report.struck)
        schedules.update(list(report.struck))
        if report.violations:
            failures.update(list(report.struck))
    print(f"\n{'fault':42} {'injected':>9} {'schedules':>9} {'failed':>7}")
    for kind in sorted(injected, key=lambda kind: (kind.startswith("end: "), kind)):
        print(f"{kind:42} {injected[kind]:9} {schedules[kind]:9} {failures[kind]:7}")
    sorts = Counter(violation.sort for report in reports for violation in report.violations)
    failed = [report.seed for report in reports if report.violations]
    print(
        f"\n{len(reports)} schedules, {sum(injected.values())} faults, {sum(one.deaths for one in reports)} deaths, "
        f"{sum(one.requests for one in reports)} requests, {sum(one.calls for one in reports)} utility calls, "
        f"in {seconds:.0f} s\n"
        f"hung waiters: {sorts.pop('hung', 0)}   lost, repeated or wrong tokens: {sorts.pop('tokens', 0)}   "
        f"leftovers: {sorts.pop('leftover', 0)}   other: {sum(sorts.values())}\n"
        f"{'failed seeds: ' + ', '.join(map(str, failed)) if failed else 'all survived'}"
    )
    for seed in failed:
        print(f"    make chaos SEED={seed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
