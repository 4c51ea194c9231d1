"""Requests with long prompts on their way to the engine core: how many a second, and CPU time of both sides.

The engine takes none of them on while they arrive, so that what is measured is the way there: the client's work, the
socket, the child's input thread and its busy loop. Beside it stands the floor: packing such a prompt, and unpacking it.

    python -m benchmarks.requests [--count 2000] [--prompts 10 100 1000 10000] [--reps 5]
                                  [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from array import array

import msgspec

from benchmarks.measure import show, spread, write_json
from benchmarks.peers.sides.outboard_side import ENGINE
from benchmarks.plots import add_outputs, lines
from outboard import AsyncMPClient, EngineConfig, EngineCoreRequest, SamplingParams
from outboard.protocol.token_ids import pack_token_ids


class Sample(msgspec.Struct, frozen=True):
    """What one measurement gave; times in us a request."""

    prompt: int
    per_second: float
    client_us: float
    engine_us: float
    floor_us: float


async def measure(client: AsyncMPClient, count: int, prompt: int, turn: int) -> Sample:
    """So many requests, which are then aborted."""
    await client.call_utility_async("set_up", count + 1, 0.0)
    tokens = [3 + i % 250 for i in range(prompt)]
    params = SamplingParams(max_tokens=1)
    requests = [
        EngineCoreRequest(request_id=f"{turn}-{prompt}-{i}", prompt_token_ids=tokens, sampling_params=params)
        for i in range(count)
    ]
    before = await client.call_utility_async("state")
    cpu, began = time.process_time(), time.perf_counter()
    for request in requests:
        await client.add_request_async(request)
    sent = time.process_time() - cpu
    after = before
    while after["added"] - before["added"] < count:
        await asyncio.sleep(0.001)
        after = await client.call_utility_async("state")
    wall = time.perf_counter() - began
    await client.abort_requests_async([request.request_id for request in requests])
    engine = after["cpu"] - before["cpu"]
    return Sample(prompt, count / wall, sent / count * 1e6, engine / count * 1e6, floor_us(tokens, count))


def floor_us(tokens: list[int], count: int) -> float:
    """Packing such a prompt as int32, and unpacking it."""
    began = time.process_time()
    for _ in range(count):
        unpacked = array("i")
        unpacked.frombytes(pack_token_ids(tokens).tobytes())
    return (time.process_time() - began) / count * 1e6


async def run(count: int, prompts: list[int], reps: int) -> list[Sample]:
    """All measurements, in turn, over one engine."""
    client = await AsyncMPClient.launch(EngineConfig(engine=ENGINE))
    try:
        await measure(client, count, prompts[0], -1)  # warms up
        return [await measure(client, count, prompt, turn) for turn in range(reps) for prompt in prompts]
    finally:
        await asyncio.to_thread(client.shutdown)


def report(samples: list[Sample], count: int, reps: int) -> None:
    """Prints the table."""
    rows = []
    for prompt in dict.fromkeys(one.prompt for one in samples):
        mine = [one for one in samples if one.prompt == prompt]
        row = [f"{prompt:,}"]
        for field in ("per_second", "client_us", "engine_us", "floor_us"):
            row.append(spread([getattr(one, field) for one in mine]).text(0 if field == "per_second" else 1))
        rows.append(row)
    columns = ["tokens of the prompt", "requests/s", "client us", "engine us", "floor us"]
    show(f"{count} requests at once, median (least - most) of {reps}", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.requests", description="Requests on their way.")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--prompts", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--reps", type=int, default=5)
    add_outputs(parser)
    args = parser.parse_args()
    samples = asyncio.run(run(args.count, args.prompts, args.reps))
    report(samples, args.count, args.reps)
    if args.plot:
        found = {
            title: {prompt: [getattr(one, field) for one in samples if one.prompt == prompt] for prompt in args.prompts}
            for title, field in (("client", "client_us"), ("engine", "engine_us"), ("floor", "floor_us"))
        }
        lines(args.plot, {"tokens of the prompt": ("CPU us a request", found)})
    if args.json:
        write_json(args.json, msgspec.to_builtins(samples))


if __name__ == "__main__":
    main()
