"""What an open stream costs in memory: many at once, each of which has had a token and waits for more.

The bytes that Python's allocator gave out since the first stream was made, and the growth of the resident memory, both
over the number of streams. The streams' reading tasks are not among it: they end with the first token. The engine then
says nothing, and what a stream holds is what it holds between two tokens. Each measurement has a process of its own,
whose memory nothing was in before. The other tables say which lines made what a stream holds.

    python -m benchmarks.open_streams [--streams 10000] [--prompt 16] [--reps 3] [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec

import outboard
from benchmarks.measure import show, spread, write_json
from benchmarks.plots import add_outputs, bars
from outboard import AsyncLLM, EngineConfig, SamplingParams
from outboard.frontend.stream import RequestStream

ENGINE = "benchmarks.engines:OneToken"
KINDS = {False: "token ids alone", True: "with its text"}
# What is to hold, bytes a stream.
MOST = 3000
LINES = 24  # of the second table
BATCH = 100
BOUND = 120.0  # seconds


class Line(msgspec.Struct, frozen=True):
    """What one line made that is still there, a stream."""

    place: str
    bytes: float
    blocks: float


class Sample(msgspec.Struct, frozen=True):
    """Bytes a stream."""

    detokenize: bool
    allocated: float
    resident: float
    lines: list[Line]


def resident() -> int:
    """Bytes of this process that are in memory. Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def opened(llm: AsyncLLM, count: int, prompt: int, detokenize: bool) -> list[RequestStream]:
    """So many streams that have had a token each."""
    params = SamplingParams(max_tokens=1000, output_kind="delta", detokenize=detokenize)
    streams: list[RequestStream] = []
    async with asyncio.timeout(BOUND):
        while len(streams) < count:  # some at a time: the memory of their tasks is used again
            new = [llm.generate([97] * prompt, params) for _ in range(min(BATCH, count - len(streams)))]
            await asyncio.gather(*(stream.__anext__() for stream in new))
            streams += new
    return streams


async def measure(count: int, prompt: int, detokenize: bool) -> Sample:
    """Two rounds over one engine: the memory of the process, then what Python says of it."""
    async with AsyncLLM(EngineConfig(engine=ENGINE)) as llm:
        for stream in await opened(llm, 2 * BATCH, prompt, detokenize):  # what the first of all make stays
            await stream.aclose()
        gc.collect()
        before = resident()
        streams = await opened(llm, count, prompt, detokenize)
        gc.collect()
        grown = resident() - before
        for stream in streams:
            await stream.aclose()
        del streams, stream
        gc.collect()
        tracemalloc.start()
        streams = await opened(llm, count, prompt, detokenize)
        gc.collect()
        snapshot = tracemalloc.take_snapshot()
        tracemalloc.stop()
        for stream in streams:
            await stream.aclose()
    found = snapshot.statistics("lineno")
    lines = [Line(_place(one.traceback[0]), one.size / count, one.count / count) for one in found]
    return Sample(detokenize, sum(one.bytes for one in lines), grown / count, lines)


def measure_apart(count: int, prompt: int, detokenize: bool) -> Sample:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.open_streams", "--streams", str(count), "--prompt", str(prompt)]
    done = subprocess.run([*command, "--alone", KINDS[detokenize]], stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Sample)


def _place(frame: tracemalloc.Frame) -> str:
    for root in (Path(outboard.__file__).parent, Path(__file__).parents[1]):
        if frame.filename.startswith(f"{root}/"):
            return f"{Path(frame.filename).relative_to(root)}:{frame.lineno}"
    return f"{Path(frame.filename).name}:{frame.lineno}"


def report(samples: list[Sample], count: int, prompt: int, reps: int) -> None:
    """Prints what a stream takes, and where it goes."""
    rows = []
    for detokenize in dict.fromkeys(one.detokenize for one in samples):
        mine = [one for one in samples if one.detokenize == detokenize]
        row = [KINDS[detokenize]]
        row += [spread([one.allocated for one in mine]).text(), spread([one.resident for one in mine]).text()]
        rows.append([*row, f"{MOST:,}"])
    title = f"{count:,} open streams, prompts of {prompt} tokens, median (least - most) of {reps}"
    show(title, ["a stream", "allocated, bytes", "resident, bytes", "at most"], rows)
    for detokenize in dict.fromkeys(one.detokenize for one in samples):
        last = [one for one in samples if one.detokenize == detokenize][-1]
        top = last.lines[:LINES]
        rest = sum(one.bytes for one in last.lines[LINES:])
        rows = [[one.place, f"{one.bytes:,.0f}", f"{one.blocks:.2f}"] for one in top if one.bytes >= 1]
        rows.append(["all others", f"{rest:,.0f}", ""])
        show(f"Where the memory of a stream comes from, {KINDS[detokenize]}", ["line", "bytes", "blocks"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.open_streams", description="Memory of open streams.")
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--alone", choices=list(KINDS.values()), help="one measurement, here; prints its JSON")
    add_outputs(parser)
    args = parser.parse_args()
    if args.alone:
        sample = asyncio.run(measure(args.streams, args.prompt, args.alone == KINDS[True]))
        print(msgspec.json.encode(sample).decode())
        return
    samples = [measure_apart(args.streams, args.prompt, detokenize) for _ in range(args.reps) for detokenize in KINDS]
    report(samples, args.streams, args.prompt, args.reps)
    if args.plot:
        panels = {
            title: {
                name: [getattr(one, field) for one in samples if one.detokenize == key] for key, name in KINDS.items()
            }
            for title, field in (("allocated, bytes a stream", "allocated"), ("resident, bytes a stream", "resident"))
        }
        bars(args.plot, panels, dict.fromkeys(KINDS.values(), MOST))
    if args.json:
        write_json(args.json, msgspec.to_builtins(samples))


if __name__ == "__main__":
    main()
