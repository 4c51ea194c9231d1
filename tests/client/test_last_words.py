"""The end of an engine core as a user sees it: all that it had said comes first, and then nothing is left of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from faulty import DyingEngine
from outboard import (
    AsyncLLM,
    AsyncMPClient,
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    SamplingParams,
)
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")

STEPS = 1000
# What the mock engine says, one token a step.
TOKENS = [97 + step % 26 for step in range(STEPS)]
# It says a thousand things, then its step raises.
CONFIG = EngineConfig(engine=DyingEngine, options={"how": "exception", "step": STEPS + 1})


def block_until_it_has_ended(pid: int) -> None:
    """Holds up the event loop on purpose: then all that the engine core said waits, and its death too."""
    deadline = time.monotonic() + 20
    try:
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    except psutil.NoSuchProcess:
        pass


def pid_of(client: AsyncMPClient) -> int:
    pid = client.core_engines[0].pid
    assert pid is not None
    return pid


def endless(name: str = "r") -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=2**31, detokenize=False)
    )


def test_a_client_that_is_behind_gets_all_tokens_before_the_error(run: Run) -> None:
    async def main() -> None:
        client = await AsyncMPClient.launch(CONFIG)
        try:
            await client.add_request_async(endless())
            tokens: list[int] = []
            block_until_it_has_ended(pid_of(client))
            with pytest.raises(EngineDeadError, match="boom"):
                while True:
                    tokens += (await asyncio.wait_for(client.get_output_async(), 5)).tokens
            assert tokens == TOKENS
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())


def test_a_stream_that_is_behind_gets_all_tokens_before_the_error(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM(CONFIG) as llm:
            params = SamplingParams(max_tokens=2**31, output_kind="delta", detokenize=False)
            stream = llm.generate([1], params)
            tokens = list((await anext(stream)).outputs[0].token_ids)
            block_until_it_has_ended(pid_of(llm.client))
            with pytest.raises(EngineDeadError, match="boom"):
                async for output in stream:
                    tokens += output.outputs[0].token_ids
            assert tokens == TOKENS

    run(main())


def a_sink_raises(client: AsyncMPClient) -> None:
    def sink(message: EngineCoreOutputs | EngineDeadError) -> None:
        raise LookupError("the sink's own")

    client.set_output_sink(sink)


def reading_is_cancelled(client: AsyncMPClient) -> None:
    assert client.output_queue_task is not None
    client.output_queue_task.cancel()


@pytest.mark.parametrize("give_up", [a_sink_raises, reading_is_cancelled])
def test_an_engine_core_that_is_given_up_is_killed_without_a_shutdown(
    run: Run, give_up: Callable[[AsyncMPClient], Any]
) -> None:
    """Nobody reads what it says any more: it must not go on working for nobody."""

    async def main() -> None:
        client = await AsyncMPClient.launch(EngineConfig(engine="mock", options={"step_ms": 1.0}))
        try:
            await client.add_request_async(endless())
            await client.get_output_async()
            pid = pid_of(client)
            give_up(client)
            async with asyncio.timeout(5):
                while psutil.pid_exists(pid):
                    await asyncio.sleep(0.005)
            with pytest.raises(EngineDeadError):
                await client.add_request_async(endless("late"))
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())
