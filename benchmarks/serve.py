"""Streams and short requests over HTTP: CPU time of the API process a token, and a request.

Three servers take turns in one run, so that whatever else the machine does meets them alike:

    outboard  `outboard serve mock`
    plain     FastAPI's `StreamingResponse` over the plain client, see `benchmarks.baselines.plain_server`
    floor     a bare write of the same bytes to each connection, and no engine

All give each stream a token a step, write it at once, and encode JSON with msgspec. What is measured begins when all
streams run, and ends before the first of them does. Then some connections ask for one token again and again, which is
what a request costs but for its tokens. The load comes from this process; its own CPU time is printed.

    python -m benchmarks.serve [--streams 256] [--step-ms 10] [--connections 16] [--seconds 3] [--reps 3]
                               [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.http_load import Requests, Streams
from benchmarks.measure import cpu_ns, descendants, kernel_ns, show, spread, write_json
from benchmarks.plots import add_outputs, bars

SERVERS = ("plain", "outboard", "floor")
# Seconds until all streams have begun, at most; that they then run unmeasured; and by which they are longer than that.
START_BOUND = 20.0
WARM_UP = 1.0
SPARE = 2.0


class Job(msgspec.Struct, frozen=True):
    """So many streams at this pace, then so many connections with short requests, each measured for so long."""

    streams: int
    step_ms: float
    seconds: float
    connections: int = 16


class Server(msgspec.Struct, frozen=True):
    """One that runs, and the pids of its API process and its engine; 0: it has none."""

    port: int
    api: int
    engine: int


class Sample(msgspec.Struct, frozen=True):
    """What one measurement of streams gave; CPU times in ns. `kernel`: of the API process, that in system calls."""

    server: str
    tokens_per_second: float
    api_ns_per_token: float
    kernel_ns_per_token: float
    engine_ns_per_token: float
    load_ns_per_token: float
    tokens_per_read: float
    metrics_ms: float = 0.0

    @property
    def tokens_per_cpu_second(self) -> float:
        """Of the API process."""
        return 1e9 / self.api_ns_per_token


class RequestSample(msgspec.Struct, frozen=True):
    """What one measurement of requests gave; CPU times in ns. `whole`: with an answer in one piece."""

    server: str
    max_tokens: int
    whole: bool
    requests_per_second: float
    api_ns_per_request: float
    engine_ns_per_request: float


@contextmanager
def running(server: str, step_ms: float, start_after: int) -> Iterator[Server]:
    """A server; the plain one's engine works in rounds of `start_after` requests."""
    port = free_port()
    if server == "outboard":
        command = [str(Path(sys.executable).with_name("outboard")), "serve", "mock", "--option", f"step_ms={step_ms}"]
        command += ["--port", str(port), "--log-level", "warning"]
    else:
        module = "benchmarks.baselines.plain_server"
        command = [sys.executable, "-m", module, server, str(port), str(step_ms), str(start_after)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        if server == "outboard":
            pids = [_pid_of(process.pid, name) for name in ("outboard.serve.api_process", "outboard.engine")]
            yield Server(port, *pids)
        elif server == "plain":
            yield Server(port, process.pid, _pid_of(process.pid, "benchmarks.baselines.plain"))
        else:
            yield Server(port, process.pid, 0)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def free_port() -> int:
    """One that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"nothing listens on port {port}")


def _pid_of(root: int, module: str) -> int:
    """Of the process below that runs this module; its wardens name it, too, and come before it."""
    found = [pid for pid, command in descendants(root).items() if command.split()[1:] and f"-m {module}" in command]
    return found[-1]


class _Cpu:
    """CPU time of a server's processes, and of this one, since it was made."""

    def __init__(self, server: Server) -> None:
        self._pids = (server.api, server.engine, os.getpid())
        self._before = self._now()
        self._began = time.monotonic()

    def _now(self) -> list[int]:
        return [cpu_ns(pid) if pid else 0 for pid in self._pids]

    def used(self) -> tuple[float, int, int, int]:
        """Seconds, and ns of the API process, of the engine and of this process."""
        wall = time.monotonic() - self._began
        api, engine, mine = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return wall, api, engine, mine


def measure_streams(name: str, server: Server, job: Job) -> Sample:
    """Streams that end with this."""
    max_tokens = int((WARM_UP + job.seconds + SPARE) * 1000 / job.step_ms)
    with Streams(server.port, job.streams, max_tokens) as load:
        load.begin(START_BOUND)
        load.run(WARM_UP)
        if len(load.open) != job.streams:
            raise RuntimeError(f"{job.streams - len(load.open)} streams ended at once")
        kernel, cpu, tokens, reads = -kernel_ns(server.api), _Cpu(server), load.tokens, load.reads
        load.run(job.seconds)
        wall, api, engine, mine = cpu.used()
        kernel += kernel_ns(server.api)
        tokens, reads = load.tokens - tokens, load.reads - reads
        metrics = _metrics_ms(server.port) if name == "outboard" else 0.0
    return Sample(
        name, tokens / wall, api / tokens, kernel / tokens, engine / tokens, mine / tokens, tokens / reads, metrics
    )


def measure_requests(
    name: str, server: Server, job: Job, whole: bool = False, connections: int = 0, max_tokens: int = 1
) -> RequestSample:
    """Requests, of a token each unless told."""
    with Requests(server.port, connections or job.connections, max_tokens, stream=not whole) as load:
        load.run(WARM_UP)
        cpu, count = _Cpu(server), load.answered
        load.run(job.seconds)
        wall, api, engine, _ = cpu.used()
        count = load.answered - count
    return RequestSample(name, max_tokens, whole, count / wall, api / count, engine / count)


def measure(name: str, job: Job) -> Sample:
    """One measurement of streams with a server of its own."""
    with running(name, job.step_ms, job.streams) as server:
        return measure_streams(name, server, job)


def measure_short(name: str, job: Job) -> list[RequestSample]:
    """The same of short requests. The yardsticks know answers in pieces only."""
    with running(name, job.step_ms, job.connections) as server:
        return [
            measure_requests(name, server, job, whole) for whole in (False, True) if name == "outboard" or not whole
        ]


def _metrics_ms(port: int) -> float:
    """How long `/metrics` takes on the same port while the streams go on; nobody reads them meanwhile."""
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        while connection.recv(65536):
            pass
    return (time.monotonic() - started) * 1000


def report(samples: list[Sample], job: Job, reps: int) -> None:
    """Prints the table."""
    rows = []
    plain = [one for one in samples if one.server == "plain"]
    for server in dict.fromkeys(one.server for one in samples):
        mine = [one for one in samples if one.server == server]
        ratios = [
            one.tokens_per_cpu_second / other.tokens_per_cpu_second for one, other in zip(mine, plain, strict=False)
        ]
        rows.append(
            [
                server,
                spread([one.tokens_per_second for one in mine]).text(),
                spread([one.api_ns_per_token for one in mine]).text(1, 1000),
                f"{spread([one.kernel_ns_per_token for one in mine]).median / 1000:.1f}",
                spread([one.tokens_per_cpu_second for one in mine]).text(),
                spread(ratios).text(2),
                spread([one.engine_ns_per_token for one in mine]).text(1, 1000),
                spread([one.load_ns_per_token for one in mine]).text(1, 1000),
                f"{spread([one.tokens_per_read for one in mine]).median:.2f}",
                spread([one.metrics_ms for one in mine]).text() if server == "outboard" else "",
            ]
        )
    columns = [
        "server",
        "tokens/s",
        "API us/token",
        "in the kernel",
        "tokens per CPU-second",
        "of plain",
        "engine us/token",
    ]
    columns += ["load us/token", "tokens/read", "/metrics ms"]
    title = f"{job.streams} streams over HTTP, a step every {job.step_ms:g} ms, median (least - most) of {reps}"
    show(title, columns, rows)


def report_requests(samples: list[RequestSample], job: Job, reps: int) -> None:
    """Prints the table."""
    rows = []
    for server, whole in dict.fromkeys((one.server, one.whole) for one in samples):
        mine = [one for one in samples if (one.server, one.whole) == (server, whole)]
        rows.append(
            [
                f"{server}, in one piece" if whole else server,
                spread([one.requests_per_second for one in mine]).text(),
                spread([one.api_ns_per_request for one in mine]).text(0, 1000),
                spread([one.engine_ns_per_request for one in mine]).text(0, 1000),
            ]
        )
    title = f"Requests of one token on {job.connections} connections, a step every {job.step_ms:g} ms, median (least - "
    show(f"{title}most) of {reps}", ["server", "requests/s", "API us/request", "engine us/request"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description="Streams over HTTP, no model.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=16, help="of short requests")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    add_outputs(parser)
    args = parser.parse_args()
    job = Job(args.streams, args.step_ms, args.seconds, args.connections)
    samples: list[Sample] = []
    short: list[RequestSample] = []
    for _ in range(args.reps):
        samples += [measure(name, job) for name in args.servers]
        short += [one for name in args.servers for one in measure_short(name, job)]
    report(samples, job, args.reps)
    report_requests(short, job, args.reps)
    if args.plot:
        a_token = {
            name: [one.api_ns_per_token / 1000 for one in samples if one.server == name] for name in args.servers
        }
        a_request = {
            name: [one.api_ns_per_request / 1000 for one in short if one.server == name and not one.whole]
            for name in args.servers
        }
        bars(args.plot, {"API process, us a token": a_token, "API process, us a request": a_request})
    if args.json:
        write_json(args.json, msgspec.to_builtins({"streams": samples, "requests": short}))


if __name__ == "__main__":
    main()
