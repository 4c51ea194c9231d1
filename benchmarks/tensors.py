"""Large arrays each way: GB/s, CPU time of the client, and by how much either side grows.

Three ways take turns in one run, so that whatever else the machine does meets them alike:

    memcpy     a copy of the same size inside one process, into memory that is there already
    outboard   `AsyncMPClient`: a request with the array as its input, an output with the array as its result
    copying    `send` and `recv` of plain ZeroMQ, `benchmarks.baselines.copying`

A transfer is over when the receiver has read a byte of each page. Growth is the peak of the resident memory during
three transfers in processes that have made none before, less what they had, in multiples of the array.

    python -m benchmarks.tensors [--mib 64] [--count 10] [--reps 5] [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.baselines.copying import CopyingClient
from benchmarks.measure import show, spread, write_json
from benchmarks.plots import add_outputs, bars
from outboard import AsyncMPClient, EngineConfig, EngineCore, EngineCoreRequest, OutputBatch

Array = np.ndarray[Any, Any]
Transfer = Callable[[], Awaitable[None]]

WARM_UP = 3


class Sample(msgspec.Struct, frozen=True):
    """The mean over the transfers of one repetition."""

    way: str
    gb_per_second: float
    client_cpu_ms: float


class Growth(msgspec.Struct, frozen=True):
    """Peak growth of both sides, in multiples of the array."""

    way: str
    client: float
    engine: float


class ArrayEngine(EngineCore):
    """Answers a request without input by an array, one with an array by nothing."""

    def __init__(self, size: int) -> None:
        self._array = np.full(size, 1, np.uint8)
        self._requests: dict[str, Any] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        self._requests[request.request_id] = request.inputs

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self, outputs: OutputBatch) -> None:
        while self._requests:
            request_id, inputs = self._requests.popitem()
            if inputs is not None:
                touch(inputs)
            outputs.add(request_id, finish_reason="stop", result=self._array if inputs is None else None)


def touch(array: Array) -> None:
    """Reads a byte of each page."""
    if int(array[::4096].sum()) != -(-array.nbytes // 4096):
        raise RuntimeError("the array has other values")


async def transfer(client: AsyncMPClient, inputs: Array | None) -> None:
    """One request, with an array in it or in its output."""
    await client.add_request_async(EngineCoreRequest(request_id="r", inputs=inputs))
    while True:
        for output in (await client.get_output_async()).outputs:
            if output.result is not None:
                touch(output.result)
            if output.finish_reason is not None:
                return


def ways(client: AsyncMPClient, plain: CopyingClient, array: Array) -> dict[str, Transfer]:
    """All that is compared, by name."""
    target = np.zeros_like(array)

    async def memcpy() -> None:
        np.copyto(target, array)

    async def give() -> None:
        touch(plain.give())

    async def take() -> None:
        plain.take(array)

    return {
        "memcpy": memcpy,
        "outboard, outputs": lambda: transfer(client, None),
        "outboard, requests": lambda: transfer(client, array),
        "copying, outputs": give,
        "copying, requests": take,
    }


async def measure(size: int, count: int, reps: int) -> list[Sample]:
    """All ways in turn, `reps` times."""
    samples = []
    client = await AsyncMPClient.launch(EngineConfig(engine=ArrayEngine, options={"size": size}))
    try:
        with CopyingClient(size) as plain:
            for rep in range(-1, reps):
                for way, run in ways(client, plain, np.full(size, 1, np.uint8)).items():
                    for _ in range(WARM_UP):
                        await run()
                    wall, cpu = time.perf_counter(), time.process_time()
                    for _ in range(count):
                        await run()
                    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                    if rep >= 0:
                        samples.append(Sample(way, size * count / wall / 1e9, cpu / count * 1e3))
    finally:
        await asyncio.to_thread(client.shutdown)
    return samples


class Peak:
    """How much the resident memory of a process has grown at most, bytes. Linux only."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        self._before = self._read("VmRSS")

    def growth(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, field: str) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


async def measure_growth(size: int) -> list[Growth]:
    """Each way but memcpy in processes of its own; the client's is this one, but what it uses is new."""
    array = np.full(size, 1, np.uint8)
    found = []
    for way in ("outboard, outputs", "outboard, requests", "copying, outputs", "copying, requests"):
        client = await AsyncMPClient.launch(EngineConfig(engine=ArrayEngine, options={"size": size}))
        with CopyingClient(size) as plain:
            run = ways(client, plain, array[:0])[way] if "requests" not in way else ways(client, plain, array)[way]
            mine = Peak(os.getpid())
            engine = Peak(client.core_engines[0].pid if way.startswith("outboard") else plain.pid)
            for _ in range(3):
                await run()
            found.append(Growth(way, mine.growth() / size, engine.growth() / size))
        await asyncio.to_thread(client.shutdown)
    return found


def report(samples: list[Sample], growths: list[Growth], heading: str) -> None:
    """Prints the table; shares are medians over the runs, each against the memcpy next to it."""
    growth = {one.way: one for one in growths}
    copies = [sample for sample in samples if sample.way == "memcpy"]
    rows = []
    for way in {sample.way: None for sample in samples}:
        mine = [sample for sample in samples if sample.way == way]
        row = [way]
        for field, digits in (("gb_per_second", 2), ("client_cpu_ms", 2)):
            values = [getattr(sample, field) for sample in mine]
            shares = [value / getattr(copy, field) for value, copy in zip(values, copies, strict=True)]
            row += [spread(values).text(digits), f"{spread(shares).median:.2f}"]
        row += [f"{growth[way].client:.2f}", f"{growth[way].engine:.2f}"] if way in growth else ["", ""]
        rows.append(row)
    columns = ["way", "GB/s", "of memcpy", "client CPU ms", "of memcpy", "client grows", "engine grows"]
    show(heading, columns, rows, "growth in multiples of the array")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensors", description="Large arrays each way.")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--count", type=int, default=10, help="transfers a repetition")
    parser.add_argument("--reps", type=int, default=5)
    add_outputs(parser)
    args = parser.parse_args()
    size = args.mib << 20
    try:
        growths = asyncio.run(measure_growth(size))
    except PermissionError as error:
        print(f"growth is not measured: {error}")
        growths = []
    samples = asyncio.run(measure(size, args.count, args.reps))
    report(samples, growths, f"{args.mib} MiB, median (least - most) of {args.reps} times {args.count}")
    if args.plot:
        names = list(dict.fromkeys(one.way for one in samples))
        rates = {way: [one.gb_per_second for one in samples if one.way == way] for way in names}
        costs = {way: [one.client_cpu_ms for one in samples if one.way == way] for way in names}
        bars(args.plot, {"GB/s": rates, "client CPU, ms": costs})
    if args.json:
        write_json(args.json, {"transfers": msgspec.to_builtins(samples), "growth": msgspec.to_builtins(growths)})


if __name__ == "__main__":
    main()
