"""What the benchmarks share: CPU time of processes, medians, tables."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

__all__ = [
    "SHOWN",
    "Fifo",
    "Shown",
    "Span",
    "Spread",
    "cpu_ns",
    "descendants",
    "kernel_ns",
    "settled",
    "show",
    "spread",
    "write_json",
]


class Spread(msgspec.Struct, frozen=True):
    """Median, least and greatest of several runs."""

    median: float
    least: float
    most: float

    def text(self, digits: int = 0, scale: float = 1.0) -> str:
        """ "median (least - most)"."""
        median, least, most = (f"{value / scale:,.{digits}f}" for value in (self.median, self.least, self.most))
        return f"{median} ({least} - {most})"


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of these values."""
    return Spread(statistics.median(values), min(values), max(values))


def cpu_ns(pid: int) -> int:
    """CPU time that all live threads of a process have used, nanoseconds. Linux only.

    From the kernel's scheduler statistics where there are any, else from its clock ticks (10 ms each).
    """
    times = [int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    if times:
        return sum(times)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def kernel_ns(pid: int) -> int:
    """CPU time that a process has spent in the kernel, nanoseconds, by clock ticks of 10 ms. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[12]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> dict[int, str]:
    """Pids and command lines of all processes below this one. Linux only."""
    found: dict[int, str] = {}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip()
            found |= descendants(child)
    return found


async def settled(pid: int, quiet: float = 0.2, timeout: float = 30.0) -> None:
    """Returns when a process has used next to no CPU for `quiet` seconds."""
    deadline = time.monotonic() + timeout
    before = cpu_ns(pid)
    while time.monotonic() < deadline:
        await asyncio.sleep(quiet)
        now = cpu_ns(pid)
        if now - before < quiet * 1e9 * 0.02:
            return
        before = now
    raise TimeoutError(f"process {pid} was still busy after {timeout} s")


class Span:
    """Wall time, CPU time of this process and CPU time of an engine, between entering and leaving."""

    def __init__(self, engine_pid: int) -> None:
        self._engine_pid = engine_pid
        self.wall = 0.0
        self.client_cpu_ns = 0
        self.engine_cpu_ns = 0

    def __enter__(self) -> Span:
        gc.collect()
        self.engine_cpu_ns = -cpu_ns(self._engine_pid)
        self.client_cpu_ns = -time.process_time_ns()
        self.wall = -time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter()
        self.client_cpu_ns += time.process_time_ns()
        self.engine_cpu_ns += cpu_ns(self._engine_pid)


class Fifo:
    """A named pipe by which a reader acknowledges steps to an engine, one byte each."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    @classmethod
    @contextmanager
    def temporary(cls) -> Iterator[Fifo]:
        with tempfile.TemporaryDirectory() as directory:
            fifo = cls(Path(directory) / "acks")
            try:
                yield fifo
            finally:
                os.close(fifo.fd)


class Shown(msgspec.Struct, frozen=True):
    """A table that was printed."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""


SHOWN: list[Shown] = []  # by this program; `write_json` has them, and `benchmarks.report` makes a document of them


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Prints a table: the first column is text, the others are numbers."""
    SHOWN.append(Shown(title, list(columns), [list(row) for row in rows], caption))
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def write_json(path: str, results: Any) -> None:
    """Writes results with the facts of the machine that they depend on, and the tables that were printed."""
    machine = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
    }
    Path(path).write_text(
        json.dumps({"machine": machine, "tables": msgspec.to_builtins(SHOWN), "results": results}, indent=1) + "\n"
    )
