"""Several front ends on one engine core: they come, go, die and are replaced, and nobody gets another's tokens."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from outboard import (
    AsyncLLM,
    AsyncMPClient,
    ConfigError,
    EngineConfig,
    EngineCoreRequest,
    EngineDeadError,
    EngineGroup,
    EngineStartupError,
    EngineState,
    FaultConfig,
    RestartPolicy,
    SamplingParams,
    SyncMPClient,
    launch_engines,
)
from support import Run, children

pytestmark = pytest.mark.usefixtures("nothing_left")

ALPHABET = [97 + i % 26 for i in range(5000)]

# A front end in a process of its own: streams for ever, and says each token.
FRONT_END = """
import asyncio, sys, msgspec
from outboard import AsyncLLM, EngineAddresses, SamplingParams

async def main():
    addresses = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineAddresses)
    async with AsyncLLM(addresses=addresses, client_index=int(sys.argv[1])) as llm:
        params = SamplingParams(max_tokens=int(sys.argv[2]), output_kind="delta", detokenize=False)
        async for output in llm.generate([1], params):
            print(*output.outputs[0].token_ids, flush=True)

asyncio.run(main())
"""


# A front end that forks, between two requests.
FORK = """
import asyncio, atexit, importlib, os, sys
from outboard import AsyncLLM, EngineConfig, SamplingParams

async def read(llm, count):
    params = SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)
    return [token async for output in llm.generate([1], params) for token in output.outputs[0].token_ids]

async def main():
    async with AsyncLLM(EngineConfig(engine="mock", options={"step_ms": 1.0})) as llm:
        assert await read(llm, 3) == [97, 98, 99]
        pid = os.fork()
        if pid == 0:
            atexit._run_exitfuncs()  # finalizers among them
            os._exit(0)
        assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0)
        assert await read(llm, 26) == list(range(97, 123))
    print("served")

asyncio.run(main()) if sys.argv[1] == "asyncio" else importlib.import_module("uvloop").run(main())
"""


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)


async def read(llm: AsyncLLM, count: int) -> list[int]:
    got: list[int] = []
    async for output in llm.generate([1], tokens(count)):
        got += output.outputs[0].token_ids
    return got


def front_end(group: EngineGroup, index: int, count: int = 1_000_000) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", FRONT_END, str(index), str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.msgpack.encode(group.addresses))
    process.stdin.close()
    return process


@pytest.fixture
def group(short_tmp: Path) -> Iterator[EngineGroup]:
    config = EngineConfig(
        engine="mock",
        options={"step_ms": 2.0},
        faults=FaultConfig(restart=RestartPolicy.on_failure(backoff=0.05), shutdown_timeout=5.0),
    )
    with launch_engines(config) as group:
        yield group


def test_two_front_ends_share_an_engine_core(group: EngineGroup, run: Run) -> None:
    async def main() -> None:
        async with (
            AsyncLLM(addresses=group.addresses, client_index=0) as one,
            AsyncLLM(addresses=group.addresses, client_index=1) as other,
        ):
            assert one.client.core_engines[0].pid == other.client.core_engines[0].pid
            results = await asyncio.gather(*(read(llm, count) for llm in (one, other) for count in (5, 30, 100)))
            assert results == [ALPHABET[:count] for count in (5, 30, 100, 5, 30, 100)]
            assert await one.client.call_utility_async("is_paused") is False
            await one.shutdown()
            assert await read(other, 10) == ALPHABET[:10]  # the engine core was not the first one's
        assert group.engines[0].state is EngineState.READY
        assert group.stats()["dropped"] == {}

    run(main())


def test_blocking_and_asyncio_front_ends_side_by_side(group: EngineGroup) -> None:
    sync = SyncMPClient(addresses=group.addresses, client_index=3)
    try:
        sync.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling_params=tokens(20)))

        async def main() -> list[int]:
            async with AsyncLLM(addresses=group.addresses, client_index=4) as llm:
                return await read(llm, 20)

        assert asyncio.run(main()) == ALPHABET[:20]
        got: list[int] = []
        while len(got) < 20:
            for output in sync.get_output(timeout=10).outputs:
                got += output.new_token_ids
        assert got == ALPHABET[:20]
    finally:
        sync.shutdown()


def test_a_killed_front_end_is_replaced_and_no_old_token_reaches_the_new_one(group: EngineGroup, run: Run) -> None:
    for _ in range(3):
        old = front_end(group, 0)
        assert old.stdout is not None
        with old.stdout:
            assert old.stdout.readline()
            os.kill(old.pid, signal.SIGKILL)

            async def main() -> None:
                async with AsyncLLM(addresses=group.addresses, client_index=0) as llm:
                    results = await asyncio.gather(*(read(llm, 50) for _ in range(10)))
                    assert results == [ALPHABET[:50]] * 10
                    stats = await llm.get_stats()
                    assert stats["requests"] == 0  # what the dead one had asked for was aborted
                    assert llm.client.stats()["dropped"] == {}

            run(main())
            old.wait(10)
    sockets = [path.name for path in Path(group.addresses.directory).iterdir()]
    assert sockets == ["control"], "a dead front end left its sockets"


def test_the_later_front_end_with_an_index_takes_the_place_of_the_earlier(group: EngineGroup, run: Run) -> None:
    async def main() -> None:
        first = await AsyncMPClient.launch(addresses=group.addresses, client_index=0)
        first.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling_params=tokens(1_000_000)))
        second = await AsyncMPClient.launch(addresses=group.addresses, client_index=0)
        try:
            with pytest.raises(EngineDeadError, match="another front end has index 0"):
                while True:
                    await first.get_output_async()
            assert (await second.call_utility_async("get_stats"))["requests"] == 0
        finally:
            await asyncio.to_thread(second.shutdown)
            await asyncio.to_thread(first.shutdown)

    run(main())


def test_a_restart_reaches_every_front_end(group: EngineGroup, run: Run) -> None:
    async def main() -> None:
        async with (
            AsyncLLM(addresses=group.addresses, client_index=0) as one,
            AsyncLLM(addresses=group.addresses, client_index=1) as other,
        ):
            await asyncio.gather(read(one, 3), read(other, 3))
            os.kill(one.client.core_engines[0].pid, signal.SIGKILL)
            await asyncio.gather(*(llm.wait_for_state(EngineState.RESTARTING) for llm in (one, other)))
            assert await asyncio.gather(read(one, 3), read(other, 3)) == [ALPHABET[:3]] * 2
            assert one.client.core_engines[0].incarnation == other.client.core_engines[0].incarnation == 1
            version = group.engines[0].version
            async with asyncio.timeout(5):
                while group.stats()["acknowledged"] != {0: version, 1: version}:
                    await asyncio.sleep(0.01)

    run(main())


def test_the_end_of_the_group_is_the_end_of_its_front_ends(run: Run, short_tmp: Path) -> None:
    async def main() -> None:
        group = await asyncio.to_thread(launch_engines, "mock")
        llm = AsyncLLM(addresses=group.addresses)
        async with llm:
            reader = asyncio.create_task(read(llm, 10_000_000))
            while not llm.client.scheduler_stats.running:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(group.shutdown)
            await asyncio.wait([reader])  # it ends with "abort", if that came in time
            assert reader.exception() is None or isinstance(reader.exception(), EngineDeadError)
            with pytest.raises(EngineDeadError, match="launcher") as caught:
                await read(llm, 1)
            assert caught.value.phase == "stopping"

    run(main())


def test_the_launcher_killed_is_the_end_of_all(run: Run, short_tmp: Path) -> None:
    program = (
        "import sys, msgspec, time\n"
        "from outboard import launch_engines, EngineConfig\n"
        "group = launch_engines(EngineConfig(engine='mock', options={'step_ms': 2.0}))\n"
        "print(msgspec.msgpack.encode(group.addresses).hex(), flush=True)\n"
        "time.sleep(100)\n"
    )
    from outboard import EngineAddresses

    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher.stdout:
        addresses = msgspec.msgpack.decode(bytes.fromhex(launcher.stdout.readline().decode()), type=EngineAddresses)

    async def main() -> None:
        async with AsyncLLM(addresses=addresses) as llm:
            reader = asyncio.create_task(read(llm, 1_000_000))
            while not llm.client.scheduler_stats.running:
                await asyncio.sleep(0.01)
            started = time.monotonic()
            os.kill(launcher.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match=rf"launcher \(pid {launcher.pid}\) is gone"):
                await reader
            assert time.monotonic() - started < 1
        with pytest.raises(EngineDeadError, match="is gone"):
            await AsyncMPClient.launch(addresses=addresses)

    run(main())
    launcher.wait(10)
    deadline = time.monotonic() + 5
    while Path(addresses.directory).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_front_end_with_the_wrong_token_is_refused(group: EngineGroup, run: Run) -> None:
    async def main() -> None:
        wrong = msgspec.structs.replace(group.addresses, session_token="guessed")
        with pytest.raises(EngineDeadError, match="session token"):
            await AsyncMPClient.launch(addresses=wrong)
        async with AsyncLLM(addresses=group.addresses) as llm:
            assert await read(llm, 3) == ALPHABET[:3]
        assert group.stats()["dropped"] == {"refused": 1}

    run(main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_fork_of_the_front_end_exits_and_the_engine_lives(short_tmp: Path, loop: str) -> None:
    # In a process of its own: copies of one that was connected to Ray, as for other tests, cannot run exit handlers.
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    done = subprocess.run([sys.executable, "-c", FORK, loop], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "served\n", "")


def test_start_up_that_fails_leaves_nothing(short_tmp: Path) -> None:
    with pytest.raises(EngineStartupError, match="exit code 7"):
        launch_engines(
            EngineConfig(engine="outboard.testing:FaultyEngine", options={"die_in": "constructor", "way": "_exit"})
        )
    with pytest.raises(ConfigError, match="echo"):
        launch_engines("no-such-engine")
    assert not children()


def test_a_config_and_addresses_at_once(group: EngineGroup) -> None:
    with pytest.raises(ConfigError, match="either"):
        AsyncMPClient("echo", addresses=group.addresses)
    with pytest.raises(ConfigError, match="either"):
        AsyncLLM()


def test_a_dropped_group_ends_its_engine_cores(short_tmp: Path) -> None:
    group = launch_engines("echo")
    assert children()
    del group
    _, alive = psutil.wait_procs(children(), timeout=5)
    assert not alive


def test_sixty_four_front_ends_at_once(group: EngineGroup) -> None:
    async def main() -> None:
        llms = [AsyncLLM(addresses=group.addresses, client_index=index) for index in range(64)]
        await asyncio.gather(*(llm.start() for llm in llms))
        try:
            assert await asyncio.gather(*(read(llm, 20) for llm in llms)) == [ALPHABET[:20]] * 64
        finally:
            await asyncio.gather(*(llm.shutdown() for llm in llms))

    asyncio.run(main())
