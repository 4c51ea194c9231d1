"""The failure model, row by row: what can fail, done to something real, and what must happen then.

Each test here is one row of the table, at its plainest; the other files of this directory, tests/launch, tests/client
and tests/e2e go into every corner of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from outboard import (
    AsyncLLM,
    DPLBAsyncMPClient,
    EngineConfig,
    EngineDeadError,
    EngineRestartedError,
    EngineStartupError,
    EngineStartupTimeout,
    EngineState,
    FaultConfig,
    ParallelConfig,
    RemoteError,
    RestartPolicy,
    SamplingParams,
    SlowReaderError,
    SyncMPClient,
    TransportConfig,
    UtilityError,
    UtilityTimeoutError,
)
from support import children

pytestmark = pytest.mark.usefixtures("nothing_left")

FAULTY = "outboard.testing:FaultyEngine"


async def read(llm: AsyncLLM, count: int) -> list[int]:
    got: list[int] = []
    params = SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)
    async for output in llm.generate([1], params):
        got += output.outputs[0].token_ids
    return got


def alphabet(count: int) -> list[int]:
    return [97 + i % 26 for i in range(count)]


def kill(llm: AsyncLLM, rank: int = 0, number: int = signal.SIGKILL) -> None:
    os.kill(llm.client.core_engines[rank].pid, number)


def test_the_child_dies_before_hello_before_ready_or_in_the_first_step() -> None:
    for options, pattern in (
        ({"engine": "no_such_module:Engine"}, "no_such_module"),
        ({"engine": FAULTY, "options": {"die_in": "constructor", "way": "sigsegv"}}, "rank 0 .* start-up.*SIGSEGV"),
    ):
        with pytest.raises((EngineStartupError, ValueError), match=pattern):
            SyncMPClient(EngineConfig(**options))
        assert not children()

    async def main() -> None:
        async with AsyncLLM(FAULTY, options={"die_in": "step", "way": "exception"}) as llm:
            started = time.monotonic()
            with pytest.raises(EngineDeadError, match=r"rank 0 .* running: RuntimeError: boom") as caught:
                await read(llm, 5)
            assert time.monotonic() - started < 2
            error = caught.value
            assert (error.phase, error.exit_code, error.remote_type) == ("running", 1, "RuntimeError")
            assert "boom" in error.remote_traceback and "about to die" in error.stderr_tail

    asyncio.run(main())


def test_start_up_takes_too_long() -> None:
    config = EngineConfig(engine=FAULTY, options={"slow_start": 100.0}, faults=FaultConfig(startup_timeout=1.0))
    started = time.monotonic()
    with pytest.raises(EngineStartupTimeout, match="loaded and was not READY"):
        SyncMPClient(config)
    assert time.monotonic() - started < 5
    assert not children()


@pytest.mark.parametrize("way", ["exception", "_exit", "sigkill", "sigsegv", "abort"])
def test_the_child_dies_while_running(way: str) -> None:
    async def main() -> None:
        config = EngineConfig(
            engine=FAULTY,
            options={"die_in": "step", "way": way, "at_step": 20, "step_ms": 1.0},
            faults=FaultConfig(restart=RestartPolicy.on_failure(1, backoff=0.01)),
        )
        async with AsyncLLM(config) as llm:
            with pytest.raises(EngineRestartedError):
                await read(llm, 1000)
            assert await read(llm, 10) == alphabet(10)  # by the next incarnation
            with pytest.raises(EngineDeadError) as caught:
                await read(llm, 1000)
            assert not caught.value.retryable  # the budget is spent
            with pytest.raises(EngineDeadError):
                await read(llm, 1)

    asyncio.run(main())


def test_the_child_hangs() -> None:
    async def main() -> None:
        faults = FaultConfig(stall_timeout=0.5, shutdown_timeout=2.0)
        async with AsyncLLM(EngineConfig(engine="mock", options={"step_ms": 1.0}, faults=faults)) as llm:
            reader = asyncio.create_task(read(llm, 500))
            while llm.client.scheduler_stats.running < 1:
                await asyncio.sleep(0.005)
            kill(llm, number=signal.SIGSTOP)
            async with asyncio.timeout(1.5):
                status = await llm.wait_for_state(EngineState.STALLED)
            assert status.stall is not None and status.stall.process == "stopped"
            kill(llm, number=signal.SIGCONT)
            assert await reader == alphabet(500)

    asyncio.run(main())


def test_the_front_end_is_sigkilled(short_tmp: Path) -> None:
    program = (
        "import asyncio\n"
        "from outboard import AsyncLLM, SamplingParams\n"
        "async def main():\n"
        "    async with AsyncLLM('mock', options={'step_ms': 1.0}) as llm:\n"
        "        async for output in llm.generate([1], SamplingParams(max_tokens=10**6, output_kind='delta')):\n"
        "            print(llm.client.core_engines[0].pid, flush=True)\n"
        "asyncio.run(main())\n"
    )
    front_end = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert front_end.stdout is not None
    with front_end.stdout:
        engine = int(front_end.stdout.readline())
        tree = psutil.Process(front_end.pid).children(recursive=True)
        front_end.kill()
        front_end.wait(10)
    _, alive = psutil.wait_procs([*tree, psutil.Process(engine)] if psutil.pid_exists(engine) else tree, timeout=5)
    assert not alive
    deadline = time.monotonic() + 5
    while list(short_tmp.iterdir()):
        assert time.monotonic() < deadline, "the session directory is left"
        time.sleep(0.01)


def test_a_frame_is_garbage() -> None:
    async def main() -> None:
        # Over ZeroMQ: a Unix socket of ours takes one connection, and then there is nothing to connect to.
        config = EngineConfig(engine="mock", options={"step_ms": 1.0}, transport=TransportConfig(sockets="zmq"))
        async with AsyncLLM(config) as llm:
            reader = asyncio.create_task(read(llm, 500))
            while llm.client.scheduler_stats.running < 1:
                await asyncio.sleep(0.005)
            group = llm.client._resources.group
            assert group is not None
            (path,) = Path(group.addresses.directory).glob("out-*")
            with zmq.Context() as context:
                stranger = context.socket(zmq.PUSH)
                stranger.connect(f"ipc://{path}")
                stranger.send(b"GET / HTTP/1.1")
                stranger.close(linger=1000)
            assert await reader == alphabet(500)
            assert sum(llm.client.stats()["dropped"].values()) == 1

    asyncio.run(main())


def test_a_utility_raises_returns_what_cannot_be_encoded_or_never_ends() -> None:
    async def main() -> None:
        async with AsyncLLM("faulty:CallableEngine") as llm:
            call = llm.client.call_utility_async
            with pytest.raises(RemoteError, match="no such thing"):
                await call("boom")
            with pytest.raises(UtilityError):
                await call("unsendable")
            with pytest.raises(UtilityTimeoutError):
                await call("never", timeout=0.1)
            assert await call("echo", 1) == [[1], {}]

    asyncio.run(main())


def test_the_reader_is_slow() -> None:
    async def main() -> None:
        config = EngineConfig(
            engine="faulty:ResultsEngine",
            options={"count": 50, "size": 10_000},
            transport=TransportConfig(stream_buffer_bytes=100_000),
        )
        async with AsyncLLM(config) as llm:
            slow = llm.generate([1])
            with pytest.raises(SlowReaderError):
                while True:
                    await anext(slow)
                    await asyncio.sleep(0.05)
            assert (await llm.get_stats())["requests"] == 0

    asyncio.run(main())


@pytest.mark.parametrize(("number", "forced"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_once_and_twice(number: int, forced: int) -> None:
    def generate(tokens: int) -> subprocess.Popen[bytes]:
        arguments = ["generate", "x", "--engine", "mock", "--option", "step_ms=5", "--max-tokens", str(tokens)]
        program = "from outboard.cli.main import run; run()"
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.read(1)  # it streams
        return process

    with generate(300) as once:
        once.send_signal(number)
        text, errors = once.communicate(timeout=30)
        assert once.returncode == 0, errors
        assert len(text.strip()) + 1 == 300, errors
    with generate(1_000_000) as twice:
        twice.send_signal(number)
        assert twice.stderr is not None
        assert b"finishing" in twice.stderr.readline()
        twice.send_signal(number)
        twice.communicate(timeout=30)
        assert twice.returncode == forced


@pytest.mark.parametrize("in_flight", ["fail", "resume"])
def test_a_rank_of_several_dies(in_flight: Any) -> None:
    async def main() -> None:
        config = EngineConfig(
            engine="mock",
            options={"step_ms": 2.0},
            parallel=ParallelConfig(data_parallel_size=3),
            faults=FaultConfig(in_flight=in_flight),
        )
        async with AsyncLLM(config) as llm:
            assert isinstance(llm.client, DPLBAsyncMPClient)
            tasks = [asyncio.create_task(read(llm, 150)) for _ in range(12)]
            while llm.client.scheduler_stats.running < 12:
                await asyncio.sleep(0.005)
            kill(llm, rank=1)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            whole = [end for end in ends if end == alphabet(150)]
            lost = [end for end in ends if isinstance(end, EngineRestartedError) and end.retryable and end.rank == 1]
            assert (len(whole), len(lost)) == ((8, 4) if in_flight == "fail" else (12, 0))

    asyncio.run(main())
