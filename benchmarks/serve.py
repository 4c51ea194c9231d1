"""Many streams over HTTP at a set pace: CPU time of the API process a token.

Three servers take turns in one run, so that whatever else the machine does meets them alike:

    outboard  `outboard serve mock`
    plain     FastAPI's `StreamingResponse` over the plain client, see `benchmarks.baselines.plain_server`
    floor     a bare write of the same bytes to each connection, and no engine

All give each stream a token a step, write it at once, and encode JSON with msgspec. What is measured begins when all
streams run, and ends before the first of them does. The load comes from this process; its own CPU time is printed.

    python -m benchmarks.serve [--streams 256] [--step-ms 10] [--seconds 3] [--reps 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.measure import cpu_ns, descendants, show, spread, write_json

SERVERS = ("plain", "outboard", "floor")
# Of the beginning, seconds: until all streams run at their pace.
WARM_UP = 1.0


class Job(msgspec.Struct, frozen=True):
    """So many streams at this pace, measured for so long."""

    streams: int
    step_ms: float
    seconds: float


class Sample(msgspec.Struct, frozen=True):
    """What one measurement gave; CPU times in ns."""

    server: str
    tokens_per_second: float
    api_ns_per_token: float
    engine_ns_per_token: float
    load_ns_per_token: float
    tokens_per_write: float
    metrics_ms: float

    @property
    def tokens_per_cpu_second(self) -> float:
        """Of the API process."""
        return 1e9 / self.api_ns_per_token


class Load:
    """Connections that read streams and count their tokens, on epoll: as little work as Python allows."""

    def __init__(self, port: int, job: Job, max_tokens: int) -> None:
        self._epoll = select.epoll()
        self.tokens = 0
        self.reads = 0
        self.open: dict[int, socket.socket] = {}
        body = b'{"model":"mock","prompt":"hello","max_tokens":%d,"stream":true}' % max_tokens
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        for _ in range(job.streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(head % len(body) + body)
            connection.setblocking(False)
            self._epoll.register(connection, select.EPOLLIN)
            self.open[connection.fileno()] = connection

    def run(self, seconds: float) -> None:
        """Reads for so long, or until all streams have ended."""
        deadline = time.monotonic() + seconds
        while self.open and (left := deadline - time.monotonic()) > 0:
            for fd, _ in self._epoll.poll(left):
                data = self.open[fd].recv(65536)
                self.reads += 1
                self.tokens += data.count(b'"text":"')
                if not data or b"data: [DONE]" in data:
                    self.open.pop(fd).close()

    def close(self) -> None:
        """Ends all streams."""
        for connection in self.open.values():
            connection.close()
        self._epoll.close()


@contextmanager
def running(server: str, port: int, job: Job) -> Iterator[tuple[int, int]]:
    """A server, and the pids of its API process and its engine; 0: it has none."""
    if server == "outboard":
        command = [
            str(Path(sys.executable).with_name("outboard")),
            "serve",
            "mock",
            "--option",
            f"step_ms={job.step_ms}",
        ]
        command += ["--port", str(port), "--log-level", "warning"]
    else:
        module = "benchmarks.baselines.plain_server"
        command = [sys.executable, "-m", module, server, str(port), str(job.step_ms), str(job.streams)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        if server == "outboard":
            pids = [_pid_of(process.pid, name) for name in ("outboard.serve.api_process", "outboard.engine")]
            yield pids[0], pids[1]
        elif server == "plain":
            yield process.pid, _pid_of(process.pid, "benchmarks.baselines.plain")
        else:
            yield process.pid, 0
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


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


def measure(server: str, job: Job) -> Sample:
    """One measurement with a server of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    max_tokens = int((WARM_UP + job.seconds + 1) * 1000 / job.step_ms)
    with running(server, port, job) as (api, engine):
        load = Load(port, job, max_tokens)
        load.run(WARM_UP)
        if len(load.open) != job.streams:
            raise RuntimeError(f"{job.streams - len(load.open)} streams ended at once")
        pids = (api, engine, os.getpid())
        before = [cpu_ns(pid) if pid else 0 for pid in pids]
        tokens, reads, started = load.tokens, load.reads, time.monotonic()
        load.run(job.seconds)
        wall = time.monotonic() - started
        used = [(cpu_ns(pid) if pid else 0) - cpu for pid, cpu in zip(pids, before, strict=True)]
        tokens, reads = load.tokens - tokens, load.reads - reads
        metrics = _metrics_ms(port) if server == "outboard" else 0.0
        load.close()
    api_ns, engine_ns, load_ns = (cpu / tokens for cpu in used)
    return Sample(server, tokens / wall, api_ns, engine_ns, load_ns, tokens / reads, metrics)


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
                spread([one.tokens_per_cpu_second for one in mine]).text(),
                spread(ratios).text(2),
                spread([one.engine_ns_per_token for one in mine]).text(1, 1000),
                spread([one.load_ns_per_token for one in mine]).text(1, 1000),
                f"{spread([one.tokens_per_write for one in mine]).median:.2f}",
                spread([one.metrics_ms for one in mine]).text() if server == "outboard" else "",
            ]
        )
    columns = ["server", "tokens/s", "API us/token", "tokens per CPU-second", "of plain", "engine us/token"]
    columns += ["load us/token", "tokens/read", "/metrics ms"]
    title = f"{job.streams} streams over HTTP, a step every {job.step_ms:g} ms, median (least - most) of {reps}"
    show(title, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description="Streams over HTTP, no model.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--json", metavar="FILE", help="write every measurement here")
    args = parser.parse_args()
    job = Job(args.streams, args.step_ms, args.seconds)
    samples = [measure(server, job) for _ in range(args.reps) for server in args.servers]
    report(samples, job, args.reps)
    if args.json:
        write_json(args.json, msgspec.to_builtins(samples))


if __name__ == "__main__":
    main()
