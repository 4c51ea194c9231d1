"""Many streams at once over an engine that costs nothing: tokens a second and CPU time a token.

Five designs take turns in one run, so that whatever else the machine does meets them alike:

    streams   `AsyncLLM.generate`, one reader a stream
    columns   `AsyncMPClient.get_output_async`, one reader of whole messages
    plain     the plain design of `benchmarks.baselines.plain`, one reader a stream
    bare      the floor, `benchmarks.baselines.bare`: a list of tokens a step, and one callback that counts them
    woken     the floor with one reader a stream: that callback wakes a task for each

in three modes: free (the engine is at most 64 steps ahead of the readers), windowed (2 steps), paced (a step every
5 ms). All requests are in before the engine takes its first step; what is measured begins there and ends with the last
token.

    python -m benchmarks.stream [--streams 256] [--steps 400] [--reps 5] [--loop default|uvloop|both]
                                [--outputs unix zmq] [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, get_args

import msgspec

from benchmarks.baselines.bare import BareClient
from benchmarks.baselines.plain import PlainClient
from benchmarks.measure import Fifo, Span, settled, show, spread, write_json
from benchmarks.plots import add_outputs, bars
from outboard import AsyncLLM, AsyncMPClient, EngineConfig, EngineCoreRequest, SamplingParams, TransportConfig
from outboard.config import Sockets
from outboard.frontend.outputs import RequestOutput

WINDOWS = {"free": 64, "windowed": 2, "paced": 0}
PACE_MS = 5.0
PROMPT = [1, 2, 3]


class Job(msgspec.Struct, frozen=True):
    """One measurement: so many streams of so many tokens. `check` looks at every token, which costs time."""

    mode: str
    outputs: Sockets
    streams: int
    steps: int
    check: bool


class Sample(msgspec.Struct, frozen=True):
    """What one measurement gave. `design` names the outputs' transport too, where there is a choice."""

    design: str
    mode: str
    loop: str
    tokens_per_second: float
    client_ns_per_token: float
    engine_ns_per_token: float
    wakes_per_token: float


class Meter:
    """Counts what readers take, and acknowledges each step once all streams have taken that many tokens."""

    def __init__(self, job: Job, fifo: Fifo) -> None:
        self.tokens = 0
        self.wakes = 0
        self.acknowledges = WINDOWS[job.mode] > 0
        self._streams = job.streams
        self._fd = fifo.fd
        self._step_end = job.streams

    def took(self, tokens: int) -> None:
        """These tokens were taken just now; to be told at once only where the engine waits for it."""
        self.tokens += tokens
        if not self.acknowledges:
            return
        if self.tokens >= self._step_end:
            steps = 1 + (self.tokens - self._step_end) // self._streams
            self._step_end += steps * self._streams
            os.write(self._fd, b"\0" * steps)


Outcome = tuple[Span, Meter]


async def read_streams(
    job: Job, fifo: Fifo, pid: int, generate: Callable[[int], AsyncIterator[RequestOutput]]
) -> Outcome:
    """Reads all streams, a task each. One more request, of one token, lets the engine start."""
    meter = Meter(job, fifo)

    async def read() -> None:
        acknowledges = meter.acknowledges
        count = 0
        wakes = 0
        async for output in generate(job.steps):
            tokens = output.outputs[0].token_ids
            if job.check and list(tokens) != [97 + i % 26 for i in range(count, count + len(tokens))]:
                raise RuntimeError(f"wrong tokens after {count}: {tokens}")
            count += len(tokens)
            wakes += 1
            if acknowledges:
                meter.took(len(tokens))
        meter.wakes += wakes
        if count != job.steps:
            raise RuntimeError(f"a stream ended after {count} of {job.steps} tokens")

    tasks = [asyncio.create_task(read()) for _ in range(job.streams)]
    await settled(pid)
    with Span(pid) as span:
        async for _ in generate(1):
            pass
        await asyncio.gather(*tasks)
    return span, meter


def options(job: Job, fifo: Fifo) -> dict[str, Any]:
    """The engine's options, the same for `mock` and for the plain engine."""
    window = WINDOWS[job.mode]
    pace = {"step_ms": PACE_MS} if job.mode == "paced" else {"window": window, "ack_path": fifo.path}
    return {"start_after": job.streams + 1, **pace}


def config(job: Job, fifo: Fifo) -> EngineConfig:
    """Of Outboard's own engine core."""
    return EngineConfig(engine="mock", options=options(job, fifo), transport=TransportConfig(sockets=job.outputs))


async def run_streams(job: Job, fifo: Fifo) -> Outcome:
    """`AsyncLLM.generate`."""

    def generate(max_tokens: int) -> AsyncIterator[RequestOutput]:
        return llm.generate(PROMPT, SamplingParams(max_tokens=max_tokens, output_kind="delta", detokenize=False))

    async with AsyncLLM(config(job, fifo)) as llm:
        return await read_streams(job, fifo, engine_pid(llm.client), generate)


async def run_plain(job: Job, fifo: Fifo) -> Outcome:
    """The plain design."""
    async with PlainClient(**options(job, fifo)) as client:
        return await read_streams(job, fifo, client.pid, lambda max_tokens: client.generate(PROMPT, max_tokens))


async def run_bare(job: Job, fifo: Fifo) -> Outcome:
    """The floor."""
    engine = options(job, fifo)
    del engine["start_after"]
    meter = Meter(job, fifo)
    with BareClient(job.streams, job.steps, **engine) as client:
        await settled(client.pid)
        with Span(client.pid) as span:
            await client.read(meter.took)
    return span, meter


async def run_woken(job: Job, fifo: Fifo) -> Outcome:
    """The floor with a task a stream, which waits for a bare future."""
    engine = options(job, fifo)
    del engine["start_after"]
    meter = Meter(job, fifo)
    loop = asyncio.get_running_loop()
    arrived = 0  # tokens of each stream: all get theirs together
    waiters: dict[int, asyncio.Future[None]] = {}

    def took(tokens: int) -> None:
        nonlocal arrived
        arrived += tokens // job.streams
        for waiter in waiters.values():
            waiter.set_result(None)
        waiters.clear()

    async def read(number: int) -> None:
        count = 0
        while count < job.steps:
            if count == arrived:
                waiter = waiters[number] = loop.create_future()
                await waiter
            meter.took(arrived - count)
            meter.wakes += 1
            count = arrived

    tasks = [asyncio.create_task(read(number)) for number in range(job.streams)]
    with BareClient(job.streams, job.steps, **engine) as client:
        await settled(client.pid)
        with Span(client.pid) as span:
            await client.read(took)
            await asyncio.gather(*tasks)
    return span, meter


async def run_columns(job: Job, fifo: Fifo) -> Outcome:
    """`AsyncMPClient.get_output_async`, columns as they come."""

    async def add(name: str, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, detokenize=False)
        await client.add_request_async(
            EngineCoreRequest(request_id=name, prompt_token_ids=PROMPT, sampling_params=params)
        )

    meter = Meter(job, fifo)
    client = await AsyncMPClient.launch(config(job, fifo))
    try:
        for i in range(job.streams):
            await add(f"stream-{i}", job.steps)
        pid = engine_pid(client)
        await settled(pid)
        with Span(pid) as span:
            await add("start", 1)
            while meter.tokens <= job.streams * job.steps:
                message = await client.get_output_async()
                meter.wakes += 1
                meter.took(len(message.tokens))
    finally:
        client.shutdown()
    return span, meter


def engine_pid(client: AsyncMPClient) -> int:
    """Process id of the client's one engine core."""
    pid = client.core_engines[0].pid
    if pid is None:
        raise RuntimeError("the engine core has not started")
    return pid


DESIGNS: dict[str, Callable[[Job, Fifo], Awaitable[Outcome]]] = {
    "plain": run_plain,
    "streams": run_streams,
    "columns": run_columns,
    "bare": run_bare,
    "woken": run_woken,
}
# Those that are not Outboard's, and know no choice of sockets.
BASELINES = ("plain", "bare", "woken")


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes event loops of this kind; None: asyncio's own."""
    if name == "default":
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def measure(design: str, job: Job, loop: str) -> Sample:
    """One measurement with an engine and a loop of its own."""
    with Fifo.temporary() as fifo, asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        span, meter = runner.run(asyncio.wait_for(DESIGNS[design](job, fifo), 120))
    tokens = job.streams * job.steps
    return Sample(
        design if design in BASELINES else f"{design}, {job.outputs}",
        job.mode,
        loop,
        tokens / span.wall,
        span.client_cpu_ns / tokens,
        span.engine_cpu_ns / tokens,
        meter.wakes / tokens,
    )


def report(samples: list[Sample], heading: str) -> None:
    """Prints one mode's table.

    Beside each figure stands its share of the plain design's: the median over the runs, each against that next to it.
    """
    rows = []
    for loop, design in {(s.loop, s.design): None for s in samples}:
        mine = [s for s in samples if (s.loop, s.design) == (loop, design)]
        plain = [s for s in samples if (s.loop, s.design) == (loop, "plain")]
        row = [f"{design}, {loop}"]
        for field, scale in (
            ("tokens_per_second", 1000.0),
            ("client_ns_per_token", 1.0),
            ("engine_ns_per_token", 1.0),
        ):
            values = [getattr(s, field) for s in mine]
            row.append(spread(values).text(scale=scale))
            ratios = [value / getattr(s, field) for s, value in zip(plain, values, strict=False)]
            row.append(f"{spread(ratios).median:.2f}" if ratios else "")
        row.append(f"{spread([s.wakes_per_token for s in mine]).median:.3f}")
        rows.append(row)
    columns = ["design, loop"]
    for title in ("k tokens/s", "client CPU ns/token", "engine CPU ns/token"):
        columns += [title, "of plain"]
    columns.append("wakes/token")
    show(heading, columns, rows)


def plot(path: str, samples: list[Sample]) -> None:
    """Draws what a token costs the client, a panel for each mode."""
    panels: dict[str, dict[str, list[float]]] = {}
    for one in samples:
        panel = panels.setdefault(f"{one.mode}: client CPU, ns a token", {})
        panel.setdefault(f"{one.design}, {one.loop}", []).append(one.client_ns_per_token)
    bars(path, panels)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stream", description="Many streams, no model.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400, help="tokens a stream; paced: 120 at most")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--loop", choices=("default", "uvloop", "both"), default="default")
    parser.add_argument("--modes", nargs="+", choices=list(WINDOWS), default=list(WINDOWS))
    parser.add_argument("--designs", nargs="+", choices=list(DESIGNS), default=list(DESIGNS))
    parser.add_argument(
        "--outputs", nargs="+", choices=get_args(Sockets), default=[TransportConfig().sockets], help="several: in turn"
    )
    parser.add_argument("--check", action="store_true", help="look at every token; the times then mean little")
    add_outputs(parser)
    args = parser.parse_args()
    loops = ("default", "uvloop") if args.loop == "both" else (args.loop,)
    samples = []
    turns = [
        (design, outputs) for design in args.designs for outputs in args.outputs[: 1 if design in BASELINES else None]
    ]
    for mode in args.modes:
        steps = min(args.steps, 120) if mode == "paced" else args.steps
        here = [
            measure(design, Job(mode, outputs, args.streams, steps, args.check), loop)
            for _ in range(args.reps)
            for loop in loops
            for design, outputs in turns
        ]
        report(here, f"{mode}: {args.streams} streams of {steps} tokens, median (least - most) of {args.reps}")
        samples += here
    if args.plot:
        plot(args.plot, samples)
    if args.json:
        write_json(args.json, msgspec.to_builtins(samples))


if __name__ == "__main__":
    main()
