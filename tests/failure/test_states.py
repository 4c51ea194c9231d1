"""The states of an engine core are told truthfully, to all, and waiting for one ends."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from outboard import (
    LLM,
    AsyncLLM,
    AsyncMPClient,
    EngineConfig,
    EngineDeadError,
    EngineState,
    FaultConfig,
    RestartPolicy,
    SamplingParams,
    launch_engines,
)
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")

PARAMS = SamplingParams(max_tokens=1_000_000, output_kind="delta", detokenize=False)


@pytest.mark.parametrize("end", ["death", "shutdown"])
def test_waiting_for_a_state_ends_with_the_client(run: Run, end: str) -> None:
    async def main() -> None:
        client = await AsyncMPClient.launch("echo")
        waiting = asyncio.create_task(client.wait_for_state(EngineState.RESTARTING))
        await asyncio.sleep(0)
        if end == "death":
            os.kill(client.core_engines[0].pid, signal.SIGKILL)
        else:
            await asyncio.to_thread(client.shutdown)
        async with asyncio.timeout(5):
            with pytest.raises(EngineDeadError):
                await waiting
        await asyncio.to_thread(client.shutdown)

    run(main())


def test_who_is_told_of_a_death_finds_it_unhealthy(run: Run) -> None:
    async def main() -> None:
        client = await AsyncMPClient.launch("echo")
        seen: list[BaseException | None] = []

        def look(status: object) -> None:
            try:
                client.check_health()
                seen.append(None)
            except EngineDeadError as error:
                seen.append(error)

        client.subscribe(look)
        os.kill(client.core_engines[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await client.wait_for_state(EngineState.RESTARTING)
        assert seen and all(isinstance(one, EngineDeadError) for one in seen)
        await asyncio.to_thread(client.shutdown)

    run(main())


def test_a_stall_is_over_when_who_reported_it_has_gone(run: Run) -> None:
    """The engine core goes on later; who is left never waited, and must not be told of a stall for ever."""

    async def main() -> None:
        config = EngineConfig(
            engine="mock", options={"step_ms": 1.0}, faults=FaultConfig(stall_timeout=0.4, shutdown_timeout=5.0)
        )
        group = await asyncio.to_thread(launch_engines, config)
        try:
            async with AsyncLLM(addresses=group.addresses, client_index=0) as stays:
                async with AsyncLLM(addresses=group.addresses, client_index=1) as goes:
                    stream = goes.generate([1], PARAMS)
                    await anext(stream)
                    pid = goes.client.core_engines[0].pid
                    os.kill(pid, signal.SIGSTOP)
                    async with asyncio.timeout(5):
                        await stays.wait_for_state(EngineState.STALLED)
                    await stream.aclose()
                async with asyncio.timeout(5):
                    await stays.wait_for_state(EngineState.READY)
                os.kill(pid, signal.SIGCONT)
                await stays.check_health()
        finally:
            await asyncio.to_thread(group.shutdown)

    run(main())


def test_offline_prompts_survive_a_restart_but_for_those_that_ran() -> None:
    config = EngineConfig(
        engine="outboard.testing:FaultyEngine",
        options={"die_in": "step", "way": "_exit", "at_step": 30, "max_num_seqs": 1},
        faults=FaultConfig(restart=RestartPolicy.on_failure(20, backoff=0.01), in_flight="resubmit", max_resubmits=20),
    )
    with LLM(config) as llm:
        outputs = llm.generate([[1]] * 4, SamplingParams(max_tokens=10), use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert set(reasons) <= {"length", "error"} and "length" in reasons
    for output in outputs:
        if output.outputs[0].finish_reason == "error":
            assert "exit code 7" in (output.outputs[0].error or "")


def test_a_drain_tells_that_a_restart_ended_a_request(run: Run) -> None:
    async def main() -> None:
        config = EngineConfig(
            engine="mock",
            options={"step_ms": 2.0},
            faults=FaultConfig(restart=RestartPolicy.on_failure(backoff=0.01)),
        )
        async with AsyncLLM(config) as llm:
            stream = llm.generate([1], PARAMS)
            await anext(stream)
            draining = asyncio.create_task(llm.drain(10))
            await asyncio.sleep(0.05)
            os.kill(llm.client.core_engines[0].pid, signal.SIGKILL)
            assert await draining is False

    run(main())
