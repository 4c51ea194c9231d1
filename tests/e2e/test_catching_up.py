"""A front end that is behind by millions of tokens catches up in small turns of its loop."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from outboard import AsyncLLM, AsyncMPClient, EngineConfig, EngineCoreRequest, SamplingParams
from outboard.protocol.messages import EngineCoreOutputs
from outboard.transport.reader import MAX_TOKENS
from support import Run

# What it takes to measure coverage is several times what these take. Other tests of streams go the same ways.
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.no_cover]

STREAMS = 256


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)


def alphabet(start: int, count: int) -> list[int]:
    return [97 + i % 26 for i in range(start, start + count)]


def block(pid: int | None, bound: float = 30.0) -> None:
    """Blocks until the engine core has produced all and holds it."""
    engine = psutil.Process(pid)
    deadline = time.monotonic() + bound
    used, before = sum(engine.cpu_times()[:2]), -1.0
    while used - before > 0.03:
        assert time.monotonic() < deadline, "the engine core does not come to rest"
        time.sleep(0.2)
        used, before = sum(engine.cpu_times()[:2]), used


@pytest.mark.timeout(90)
def test_the_loop_turns_quickly_while_streams_catch_up() -> None:
    """In one piece it would take this loop some seconds."""
    count = 60_000

    async def main() -> float:
        async with AsyncLLM(EngineConfig(engine="mock", options={"start_after": STREAMS})) as llm:
            ended = False
            longest = 0.0

            async def read() -> int:
                got = 0
                async for output in llm.generate([1], params(count)):
                    tokens = output.outputs[0].token_ids
                    assert list(tokens) == alphabet(got, len(tokens))
                    got += len(tokens)
                return got

            async def tick() -> None:
                nonlocal longest
                while not ended:
                    before = time.monotonic()
                    await asyncio.sleep(0)
                    longest = max(longest, time.monotonic() - before)

            tasks = [asyncio.create_task(read()) for _ in range(STREAMS)]
            while llm.client.stats()["requests"] < STREAMS:
                await asyncio.sleep(0.001)
            block(llm.client.core_engines[0].pid)
            ticker = asyncio.create_task(tick())
            async with asyncio.timeout(60):
                assert await asyncio.gather(*tasks) == [count] * STREAMS
            ended = True
            await ticker
            return longest

    longest = asyncio.run(main())
    print(f"longest turn {longest * 1000:.0f} ms")
    assert longest < 1.0


@pytest.mark.parametrize("sink", [False, True], ids=["queue", "sink"])
def test_a_turn_of_the_loop_brings_a_bounded_number_of_tokens(run: Run, sink: bool) -> None:
    count = 5_000  # far more than the socket holds

    async def main() -> None:
        client = await AsyncMPClient.launch(EngineConfig(engine="mock", options={"start_after": STREAMS}))
        got: dict[str | None, list[int]] = {}
        ended: set[str | None] = set()
        taken = 0  # by this turn
        most = 0

        def take(message: EngineCoreOutputs) -> None:
            nonlocal taken
            taken += len(message.tokens)
            for output in message.outputs:
                assert output.request_id not in ended
                got.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    ended.add(output.request_id)

        async def read() -> None:
            while len(ended) < STREAMS:
                take(await client.get_output_async())

        try:
            for number in range(STREAMS):
                await client.add_request_async(
                    EngineCoreRequest(request_id=f"r{number}", prompt_token_ids=[1], sampling_params=params(count))
                )
            block(client.core_engines[0].pid)
            reader = None
            if sink:
                client.set_output_sink(take)  # type: ignore[arg-type]
            else:
                reader = asyncio.create_task(read())
            while len(ended) < STREAMS:
                taken = 0
                await asyncio.sleep(0)
                most = max(most, taken)
            if reader is not None:
                await reader
        finally:
            client.shutdown()
        assert list(got.values()) == [alphabet(0, count)] * STREAMS
        # A turn stops behind the message that brings it to the bound. Its reader may have the messages of two turns.
        assert most <= 4 * MAX_TOKENS

    run(main())
