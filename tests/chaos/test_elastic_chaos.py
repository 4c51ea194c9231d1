"""Schedules of scales, faults and load, drawn from seeds: whatever happens, each stream has exactly its tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from random import Random

import pytest

from outboard import (
    AsyncLLM,
    EngineConfig,
    EngineState,
    FaultConfig,
    ParallelConfig,
    RestartPolicy,
    SamplingParams,
    ScaleError,
    launch_engines,
)

pytestmark = pytest.mark.usefixtures("nothing_left")

ALPHABET = [97 + i % 26 for i in range(1000)]
MOST = 4
# What may come between, or in the middle of, two scales.
STRIKES = ("kill a rank", "stop a rank for a moment", "cancel the scale", "scale once more", "none", "none")


@dataclass
class Tally:
    """What a schedule did."""

    streams: int = 0
    scales: int = 0
    taken_back: int = 0
    kills: int = 0


class Schedule:
    """One schedule of one seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._over = False
        self._size = self._random.randint(1, 3)
        self.tally = Tally()

    async def run(self) -> Tally:
        random = self._random
        front_ends = random.randint(1, 3)
        config = EngineConfig(
            engine=random.choice(["mock", "lockstep_mock"]),
            options={"step_ms": random.choice([0.0, 1.0, 4.0])},
            parallel=ParallelConfig(
                data_parallel_size=self._size, max_size=MOST, client_count=front_ends, dp_sync_interval=4
            ),
            faults=FaultConfig(
                restart=RestartPolicy.on_failure(1000, backoff=0.02),
                in_flight="resume",
                max_resubmits=1000,
                shutdown_timeout=5.0,
            ),
        )
        group = await asyncio.to_thread(launch_engines, config)
        llms = [AsyncLLM(addresses=group.addresses, client_index=index) for index in range(front_ends)]
        try:
            for llm in llms:
                await llm.start()
            streams = [
                asyncio.create_task(self._stream(llm, Random(random.random())))
                for llm in llms
                for _ in range(random.randint(2, 8))
            ]
            for _ in range(random.randint(2, 4)):
                await self._strike_and_scale(random.choice(llms))
            await self._settle(llms)
            self._over = True
            await asyncio.gather(*streams)
        finally:
            for llm in llms:
                await llm.shutdown()
            await asyncio.to_thread(group.shutdown)
        return self.tally

    async def _stream(self, llm: AsyncLLM, random: Random) -> None:
        while not self._over:
            count = random.choice([1, 5, 30, 120])
            got: list[int] = []
            params = SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)
            async for output in llm.generate([1], params):
                got += output.outputs[0].token_ids
            assert got == ALPHABET[:count]
            self.tally.streams += 1

    async def _strike_and_scale(self, llm: AsyncLLM) -> None:
        random = self._random
        scale = asyncio.create_task(
            llm.scale_elastic_ep(
                random.randint(1, MOST),
                timeout=random.choice([1.0, 20.0]),
                drain_timeout=random.choice([0.0, 0.1, 20.0]),
            )
        )
        await asyncio.sleep(random.choice([0.0, 0.01, 0.1, 0.3, 0.6]))
        match random.choice(STRIKES):
            case "kill a rank":
                self._kill(llm)
            case "stop a rank for a moment":
                await self._stop_for_a_moment(llm)
            case "cancel the scale":
                scale.cancel()
            case "scale once more":
                try:
                    await llm.scale_elastic_ep(random.randint(1, MOST), timeout=20)
                except ScaleError:
                    self.tally.taken_back += 1
        await asyncio.wait([scale])
        if scale.cancelled() or isinstance(scale.exception(), ScaleError):
            self.tally.taken_back += 1
        else:
            await scale
            self.tally.scales += 1
        await asyncio.sleep(random.choice([0.0, 0.1]))

    def _kill(self, llm: AsyncLLM) -> None:
        engine = self._random.choice(llm.client.core_engines)
        try:
            os.kill(engine.pid, signal.SIGKILL)
            self.tally.kills += 1
        except ProcessLookupError:
            pass

    async def _stop_for_a_moment(self, llm: AsyncLLM) -> None:
        pid = self._random.choice(llm.client.core_engines).pid
        try:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass

    async def _settle(self, llms: list[AsyncLLM]) -> None:
        """All front ends agree on a size, and a fresh scale works."""
        for size in (2, 3):
            async with asyncio.timeout(40):
                while True:
                    try:
                        await llms[0].scale_elastic_ep(size, timeout=20)
                        break
                    except ScaleError:  # one that was cancelled is still on its way
                        await asyncio.sleep(0.02)
                while any(llm.data_parallel_size != size for llm in llms):
                    await asyncio.sleep(0.01)
                for llm in llms:
                    for rank in range(size):
                        await llm.wait_for_state(EngineState.READY, rank=rank)


async def survive(seed: int) -> Tally:
    """One schedule, within a bound."""
    async with asyncio.timeout(100):
        return await Schedule(seed).run()


@pytest.mark.parametrize("seed", range(6))
def test_scales_and_faults(seed: int) -> None:
    tally = asyncio.run(survive(seed))
    assert tally.streams


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_schedules_of_scales_and_faults(capsys: pytest.CaptureFixture[str]) -> None:
    total = Tally()
    for seed in range(100):
        tally = asyncio.run(survive(seed))
        for name in vars(total):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
    with capsys.disabled():
        print(f"\n100 schedules: {total}")
    assert total.scales and total.taken_back and total.kills
