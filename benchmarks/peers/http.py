"""vLLM's own OpenAI server beside `outboard serve` and the floor, over HTTP, in turn, in one run.

The load, `outboard serve` and the floor are those of `benchmarks.serve`; vLLM's server is `sides/vllm_server.py`. All
three are up all the time, and idle while another is measured.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.measure import descendants, settled, show, spread
from benchmarks.serve import Job, RequestSample, Sample, Server, free_port, measure_requests, measure_streams, running

__all__ = ["Found", "measure", "ratios", "report"]

START_BOUND = 180.0  # seconds
END_BOUND = 60.0
SERVERS = ("outboard", "vllm", "floor")
SHORT = 64  # tokens
# What is to hold: times less than vLLM, and times the floor.
A_TOKEN, OF_FLOOR, A_REQUEST = 8.0, 2.2, 2.5


class Found(msgspec.Struct):
    """All samples of a run."""

    streams: list[Sample] = []
    requests: list[RequestSample] = []

    def a_token(self, server: str) -> list[float]:
        """CPU time of the API process, us."""
        return [one.api_ns_per_token / 1000 for one in self.streams if one.server == server]

    def a_request(self, server: str, whole: bool, max_tokens: int = 1) -> list[float]:
        """CPU time of the API process, us."""
        key = (server, whole, max_tokens)
        mine = [one for one in self.requests if (one.server, one.whole, one.max_tokens) == key]
        return [one.api_ns_per_request / 1000 for one in mine]

    def a_token_of_short(self, server: str) -> list[float]:
        """CPU time of the API process, us, where each token bears its share of a request."""
        return [value / SHORT for value in self.a_request(server, False, SHORT)]


@contextmanager
def vllm_running(peer: str, step_ms: float) -> Iterator[Server]:
    """vLLM's server; its API process is the one that is started."""
    port = free_port()
    side = Path(__file__).with_name("sides") / "vllm_server.py"
    command = [peer, str(side), str(port), str(step_ms)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        engine = next(pid for pid, name in descendants(process.pid).items() if "EngineCore" in name)
        yield Server(port, process.pid, engine)
    finally:
        process.terminate()
        try:
            process.wait(END_BOUND)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until it answers: it listens long before."""
    deadline = time.monotonic() + START_BOUND
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                if connection.recv(4096).startswith(b"HTTP/1.1 200 "):
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("vLLM's server is not ready; run sides/vllm_server.py PORT STEP_MS by hand to see why")


def measure(peer: str, job: Job, reps: int) -> Found:
    """All servers in turn."""
    found = Found()
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                vllm_running(peer, job.step_ms) if name == "vllm" else running(name, job.step_ms, job.streams)
            )
            for name in SERVERS
        }
        for _ in range(reps):
            for name, server in servers.items():
                found.streams.append(measure_streams(name, server, job))
                # vLLM's server goes on with the streams of those who have left
                asyncio.run(settled(server.api, timeout=END_BOUND))
            for name, server in servers.items():
                sample = measure_requests(name, server, job, connections=job.streams, max_tokens=SHORT)
                found.requests.append(sample)
                asyncio.run(settled(server.api, timeout=END_BOUND))
            for whole in (False, True):
                for name, server in servers.items():
                    if name != "floor" or not whole:  # it knows answers in pieces only
                        found.requests.append(measure_requests(name, server, job, whole))
                        asyncio.run(settled(server.api, timeout=END_BOUND))
            print(f"  HTTP, {job.streams} streams and {job.connections} connections", file=sys.stderr, flush=True)
    return found


class Work(NamedTuple):
    """One row: its figure by server, and what is to hold."""

    title: str
    unit: str
    figures: Callable[[str], list[float]]
    goal: float | None
    of_floor: float | None = None


def works(found: Found) -> list[Work]:
    """All rows."""
    return [
        Work("HTTP: a token of many streams", "us/token", found.a_token, A_TOKEN, OF_FLOOR),
        Work(f"HTTP: a token of streams of {SHORT}, one after the other", "us/token", found.a_token_of_short, None),
        Work("HTTP: a request, streamed", "us/request", lambda name: found.a_request(name, False), A_REQUEST),
        Work("HTTP: a request, in one piece", "us/request", lambda name: found.a_request(name, True), A_REQUEST),
    ]


def ratios(found: Found) -> list[tuple[str, list[float], float | None]]:
    """How many times less than vLLM, of each turn, by title; and the goal."""
    return [(work.title, _ratios(work.figures("vllm"), work.figures("outboard")), work.goal) for work in works(found)]


def report(found: Found, job: Job, reps: int) -> None:
    """Prints the table."""
    rows = []
    for work in works(found):
        ours, theirs, floor = (work.figures(name) for name in SERVERS)
        row = [work.title, work.unit, spread(ours).text(1), spread(theirs).text(1)]
        row += [
            spread(_ratios(theirs, ours)).text(1),
            "" if work.goal is None else f"{work.goal:g}",
            spread(floor).text(1) if floor else "",
        ]
        row += [spread(_ratios(ours, floor)).text(1) if floor else ""]
        rows.append([*row, "" if work.of_floor is None else f"{work.of_floor:g}"])
    columns = [
        "CPU of the API process",
        "unit",
        "Outboard",
        "vLLM",
        "times better",
        "goal",
        "floor",
        "of floor",
        "at most",
    ]
    rates = [
        f"{name} {spread([one.tokens_per_second for one in found.streams if one.server == name]).median:,.0f}"
        for name in SERVERS
    ]
    kernel = [
        f"{name} {spread([one.kernel_ns_per_token for one in found.streams if one.server == name]).median / 1000:.1f}"
        for name in SERVERS
    ]
    caption = (
        f"tokens/s of the streams: {', '.join(rates)}; requests of one token on {job.connections} connections\n"
        f"of a token of many streams in the kernel, us: {', '.join(kernel)}; a write for each token takes that"
    )
    title = (
        f"vLLM's own server, {job.streams} streams, a step every {job.step_ms:g} ms, median (least - most) of {reps}"
    )
    show(title, columns, rows, caption)


def _ratios(values: list[float], base: list[float]) -> list[float]:
    return [value / one for value, one in zip(values, base, strict=True)]
