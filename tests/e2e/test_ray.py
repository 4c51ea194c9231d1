"""Ranks in a Ray cluster of three nodes, all on this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from outboard import (
    AsyncLLM,
    DPLBAsyncMPClient,
    EngineConfig,
    EngineGroup,
    EngineRestartedError,
    EngineStartupError,
    EngineState,
    FaultConfig,
    NoRoomError,
    ParallelConfig,
    RayPlacement,
    RestartPolicy,
    SamplingParams,
    ScaleProgress,
    ScaleRolledBackError,
    launch_engines,
)
from outboard.config import NetworkConfig
from support import Run

pytestmark = [
    pytest.mark.xdist_group("ray"),  # one cluster
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the ray extra"),
    # Of Ray's own: the pipes and processes of its daemons, which it leaves to the interpreter's end.
    pytest.mark.filterwarnings("ignore::ResourceWarning:ray"),
    pytest.mark.filterwarnings("ignore:.*ResourceWarning:pytest.PytestUnraisableExceptionWarning"),
]

ALPHABET = [97 + i % 26 for i in range(1000)]
SEATS = 2  # on each node
# Ray listens on the loopback address only; it has no other switch for that.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
NODE = {"num_cpus": 8, "resources": {"seat": SEATS}, "object_store_memory": 80 << 20}

# How soon Ray finds out that a machine is gone; by default it takes ten seconds and more.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}


def until(condition: Callable[[], Any], what: str, timeout: float = 20.0) -> Any:
    """Waits for it."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.02)
    return value


async def until_async(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def read(llm: AsyncLLM, count: int) -> list[int]:
    got: list[int] = []
    params = SamplingParams(max_tokens=count, output_kind="delta", detokenize=False)
    async for output in llm.generate([1], params):
        got += output.outputs[0].token_ids
    return got


class Ray:
    """The cluster, and what is in it."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.ray = ray
        head = {**NODE, "include_dashboard": False, "_system_config": QUICK}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.workers = [self.cluster.add_node(**NODE) for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False)

    def actors(self) -> list[str]:
        """Ids of all actors that are alive."""
        actors = self.ray._private.state.actors()
        return [name for name, actor in actors.items() if actor["State"] != "DEAD"]

    def groups(self) -> list[dict[str, Any]]:
        """All placement groups that are there."""
        from ray.util.placement_group import placement_group_table

        return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]

    def nothing_left(self) -> None:
        assert not self.groups()
        assert not self.actors()
        until(lambda: self.ray.available_resources().get("seat") == self.seats, "all room is free")

    @property
    def seats(self) -> float:
        return float(self.ray.cluster_resources()["seat"])

    def remove(self, node: str, graceful: bool) -> None:
        """Removes the machine of a rank's node, and adds another one."""
        worker = next(worker for worker in self.workers if host(node) == worker.node_id[:6])
        self.workers.remove(worker)
        self.cluster.remove_node(worker, allow_graceful=graceful)

    def replenish(self) -> None:
        while len(self.workers) < 2:
            self.workers.append(self.cluster.add_node(**NODE))

    def close(self) -> None:
        self.ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def _ray() -> Iterator[Ray]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        cluster = Ray()
        yield cluster
        cluster.close()


@pytest.fixture
def ray(_ray: Ray) -> Iterator[Ray]:
    """The cluster, whole; nothing may be left in it."""
    _ray.replenish()
    yield _ray
    _ray.nothing_left()


def host(node: str) -> str:
    """Which of Ray's nodes a node of Outboard is on, by the first digits of its id."""
    return node.split("-")[-2]


def mock(size: int, *, timeout: float = 20.0, patience: float = 10.0, in_flight: Any = "fail", **parallel: Any) -> Any:
    return EngineConfig(
        engine="mock",
        options={"step_ms": 2.0},
        parallel=ParallelConfig(
            data_parallel_size=size,
            backend="ray",
            placement=RayPlacement(bundles=[{"CPU": 1, "seat": 1}], timeout=timeout),
            **parallel,
        ),
        faults=FaultConfig(restart=RestartPolicy.on_failure(5, backoff=0.05), in_flight=in_flight),
        network=NetworkConfig(listen="127.0.0.1", port=0, heartbeat_interval=0.25, patience=patience),
    )


def returned(group: EngineGroup, rank: int, incarnation: int = 1) -> Any:
    """Waits until a rank serves again; its status."""

    def state() -> Any:
        status = group.engines[rank]
        return status if status.incarnation == incarnation and status.state is EngineState.READY else None

    return until(state, f"rank {rank} serves again")


def actor_of(pid: int) -> psutil.Process:
    """The process of the actor above an engine core."""
    return next(one for one in psutil.Process(pid).parents() if one.name().startswith("ray::"))


def test_ranks_spread_and_one_machine_that_goes_takes_no_other_with_it(ray: Ray, run: Run) -> None:
    async def main(group: EngineGroup) -> None:
        async with AsyncLLM(addresses=group.addresses) as llm:
            before = group.engines
            gone = next(host(one.node) for one in before if any(host(one.node) == w.node_id[:6] for w in ray.workers))
            lost = [one for one in before if host(one.node) == gone]
            streams = [asyncio.create_task(read(llm, 1000)) for _ in range(24)]
            await asyncio.sleep(0)
            await until_async(lambda: llm.client.stats()["requests"] == 24)
            await asyncio.sleep(0.3)  # let tokens flow
            removed = time.monotonic()
            ray.remove(lost[0].node, graceful=True)
            ended = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 30)
            assert {type(one) for one in ended} == {list, EngineRestartedError}
            for one in ended:
                if isinstance(one, EngineRestartedError):
                    assert one.rank in [engine.rank for engine in lost]
                    assert one.lost == "machine"
                    assert "is lost, its machine has left the Ray cluster" in one.reason
                else:
                    assert one == ALPHABET[:1000]
            assert time.monotonic() - removed < 10
            for engine in before:
                if engine not in lost:
                    now = group.engines[engine.rank]
                    assert (now.incarnation, now.pid) == (0, engine.pid)
                else:
                    now = await asyncio.to_thread(returned, group, engine.rank)
                    assert host(now.node) != gone
            assert await asyncio.gather(*(read(llm, 50) for _ in range(40))) == [ALPHABET[:50]] * 40

    with launch_engines(mock(4)) as group:
        assert sorted(Counter(host(engine.node) for engine in group.engines).values()) == [1, 1, 2]
        assert len(ray.actors()) == len(ray.groups()) == 4
        run(main(group))
        pids = [engine.pid for engine in group.engines]
    until(lambda: not any(pid and psutil.pid_exists(pid) for pid in pids), "all engine cores have ended")


def test_a_machine_that_falls_silent_is_given_up_within_the_patience(ray: Ray) -> None:
    with launch_engines(mock(3, patience=2.0)) as group:
        victim = next(one for one in group.engines if any(host(one.node) == w.node_id[:6] for w in ray.workers))
        killed = time.monotonic()
        ray.remove(victim.node, graceful=False)
        until(lambda: group.engines[victim.rank].state is EngineState.RESTARTING, "the rank is known to be lost")
        assert time.monotonic() - killed < 2.0 + 1.5
        now = returned(group, victim.rank)
        assert host(now.node) != host(victim.node)
        assert now.death is not None and now.death.lost == "silent"


def test_scaling_under_load_asks_for_room_first(ray: Ray, run: Run) -> None:
    progress: list[ScaleProgress] = []
    over = False

    async def load(llm: AsyncLLM) -> int:
        streams = 0
        while not over:
            assert await read(llm, 100) == ALPHABET[:100]
            streams += 1
        return streams

    async def main() -> None:
        nonlocal over
        async with AsyncLLM(mock(2, max_size=16, timeout=2.0)) as llm:
            assert isinstance(llm.client, DPLBAsyncMPClient)
            streams = [asyncio.create_task(load(llm)) for _ in range(16)]
            await llm.client.scale(4)
            assert len(ray.actors()) == 4
            with pytest.raises(
                ScaleRolledBackError, match=r"no room in the Ray cluster within 2 s for CPU 1, seat 1: "
            ):
                await llm.client.scale(SEATS * 3 + 1, on_progress=progress.append)
            assert any("waiting for room" in one.ranks.values() for one in progress)
            assert len(llm.client.core_engines) == 4
            await until_async(lambda: len(ray.groups()) == 4)  # room that was not enough has been given back
            assert len(ray.actors()) == 4  # none was started in vain
            await llm.client.scale(1)
            await until_async(lambda: len(ray.groups()) == len(ray.actors()) == 1)
            over = True
            assert min(await asyncio.gather(*streams)) >= 1

    run(main())


def test_a_start_without_room_is_refused(ray: Ray) -> None:
    with pytest.raises(NoRoomError, match=r"no room in the Ray cluster within 1 s for CPU 1, seat 1: "):
        launch_engines(mock(SEATS * 3 + 1, timeout=1.0))


def test_a_start_that_is_given_up_while_it_waits_for_room(ray: Ray, run: Run) -> None:
    async def main() -> None:
        launch = asyncio.create_task(DPLBAsyncMPClient.launch(mock(SEATS * 3 + 1, timeout=60.0)))
        await until_async(lambda: len(ray.groups()) == SEATS * 3 + 1)
        launch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launch
        await until_async(lambda: not ray.groups())

    run(main())


def test_a_machine_without_outboard_is_told(ray: Ray, tmp_path: Path) -> None:
    (tmp_path / "there" / "outboard").mkdir(parents=True)
    (tmp_path / "there" / "outboard" / "__init__.py").touch()  # another one, in front of ours
    archive = shutil.make_archive(str(tmp_path / "there"), "zip", tmp_path, "there")
    config = mock(1)
    placement = msgspec.structs.replace(config.parallel.placement, runtime_env={"working_dir": f"file://{archive}"})
    parallel = msgspec.structs.replace(config.parallel, placement=placement)
    with pytest.raises(EngineStartupError, match=r"cannot run Outboard: it is not installed there") as info:
        launch_engines(msgspec.structs.replace(config, parallel=parallel))
    assert "outboard[ray]" in str(info.value)


def test_an_actor_that_is_killed(ray: Ray) -> None:
    with launch_engines(mock(2)) as group:
        victim = group.engines[0]
        assert victim.pid is not None
        actor_of(victim.pid).kill()
        killed = time.monotonic()
        until(lambda: group.engines[0].state is EngineState.RESTARTING, "it is known to be lost")
        assert time.monotonic() - killed < 2.0  # long before the patience of 10 s
        until(lambda: not psutil.pid_exists(victim.pid or 0), "its engine core has ended")
        now = returned(group, 0)
        assert now.death is not None and now.death.lost == "actor"
        assert "is lost, its actor's process has died" in now.death.reason
        assert host(now.node) != host(victim.node)
        assert group.engines[1].incarnation == 0


def test_an_engine_core_that_is_killed_is_started_again_where_it_was(ray: Ray) -> None:
    with launch_engines(mock(1)) as group:
        victim = group.engines[0]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        now = returned(group, 0)
        assert now.node == victim.node
        assert now.death is not None and "killed by SIGKILL" in now.death.reason


def test_a_machine_that_is_to_be_taken_away_is_left_in_time(ray: Ray) -> None:
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    with launch_engines(mock(3)) as group:
        victim = next(one for one in group.engines if any(host(one.node) == w.node_id[:6] for w in ray.workers))
        worker = next(worker for worker in ray.workers if worker.node_id[:6] == host(victim.node))
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = int(time.time() * 1000) + 60_000
        accepted, why = GcsClient(address=ray.cluster.address).drain_node(worker.node_id, reason, "spot", deadline)
        assert accepted, why
        now = returned(group, victim.rank)
        assert host(now.node) != host(victim.node)
        assert now.death is not None and now.death.lost == "preempted"
    ray.remove(victim.node, graceful=True)


@pytest.mark.openvino
def test_two_ranks_of_a_language_model(ray: Ray) -> None:
    pytest.importorskip("openvino_genai")

    async def main() -> None:
        config = msgspec.structs.replace(mock(2), engine="openvino", options={})
        async with AsyncLLM(config) as llm:
            assert len({group["bundles_to_node_id"][0] for group in ray.groups()}) == 2

            async def one(index: int) -> tuple[int, int]:
                params = SamplingParams(max_tokens=4 + index % 5, temperature=0.0, ignore_eos=True)
                last = [output async for output in llm.generate(f"{index} is a number, and", params)][-1]
                assert last.finished
                return len(last.outputs[0].token_ids), params.max_tokens or 0

            assert all(got == wanted for got, wanted in await asyncio.gather(*map(one, range(12))))

    asyncio.run(asyncio.wait_for(main(), 120))


HEAD = """
import sys, time
import ray
from test_ray import mock
from outboard import launch_engines

ray.init(address=sys.argv[1], log_to_driver=False)
group = launch_engines(mock(2))
print(*(engine.pid for engine in group.engines), flush=True)
time.sleep(600)
"""


def with_this_module() -> dict[str, str]:
    """Environment of a process that can import this module."""
    path = os.pathsep.join([os.path.dirname(__file__), *(entry for entry in sys.path if entry)])  # noqa: PTH120
    return {**os.environ, "PYTHONPATH": path}


def test_a_head_that_is_killed_leaves_nothing(ray: Ray) -> None:
    argv = [sys.executable, "-c", HEAD, ray.cluster.address]
    with subprocess.Popen(argv, env=with_this_module(), stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        try:
            pids = [int(pid) for pid in head.stdout.readline().split()]
            assert len(pids) == 2
            actors = [actor_of(pid) for pid in pids]
        finally:
            head.kill()
    until(lambda: not any(map(psutil.pid_exists, pids)), "the engine cores have ended")
    until(lambda: not any(actor.is_running() for actor in actors), "the actors have ended")
    until(lambda: not ray.actors() and not ray.groups(), "Ray has noticed")


COPIES = """
import asyncio, multiprocessing, os, sys
import ray
from test_ray import ALPHABET, mock, read
from outboard import AsyncLLM

ray.init(address=sys.argv[1], log_to_driver=False)

async def main():
    async with AsyncLLM(mock(1)) as llm:
        assert await read(llm, 3) == ALPHABET[:3]
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) == 7
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        await asyncio.to_thread(process.join)
        assert process.exitcode == 0
        assert await read(llm, 30) == ALPHABET[:30]
    print("served")

asyncio.run(main())
"""


def test_forked_copies_of_the_head_that_leave_ray_alone_do_no_harm(ray: Ray) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COPIES, ray.cluster.address],
        env=with_this_module(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr
    until(lambda: not ray.actors() and not ray.groups(), "all room is given back")


FORKED_HEAD = """
import os, sys, time
import ray
from test_ray import mock
from outboard import launch_engines
from outboard.launch import head

head._LONE_FOR = 0.5
ray.init(address=sys.argv[1], log_to_driver=False)
group = launch_engines(mock(1, patience=1.0))
copy = os.fork()
if copy == 0:
    sys.stdin.read()
    os._exit(0)
print(copy, group.engines[0].pid, flush=True)
time.sleep(600)
"""


def test_a_forked_copy_of_a_killed_head_does_not_keep_the_room(ray: Ray) -> None:
    # The copy holds the head's connection to Ray, which so takes the head for alive.
    argv = [sys.executable, "-c", FORKED_HEAD, ray.cluster.address]
    env = with_this_module()
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdout is not None
        try:
            copy, engine = (int(pid) for pid in head.stdout.readline().split())
        finally:
            head.kill()
        until(lambda: not psutil.pid_exists(engine), "the engine core has ended")
        until(lambda: not ray.actors() and not ray.groups(), "the room is given back")
        assert psutil.pid_exists(copy)
    until(lambda: not psutil.pid_exists(copy), "the copy has ended")


EMBEDDED = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
import psutil
from outboard import EngineConfig, ParallelConfig, RayPlacement, launch_engines

placement = RayPlacement(address="local", bundles=[{"CPU": 0.25}])
config = EngineConfig(engine="mock", parallel=ParallelConfig(backend="ray", placement=placement))
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
with ThreadPoolExecutor() as pool, pool.submit(launch_engines, config).result() as group:
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen  # Ray has not taken it
    ray = sys.modules["ray"]
    with launch_engines(config):
        pass
    assert ray.is_initialized()  # another group needs it
    print(group.engines[0].state.name, group.join_address)
assert not ray.is_initialized()
psutil.wait_procs(psutil.Process().children(recursive=True), timeout=10)
print(len(psutil.Process().children(recursive=True)))
"""


def test_a_cluster_of_its_own_ends_with_it(ray: Ray) -> None:
    done = subprocess.run([sys.executable, "-c", EMBEDDED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "SIGTERM received" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2].startswith("READY tcp://127.0.0.1:") and lines[-1] == "0", done.stdout
