"""Ranks that come and go while requests run, with real processes and real faults."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from outboard import (
    AsyncLLM,
    ConfigError,
    DPLBAsyncMPClient,
    EngineConfig,
    EngineCoreRequest,
    EngineGroup,
    EngineRemovedError,
    EngineState,
    FaultConfig,
    ParallelConfig,
    RestartPolicy,
    SamplingParams,
    ScaleError,
    ScaleInProgressError,
    ScaleProgress,
    ScaleRolledBackError,
    ScaleState,
    UnsupportedError,
    launch_engines,
)
from support import Run, children

pytestmark = pytest.mark.usefixtures("nothing_left")

ALPHABET = [97 + i % 26 for i in range(5000)]
BOTH = pytest.mark.parametrize("engine", ["mock", "lockstep_mock"])


def config(engine: str, size: int, *, in_flight: Any = "fail", restarts: int = 0, **more: Any) -> EngineConfig:
    options = more.pop("options", {"step_ms": 2.0})
    parallel = {"dp_sync_interval": 4, "max_size": 8, **more}
    return EngineConfig(
        engine=engine,
        options=options,
        parallel=ParallelConfig(data_parallel_size=size, **parallel),
        faults=FaultConfig(
            restart=RestartPolicy.on_failure(restarts, backoff=0.05),
            in_flight=in_flight,
            max_resubmits=20,
            shutdown_timeout=5.0,
        ),
    )


def dplb(llm: AsyncLLM) -> DPLBAsyncMPClient:
    assert isinstance(llm.client, DPLBAsyncMPClient)
    return llm.client


async def read(llm: AsyncLLM, count: int) -> list[int]:
    got: list[int] = []
    params = SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)
    async for output in llm.generate([1], params):
        got += output.outputs[0].token_ids
    return got


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.005)


class Load:
    """Streams that follow each other, on all of some front ends; each must have exactly its tokens."""

    def __init__(self, llms: list[AsyncLLM], streams: int = 20, tokens: int = 40) -> None:
        self.done = 0
        self._tokens = tokens
        self._over = False
        self._tasks = [asyncio.create_task(self._run(llm)) for llm in llms for _ in range(streams)]

    async def _run(self, llm: AsyncLLM) -> None:
        while not self._over:
            assert await read(llm, self._tokens) == ALPHABET[: self._tokens]
            self.done += 1

    async def flows(self, more: int = 30) -> None:
        """Waits until so many more streams have ended."""
        goal = self.done + more
        await until(lambda: self.done >= goal or any(task.done() for task in self._tasks))

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def load(*llms: AsyncLLM, **more: Any) -> AsyncIterator[Load]:
    running = Load(list(llms), **more)
    await running.flows()
    yield running
    await running.end()


@asynccontextmanager
async def front_ends(group: EngineGroup, count: int) -> AsyncIterator[list[AsyncLLM]]:
    llms = [AsyncLLM(addresses=group.addresses, client_index=index) for index in range(count)]
    try:
        for llm in llms:
            await llm.start()
        yield llms
    finally:
        for llm in llms:
            await llm.shutdown()


async def launch(what: EngineConfig) -> EngineGroup:
    return await asyncio.to_thread(launch_engines, what)


# --- no token is lost ------------------------------------------------------------------------------------------------


@BOTH
def test_up_down_and_up_under_the_load_of_three_front_ends(run: Run, engine: str) -> None:
    async def main() -> None:
        with await launch(config(engine, 2, client_count=3)) as group:
            async with front_ends(group, 3) as llms, load(*llms) as running:
                for size in (4, 1, 3):
                    states: list[ScaleState] = []
                    await llms[0].scale_elastic_ep(size, timeout=20, on_progress=lambda p, s=states: s.append(p.state))
                    assert list(dict.fromkeys(states)) == [
                        ScaleState.PREPARING,
                        ScaleState.READY,
                        ScaleState.COMMITTING,
                        *([ScaleState.DRAINING] if size == 1 else []),
                        ScaleState.DONE,
                    ]
                    await until(lambda size=size: all(llm.data_parallel_size == size for llm in llms))
                    assert group.data_parallel_size == size
                    assert [status.state for status in group.engines] == [EngineState.READY] * size
                    await running.flows(60)
                await until(lambda: all(min(dplb(llm).lb_engines.values()) > 0 for llm in llms))
            assert not any(llm.client.stats()["dropped"] for llm in llms)

    run(main())


@pytest.mark.openvino
@pytest.mark.xdist_group("openvino")
def test_a_real_model_goes_up_and_down(run: Run) -> None:
    pytest.importorskip("openvino_genai")

    async def main() -> None:
        what = config("openvino", 1, options={"max_num_seqs": 8}, max_size=2)
        async with AsyncLLM(what) as llm:
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, output_kind="final_only")

            async def ask() -> list[int]:
                outputs = [output async for output in llm.generate("The sea is", params)]
                return list(outputs[-1].outputs[0].token_ids)

            expected = await ask()
            assert len(expected) == 12
            for size in (2, 1):
                tasks = [asyncio.create_task(ask()) for _ in range(6)]
                await llm.scale_elastic_ep(size, timeout=30)
                tasks += [asyncio.create_task(ask()) for _ in range(6)]
                for got in await asyncio.gather(*tasks):
                    assert len(got) == 12
            assert len(children()) > 0

    run(main())


@BOTH
def test_a_rank_that_was_removed_is_gone_and_comes_again_as_another(run: Run, engine: str) -> None:
    async def main() -> None:
        async with AsyncLLM(config(engine, 1)) as llm:
            await llm.scale_elastic_ep(2, timeout=20)
            first = psutil.Process(llm.client.core_engines[1].pid)
            await llm.scale_elastic_ep(1)
            assert [one.rank for one in llm.client.core_engines] == [0]
            assert not first.is_running()
            await llm.scale_elastic_ep(2, timeout=20)
            await until(lambda: len(llm.client.core_engines) == 2)
            assert llm.client.core_engines[1].incarnation == 1
            assert await read(llm, 20) == ALPHABET[:20]
            assert await dplb(llm).call_utility_all_async("is_sleeping") == [False, False]

    run(main())


# --- what is left after the grace period -----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("in_flight", ["fail", "resume"])
def test_what_does_not_end_in_time_ends_retryably_or_moves(run: Run, engine: str, in_flight: str) -> None:
    async def main() -> None:
        async with AsyncLLM(config(engine, 2, in_flight=in_flight)) as llm:
            tasks = [asyncio.create_task(read(llm, 600)) for _ in range(20)]
            await until(lambda: dplb(llm).lb_engines == {0: 10, 1: 10})
            await asyncio.sleep(0.1)
            await llm.scale_elastic_ep(1, drain_timeout=0.1)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            lost = [end for end in ends if isinstance(end, BaseException)]
            whole = [end for end in ends if end == ALPHABET[:600]]
            assert len(lost) == (10 if in_flight == "fail" else 0)
            assert len(whole) == 20 - len(lost)
            for end in lost:
                assert type(end) is EngineRemovedError
                assert end.retryable
                assert end.rank == 1
            assert await read(llm, 5) == ALPHABET[:5]

    run(main())


# --- roll-back: a real fault, the old size, and then a fresh scale ---------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "trouble", "timeout", "reason"),
    [
        ("StartTrouble", "start die", 5.0, "rank 2 did not get ready: .*exit code 7"),
        ("StartTrouble", "start hang", 1.0, "rank 2 was not ready within 1 s"),
        ("LockstepTrouble", "start die", 5.0, "rank 2 did not get ready: .*exit code 7"),
        ("LockstepTrouble", "reinitialize refuse", 5.0, "rank 2 cannot be reconfigured: .*no room at all"),
        ("LockstepTrouble", "reinitialize die", 5.0, "rank 2 was ready, and is no more"),
        ("LockstepTrouble", "reinitialize hang", 3.0, "the commit was not over within 3 s: nothing from rank"),
    ],
)
def test_a_new_rank_fails(run: Run, tmp_path: Path, engine: str, trouble: str, timeout: float, reason: str) -> None:
    said = tmp_path / "trouble"
    options: dict[str, Any] = {"trouble": str(said)}
    if engine == "LockstepTrouble":  # the others wait that long for rank 2; one that hangs is to be found out before
        options["barrier_timeout"] = 4.0 if trouble.endswith("hang") else 2.0

    async def main() -> None:
        async with AsyncLLM(config(f"elastic_engines:{engine}", 2, options=options)) as llm, load(llm) as running:
            said.write_text(trouble)
            with pytest.raises(ScaleRolledBackError, match=reason):
                await llm.scale_elastic_ep(3, timeout=timeout)
            said.unlink()
            assert llm.data_parallel_size == 2
            await running.flows()
            await llm.scale_elastic_ep(3, timeout=20)
            await running.flows()
            assert len(llm.client.core_engines) == 3

    run(main())


FRONT_END = textwrap.dedent(
    """
    import asyncio, msgspec, sys
    from outboard import DPLBAsyncMPClient, EngineAddresses

    async def main():
        addresses = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineAddresses)
        client = await DPLBAsyncMPClient.launch(addresses=addresses, client_index=1)
        print("joined", flush=True)
        if sys.argv[1:] == ["scale"]:
            await client.scale(3, timeout=60, on_progress=lambda p: print(p.state.value, flush=True))
        await asyncio.sleep(600)

    asyncio.run(main())
    """
)


def other_front_end(group: EngineGroup, *args: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", FRONT_END, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(msgspec.msgpack.encode(group.addresses))
    process.stdin.close()
    assert process.stdout.readline() == b"joined\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_front_end_that_does_not_react_is_named_and_the_commit_is_taken_back(run: Run) -> None:
    async def main() -> None:
        with await launch(config("mock", 2, client_count=2)) as group:
            other = await asyncio.to_thread(other_front_end, group)
            try:
                async with front_ends(group, 1) as (llm,), load(llm) as running:
                    os.kill(other.pid, signal.SIGSTOP)
                    with pytest.raises(ScaleRolledBackError, match="not over within 3 s: front end 1"):
                        await llm.scale_elastic_ep(3, timeout=3.0)
                    os.kill(other.pid, signal.SIGCONT)
                    await llm.scale_elastic_ep(3, timeout=20)
                    await running.flows()
            finally:
                end(other)

    run(main())


def test_a_front_end_that_joins_while_a_rank_empties_does_not_hold_it_up(run: Run) -> None:
    async def main() -> None:
        with await launch(config("mock", 2, client_count=2)) as group:
            async with front_ends(group, 1) as (llm,):
                tasks = [asyncio.create_task(read(llm, 500)) for _ in range(4)]
                await until(lambda: min(dplb(llm).lb_engines.values()) > 0)
                draining = asyncio.Event()
                scaling = asyncio.create_task(
                    llm.scale_elastic_ep(
                        1, on_progress=lambda p: draining.set() if p.state is ScaleState.DRAINING else None
                    )
                )
                await draining.wait()
                async with AsyncLLM(addresses=group.addresses, client_index=1) as late:
                    assert await read(late, 5) == ALPHABET[:5]
                    async with asyncio.timeout(20):  # of the 60 s that the rank may have
                        await scaling
                    assert [await task for task in tasks] == [ALPHABET[:500]] * 4
                    await until(lambda: len(late.client.engine_status) == 1)

    run(main())


def test_the_front_end_that_wanted_it_dies(run: Run, tmp_path: Path) -> None:
    said = tmp_path / "trouble"

    async def main() -> None:
        what = config("elastic_engines:StartTrouble", 2, client_count=2, options={"trouble": str(said)})
        with await launch(what) as group:
            said.write_text("start hang")
            other = await asyncio.to_thread(other_front_end, group, "scale")
            try:
                async with front_ends(group, 1) as (llm,), load(llm) as running:
                    ended: list[ScaleProgress] = []
                    dplb(llm).subscribe_scale(ended.append)
                    assert other.stdout is not None
                    assert await asyncio.to_thread(other.stdout.readline) == b"preparing\n"
                    other.kill()
                    await until(lambda: ended and ended[-1].state is ScaleState.ROLLED_BACK)
                    assert "front end that wanted it is gone" in ended[-1].reason
                    said.unlink()
                    await llm.scale_elastic_ep(3, timeout=20)
                    await running.flows()
            finally:
                end(other)

    run(main())


@pytest.mark.parametrize(
    ("engine", "old", "new", "at", "size"),
    [
        ("mock", 2, 3, ScaleState.PREPARING, 2),
        ("lockstep_mock", 2, 3, ScaleState.PREPARING, 2),
        ("lockstep_mock", 2, 3, ScaleState.COMMITTING, 2),
        ("mock", 3, 2, ScaleState.DRAINING, 2),
        ("lockstep_mock", 3, 2, ScaleState.DRAINING, 2),
    ],
)
def test_the_caller_is_cancelled(run: Run, engine: str, old: int, new: int, at: ScaleState, size: int) -> None:
    async def main() -> None:
        async with AsyncLLM(config(engine, old)) as llm, load(llm) as running:
            reached = asyncio.Event()
            ends: list[ScaleProgress] = []
            dplb(llm).subscribe_scale(lambda p: ends.append(p) if p.state.value in ("done", "rolled back") else None)
            task = asyncio.create_task(
                llm.scale_elastic_ep(new, timeout=20, on_progress=lambda p: reached.set() if p.state is at else None)
            )
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: ends)
            # A commit may have been faster than the news of it: then there was nothing to take back.
            assert llm.data_parallel_size == (size if ends[0].state is ScaleState.ROLLED_BACK or new < old else new)
            assert ends[0].state is ScaleState.DONE or new > old
            await running.flows()
            await llm.scale_elastic_ep(4, timeout=20)
            await running.flows()
            assert llm.data_parallel_size == 4

    run(main())


@BOTH
def test_an_old_rank_dies_meanwhile(run: Run, engine: str) -> None:
    async def main() -> None:
        async with (
            AsyncLLM(config(engine, 2, restarts=20, in_flight="resume")) as llm,
            load(llm, tokens=20) as running,
        ):
            client = dplb(llm)
            for new, at in ((3, ScaleState.PREPARING), (4, ScaleState.COMMITTING), (2, ScaleState.DRAINING)):
                killed = False

                def look(progress: ScaleProgress, at: ScaleState = at) -> None:
                    nonlocal killed
                    if progress.state is at and not killed:
                        killed = True
                        os.kill(client.core_engines[0].pid, signal.SIGKILL)

                before = llm.data_parallel_size
                try:
                    await llm.scale_elastic_ep(new, timeout=20, on_progress=look)
                except ScaleRolledBackError:
                    assert llm.data_parallel_size == before
                else:
                    assert llm.data_parallel_size == new
                assert killed
                async with asyncio.timeout(20):
                    for rank in range(llm.data_parallel_size):
                        await llm.wait_for_state(EngineState.READY, rank=rank)
                await running.flows()
            await llm.scale_elastic_ep(1, timeout=20)
            await running.flows()

    run(main())


# --- refused, prepared, taken back -----------------------------------------------------------------------------------


def test_what_cannot_be_is_refused(run: Run, tmp_path: Path) -> None:
    said = tmp_path / "trouble"

    async def main() -> None:
        what = config("elastic_engines:StartTrouble", 1, options={"trouble": str(said)}, min_size=1, max_size=3)
        async with AsyncLLM(what) as llm:
            for size, message in ((0, "1 to 3 ranks, not 0"), (4, "not 4")):
                with pytest.raises(ConfigError, match=message):
                    await llm.scale_elastic_ep(size)
            with pytest.raises(ConfigError, match="must be an int"):
                await llm.scale_elastic_ep(2.5)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="timeout must be above 0"):
                await llm.scale_elastic_ep(2, timeout=0)
            await llm.scale_elastic_ep(1)  # as it is
            with pytest.raises(ScaleError, match="nothing is prepared"):
                await dplb(llm).commit_elastic_ep()
            said.write_text("start hang")
            first = asyncio.create_task(llm.scale_elastic_ep(2, timeout=20))
            await asyncio.sleep(0)
            with pytest.raises(ScaleInProgressError, match="from 1 to 2 ranks is under way"):
                await llm.scale_elastic_ep(3)
            said.unlink()
            await first
            assert llm.data_parallel_size == 2

    run(main())


def test_ranks_that_were_not_meant_to_be_scaled(run: Run) -> None:
    async def main() -> None:
        async with AsyncLLM("echo") as llm:
            with pytest.raises(UnsupportedError, match="max_size"):
                await llm.scale_elastic_ep(2)
        async with AsyncLLM(config("elastic_engines:Unscalable", 2)) as llm:
            with pytest.raises(UnsupportedError, match=r"reinitialize\(\)"):
                await llm.scale_elastic_ep(3)
            assert await read(llm, 5) == ALPHABET[:5]

    run(main())


@BOTH
def test_prepare_then_commit_or_abort(run: Run, engine: str) -> None:
    async def main() -> None:
        async with AsyncLLM(config(engine, 2)) as llm, load(llm) as running:
            client = dplb(llm)
            await client.prepare_elastic_ep(3, timeout=20)
            assert client.data_parallel_size == 2
            await running.flows()
            await client.abort_elastic_ep()
            assert client.data_parallel_size == 2
            for size in (3, 1):
                await client.prepare_elastic_ep(size, timeout=20)
                await running.flows()
                await client.commit_elastic_ep()
                assert client.data_parallel_size == size
                await running.flows()

    run(main())


def test_the_owner_of_a_group_scales_it(run: Run) -> None:
    async def main() -> None:
        with await launch(config("mock", 1)) as group:
            async with front_ends(group, 1) as (llm,), load(llm) as running:
                await asyncio.to_thread(group.scale, 3, timeout=20)
                await until(lambda: llm.data_parallel_size == 3)
                await running.flows()
                with pytest.raises(ConfigError):
                    await asyncio.to_thread(group.scale, 9)
                await asyncio.to_thread(group.scale, 1)
                await running.flows()

    run(main())


# --- notifications ---------------------------------------------------------------------------------------------------


class Listening(DPLBAsyncMPClient):
    """Notes notifications, and may raise."""

    heard: list[tuple[str, int]]
    fails = False

    async def eep_process_engine_core_notification(self, data: tuple[str, int]) -> None:
        self.heard.append(data)
        if self.fails:
            raise LookupError("not today")


def test_the_clients_class_hears_of_every_rank(run: Run) -> None:
    async def main() -> None:
        client = await Listening.launch(config("mock", 1))
        client.heard = []
        try:
            await client.scale(3, timeout=20)
            assert sorted(client.heard) == [("RECONFIGURE_FINISHED", rank) for rank in range(3)]
            client.heard.clear()
            await client.scale(1)
            assert sorted(client.heard) == [
                ("RECONFIGURE_FINISHED", 0),
                ("SHUTDOWN_COMPLETE", 1),
                ("SHUTDOWN_COMPLETE", 2),
            ]
            client.fails = True
            with pytest.raises(ScaleError, match="LookupError: not today"):
                await client.scale(2, timeout=20)
            client.fails = False
            await client.scale(1 if client.data_parallel_size == 2 else 2, timeout=20)
            client.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[1]))
            while not (await client.get_output_async()).finished:
                pass
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())
