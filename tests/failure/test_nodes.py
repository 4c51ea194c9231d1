"""Ranks on nodes, as a group sees them: real heads, real nodes, and what kills either."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from fake_head import NodeProcess, all_gone, eventually, free_port
from fake_link import FAR, FakeLink

from outboard import (
    ConfigError,
    EngineConfig,
    EngineGroup,
    EngineState,
    EngineStatus,
    FaultConfig,
    ParallelConfig,
    RankOptions,
    RestartPolicy,
    ScaleRolledBackError,
    launch_engines,
)
from outboard._version import __version__
from outboard.config import NetworkConfig
from outboard.dp.coordinator_state import Publication
from outboard.dp.messages import JoinAsFrontEnd
from outboard.errors import EngineStartupError, EngineStartupTimeout
from outboard.launch.startup import StartCancelled
from outboard.protocol.control import (
    Attach,
    Attached,
    CoordinatorAt,
    EngineProgress,
    Join,
    Welcome,
)
from outboard.protocol.messages import PROTOCOL_VERSION
from outboard.transport.curve import new_token_file
from outboard.transport.sockets import connect_control, make_context, wait_readable
from outboard.transport.spoke import Spoke

pytestmark = pytest.mark.usefixtures("nothing_left")

BOUND = 10.0
PATIENCE = 1.0

Start = Callable[..., NodeProcess]


class Site:
    """A token file, a port for the head, and the nodes that were started."""

    def __init__(self, directory: Path) -> None:
        self.token = directory / "token"
        new_token_file(self.token)
        self.port = free_port()
        self.nodes: list[NodeProcess] = []
        self.host = "127.0.0.1"
        self.ports: range | None = None  # of all other sockets

    def use_link(self) -> list[int]:
        """Nodes are to reach the head by a link; the ports that it must pass on."""
        self.host = FAR
        self.ports = range(self.port + 1, self.port + 9)
        return [self.port, *self.ports]

    def node(self, name: str, *more: str, cwd: Path | None = None) -> NodeProcess:
        node = NodeProcess(f"tcp://{self.host}:{self.port}", self.token, "--name", name, *more, cwd=cwd)
        self.nodes.append(node)
        return node

    def config(self, size: int = 1, local_ranks: int = 0, **changes: Any) -> EngineConfig:
        faults: dict[str, Any] = {
            "startup_timeout": BOUND,
            "restart": RestartPolicy.on_failure(max_restarts=10, backoff=0.05),
            "shutdown_timeout": 3.0,
        }
        parallel = {"data_parallel_size": size, **changes.pop("parallel", {})}
        network = NetworkConfig(
            listen="127.0.0.1",
            advertise=self.host,
            port=self.port,
            ports=f"{self.ports[0]}-{self.ports[-1]}" if self.ports is not None else None,
            token_file=str(self.token),
            local_ranks=local_ranks,
            heartbeat_interval=0.1,
            patience=PATIENCE,
        )
        return EngineConfig(
            engine=changes.pop("engine", "mock"),
            parallel=ParallelConfig(**parallel),
            faults=FaultConfig(**(faults | changes.pop("faults", {}))),
            network=network,
            **changes,
        )


@pytest.fixture
def site(short_tmp: Path) -> Iterator[Site]:
    site = Site(short_tmp)
    yield site
    for node in site.nodes:
        node.close()
    for path in short_tmp.glob("*"):
        if path.is_file():
            path.unlink()


def wait_for(group: EngineGroup, state: EngineState, incarnation: int, rank: int = 0) -> EngineStatus:
    """Waits until a rank is in a state in an incarnation."""

    def look() -> EngineStatus | None:
        status = group.engines[rank]
        return status if (status.state, status.incarnation) == (state, incarnation) else None

    status: EngineStatus = eventually(look)
    return status


def process_of(status: EngineStatus) -> psutil.Process:
    assert status.pid is not None
    return psutil.Process(status.pid)


def test_ranks_here_and_on_nodes(site: Site) -> None:
    one, two = site.node("one", "--ranks", "2"), site.node("two", "--ranks", "2")
    env = [RankOptions(env={"OUTBOARD_TEST_RANK": str(rank)}) for rank in range(3)]
    with launch_engines(site.config(3, local_ranks=1, parallel={"rank_options": env})) as group:
        assert [status.state for status in group.engines] == [EngineState.READY] * 3
        assert group.engines[0].node == ""
        where = {status.node: status.pid for status in group.engines[1:]}
        assert set(where) <= {"one", "two"}  # which joined when is not for us to say
        for node, name in ((one, "one"), (two, "two")):
            assert (where.get(name) is None) or where[name] in [process.pid for process in node.family()]
        for status in group.engines:
            assert process_of(status).environ()["OUTBOARD_TEST_RANK"] == str(status.rank)
        # What only this host can read is told of local ones alone.
        assert [status.progress_fd >= 0 for status in group.engines] == [True, False, False]
        assert eventually(lambda: len(group.stats()["nodes"]) == 2)
        assert sum(node["taken"] for node in group.stats()["nodes"]) == 2
    # Nothing runs any more but the nodes.
    assert all_gone([process for node in (one, two) for process in node.family()[1:]], 5.0)


def test_ranks_spread_over_nodes_that_are_there(site: Site) -> None:
    for name in ("one", "two", "three"):
        site.node(name, "--ranks", "4")
    config = site.config(1, local_ranks=1, parallel={"max_size": 8})
    with launch_engines(config) as group:
        eventually(lambda: len(group.stats()["nodes"]) == 3)
        group.scale(7)
        assert [node["taken"] for node in group.stats()["nodes"]] == [2, 2, 2]
        group.scale(2)
        eventually(lambda: sum(node["taken"] for node in group.stats()["nodes"]) == 1)


def test_an_engine_core_on_a_node_is_killed(site: Site) -> None:
    site.node("one")
    with launch_engines(site.config()) as group:
        pid = group.engines[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        status = wait_for(group, EngineState.READY, 1)
        assert status.death is not None
        assert status.death.reason == (
            f"Engine core rank 0 (pid {pid} on node one) died while running: killed by SIGKILL."
        )
        assert (status.death.exit_code, status.node) == (-9, "one")


def test_a_node_is_killed_and_another_one_takes_its_place(site: Site) -> None:
    node = site.node("one")
    with launch_engines(site.config()) as group:
        family = node.family()
        node.send(signal.SIGKILL)
        assert all_gone(family, 5.0)
        status = group.wait_for(EngineState.RESTARTING, timeout=BOUND)
        assert status.death is not None
        assert "its node one has been silent for 1." in status.death.reason
        status = eventually(lambda: (found := group.engines[0]).waits and found)
        assert status.waits.startswith("no room: rank 0 is to run on a node, and no node has joined")
        site.node("two")
        assert wait_for(group, EngineState.READY, 1).node == "two"
        assert group.engines[0].waits == ""
    assert group.engines[0].state is EngineState.STOPPED


def test_a_node_is_stopped_by_its_operator(site: Site) -> None:
    site.node("one")
    with launch_engines(site.config()) as group:
        site.node("two")
        eventually(lambda: len(group.stats()["nodes"]) == 2)
        began = time.monotonic()
        site.nodes[0].send(signal.SIGTERM)
        status = wait_for(group, EngineState.READY, 1)
        assert status.node == "two"
        assert status.death is not None
        assert status.death.reason.endswith("died while running: its node one is being stopped.")
        assert site.nodes[0].wait()[0] == 0
        assert time.monotonic() - began < 5.0
        eventually(lambda: [node["name"] for node in group.stats()["nodes"]] == ["two"])


def test_a_node_that_hangs_is_replaced_and_ends_what_it_ran_when_it_wakes(site: Site) -> None:
    hung = site.node("one")
    with launch_engines(site.config()) as group:
        old = process_of(group.engines[0])
        hung.send(signal.SIGSTOP)
        site.node("two")
        assert wait_for(group, EngineState.READY, 1).node == "two"
        assert old.is_running()  # nobody there to end it
        hung.send(signal.SIGCONT)
        assert all_gone([old], 5.0)
        eventually(lambda: {node["name"] for node in group.stats()["nodes"]} == {"one", "two"})


def test_shutdown_ends_engine_cores_on_nodes_and_nodes_wait_for_the_next_head(site: Site) -> None:
    node = site.node("one", "--ranks", "2")
    for _ in range(2):
        with launch_engines(site.config(2, faults={"shutdown_timeout": 1.5})) as group:
            engines = [process_of(status) for status in group.engines]
            os.kill(engines[0].pid, signal.SIGSTOP)  # it cannot end by itself
            began = time.monotonic()
        assert 1.5 <= time.monotonic() - began < 6.5  # `shutdown_timeout`, and what a kill takes
        assert all_gone(engines, 1.0)
        assert [status.state for status in group.engines] == [EngineState.STOPPED] * 2
        assert node.process.poll() is None


def test_shutdown_while_the_node_hangs_is_bounded(site: Site) -> None:
    node = site.node("one")
    with launch_engines(site.config()) as group:
        engine = process_of(group.engines[0])
        node.send(signal.SIGSTOP)
        began = time.monotonic()
    assert time.monotonic() - began < 6.0
    node.send(signal.SIGCONT)
    assert all_gone([engine], 5.0)


def test_shutdown_while_ranks_wait_for_room(site: Site) -> None:
    node = site.node("one")
    with launch_engines(site.config()) as group:
        node.send(signal.SIGKILL)
        eventually(lambda: group.engines[0].waits)
        began = time.monotonic()
    assert time.monotonic() - began < 2.0
    assert group.engines[0].state is EngineState.STOPPED


# A head that says which incarnation of rank 0 is ready, and its pid.
HEAD = """
import signal, sys, msgspec
from outboard import EngineConfig, EngineState, FaultConfig, launch_engines
from outboard.config import NetworkConfig
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
faults, network = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[FaultConfig, NetworkConfig])
with launch_engines(EngineConfig(engine="mock", faults=faults, network=network)) as group:
    while True:
        status = group.wait_for(EngineState.READY)
        print(status.incarnation, status.pid, flush=True)
        group.wait_for(EngineState.RESTARTING)
"""


@pytest.fixture
def head(site: Site) -> Iterator[subprocess.Popen[bytes]]:
    """A head in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", HEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as head:
        assert head.stdin is not None
        config = site.config()
        head.stdin.write(msgspec.msgpack.encode((config.faults, config.network)))
        head.stdin.close()
        yield head
        for number in (signal.SIGCONT, signal.SIGTERM):
            head.send_signal(number)
        head.wait(BOUND)


def ready(head: subprocess.Popen[bytes]) -> tuple[int, psutil.Process]:
    assert head.stdout is not None
    incarnation, pid = map(int, head.stdout.readline().split())
    return incarnation, psutil.Process(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_head_that_is_gone_loses_its_engine_cores(
    site: Site, head: subprocess.Popen[bytes], number: signal.Signals, short_tmp: Path
) -> None:
    node = site.node("one")
    _, engine = ready(head)
    head.send_signal(number)
    assert all_gone([engine], PATIENCE + 5.0)
    assert node.process.poll() is None
    if number is signal.SIGKILL:
        with launch_engines(site.config()) as group:  # the same node
            assert group.engines[0].node == "one"
        [left] = short_tmp.glob("outboard-*/control")  # it had no warden here; the next head removes it in a while
        shutil.rmtree(left.parent)
    else:
        head.send_signal(signal.SIGCONT)
        incarnation, engine = ready(head)
        assert incarnation == 1
        assert engine.is_running()


def test_a_group_that_is_dropped_takes_its_engine_cores_with_it(site: Site) -> None:
    site.node("one")
    group = launch_engines(site.config())
    engine = process_of(group.engines[0])
    del group
    gc.collect()
    assert all_gone([engine], 5.0)


def test_a_start_that_waits_for_nodes_can_be_given_up(site: Site) -> None:
    cancel = os.eventfd(0)
    failed: list[BaseException] = []

    def start() -> None:
        try:
            launch_engines(site.config(), cancel_fd=cancel)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        eventually(lambda: any(one.name == "outboard-launcher" for one in threading.enumerate()))
        os.eventfd_write(cancel, 1)
        thread.join(BOUND)
        assert [type(error) for error in failed] == [StartCancelled]
    finally:
        os.close(cancel)


def test_strangers_are_counted(site: Site) -> None:
    site.node("one")
    with launch_engines(site.config()) as group:
        assert group.stats()["refused"] == {}
        with socket.create_connection(("127.0.0.1", site.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            eventually(lambda: group.stats()["refused"] == {"no handshake": 1})
        assert group.engines[0].state is EngineState.READY


# --- the link ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def link(site: Site) -> Iterator[FakeLink]:
    """What is between the head and its nodes."""
    with FakeLink(site.use_link()) as link:
        yield link


def answer_of_engine(group: EngineGroup) -> Attached:
    """Has a front end introduced to rank 0; the answer comes from the engine core, by the head."""
    context = make_context()
    control = Spoke(context, group.addresses.control_address)
    decoder = msgspec.msgpack.Decoder(Welcome | EngineProgress | Attached)
    try:
        token = group.addresses.session_token
        control.send(msgspec.msgpack.encode(Join(PROTOCOL_VERSION, __version__, token, 7, os.getpid())))
        control.send(msgspec.msgpack.encode(Attach(0, group.engines[0].incarnation, 5, "nowhere", "nowhere")))
        deadline = time.monotonic() + BOUND
        while time.monotonic() < deadline:
            control.wait([], BOUND)
            message = decoder.decode((control.receive() or [b""])[0])
            if isinstance(message, Attached):
                return message
        raise AssertionError("the engine core does not answer")
    finally:
        control.close()
        context.term()


def test_a_link_that_is_cut_for_less_than_the_patience(site: Site, link: FakeLink) -> None:
    site.node("one")
    with launch_engines(site.config()) as group:
        before = group.engines
        for _ in range(3):
            link.cut()
            with pytest.raises(TimeoutError):
                group.wait_for(EngineState.RESTARTING, timeout=PATIENCE / 2)
            link.restore()
            with pytest.raises(TimeoutError):
                group.wait_for(EngineState.RESTARTING, timeout=PATIENCE / 2)
        assert group.engines == before


def test_a_link_that_is_cut_for_longer(site: Site, link: FakeLink) -> None:
    site.node("one")
    with launch_engines(site.config()) as group:
        engine = process_of(group.engines[0])
        link.cut()
        assert all_gone([engine], PATIENCE + 5.0)  # the far side stops serving
        status = wait_for(group, EngineState.RESTARTING, 1)
        assert status.death is not None
        assert "its node one has been silent for 1." in status.death.reason
        assert status.waits
        link.restore()
        assert wait_for(group, EngineState.READY, 1).node == "one"
        assert [node["name"] for node in group.stats()["nodes"]] == ["one"]


def test_connections_that_are_reset_are_made_again(site: Site, link: FakeLink) -> None:
    site.node("one")
    with launch_engines(site.config()) as group:
        status = group.engines[0]
        for _ in range(3):
            assert link.reset() >= 1
            with pytest.raises(TimeoutError):
                group.wait_for(EngineState.RESTARTING, timeout=PATIENCE)
        assert group.engines == [status]
        assert answer_of_engine(group)
        os.kill(status.pid or 0, signal.SIGKILL)
        link.reset()  # what the node has to say of it is said again
        assert wait_for(group, EngineState.READY, 1).node == "one"


# --- what cannot start -----------------------------------------------------------------------------------------------


def test_with_no_node_the_first_start_gives_up(site: Site) -> None:
    began = time.monotonic()
    with pytest.raises(EngineStartupTimeout) as caught:
        launch_engines(site.config(2, local_ranks=1, faults={"startup_timeout": 1.0}))
    assert time.monotonic() - began < 6.0
    assert "rank 1 was not started within 1 s: no room: rank 1 is to run on a node, and no node has joined" in str(
        caught.value
    )


def test_too_few_places(site: Site) -> None:
    site.node("one")
    with pytest.raises(EngineStartupTimeout, match=r"no room: rank . .* one \(1 of 1 places taken\)"):
        launch_engines(site.config(2, faults={"startup_timeout": 3.0}))


def test_an_engine_is_found_by_the_search_path_of_the_node_alone(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from outboard.engines.mock import MockEngine\nclass Engine(MockEngine): pass\n"
    for where in ("head", "node"):
        (tmp_path / where).mkdir()
        (tmp_path / where / f"only_on_the_{where}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "head")
    site.node("one", cwd=tmp_path / "node")
    with launch_engines(site.config(engine="only_on_the_node:Engine")) as group:
        assert group.engines[0].node == "one"
    with pytest.raises((ConfigError, EngineStartupError), match="no module named 'only_on_the_head'"):
        launch_engines(site.config(engine="only_on_the_head:Engine"))


def test_ranks_that_step_together_must_be_on_one_host(site: Site) -> None:
    site.node("one")
    with pytest.raises(ConfigError, match="step together, which they can on one host only"):
        launch_engines(site.config(2, local_ranks=1, engine="lockstep_mock"))


def test_ranks_that_step_together_may_all_be_on_the_head(site: Site) -> None:
    with launch_engines(site.config(2, local_ranks=2, engine="lockstep_mock")) as group:
        assert [status.node for status in group.engines] == ["", ""]


def test_a_node_that_wants_another_engine_is_refused(site: Site) -> None:
    node = site.node("one", "--engine", "echo")
    with pytest.raises(EngineStartupTimeout, match="no node has joined"):
        launch_engines(site.config(faults={"startup_timeout": 4.0}))
    status, stderr = node.wait()
    assert status == 2
    assert "willing to run outboard.engines.echo:EchoEngine only, the head runs outboard.engines.mock" in stderr


def test_a_token_file_that_others_can_read(site: Site) -> None:
    site.token.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        launch_engines(site.config())
    assert "chmod 600" in site.node("one").wait()[1]


def test_a_port_that_is_taken(site: Site) -> None:
    site.node("one")
    with launch_engines(site.config()), pytest.raises(OSError, match="is taken"):
        launch_engines(site.config())


# --- scaling ---------------------------------------------------------------------------------------------------------


def test_scaling_needs_room(site: Site) -> None:
    site.node("one", "--ranks", "2")
    with launch_engines(site.config(2, parallel={"max_size": 4})) as group:
        began = time.monotonic()
        with pytest.raises(ScaleRolledBackError, match=r"no room: rank 2 .* one \(2 of 2 places taken\)"):
            group.scale(3, timeout=1.0)
        assert time.monotonic() - began < 5.0
        assert group.data_parallel_size == 2
        assert [status.state for status in group.engines] == [EngineState.READY] * 2
        site.node("two")
        group.scale(3, timeout=BOUND)  # waits for it
        assert group.engines[2].node == "two"
        group.scale(1)
        assert group.data_parallel_size == 1
        eventually(lambda: sum(node["taken"] for node in group.stats()["nodes"]) == 1)


# --- what front ends are told ----------------------------------------------------------------------------------------


def test_front_ends_are_told_how_an_engine_core_goes_on(site: Site) -> None:
    site.node("one")
    with launch_engines(site.config()) as group:
        context = make_context()
        socket = connect_control(context, group.addresses.control_address)
        decoder = msgspec.msgpack.Decoder(Welcome | EngineProgress)

        def hear() -> Any:
            wait_readable(socket, [], BOUND)
            return decoder.decode(socket.recv())

        try:
            token = group.addresses.session_token
            socket.send(msgspec.msgpack.encode(Join(PROTOCOL_VERSION, __version__, token, 0, os.getpid())))
            assert hear().engines[0].node == "one"
            first = hear()
            assert (first.rank, first.incarnation, first.taken) == (0, 0, 0)
            assert first.process in ("sleeping", "running")
            os.kill(group.engines[0].pid or 0, signal.SIGSTOP)
            assert eventually(lambda: hear().process == "stopped")
        finally:
            socket.close(linger=0)
            context.term()


def test_ranks_on_nodes_tell_the_coordinator_of_their_load(site: Site) -> None:
    site.node("one")
    with launch_engines(site.config(2, local_ranks=1, parallel={"client_count": 2})) as group:
        context = make_context()
        control = Spoke(context, group.addresses.control_address)
        decoder = msgspec.msgpack.Decoder(Welcome | EngineProgress | CoordinatorAt)
        place = None
        spoke = None
        try:
            token = group.addresses.session_token
            control.send(msgspec.msgpack.encode(Join(PROTOCOL_VERSION, __version__, token, 0, os.getpid())))
            while not isinstance(place, CoordinatorAt):
                control.wait([], BOUND)
                place = decoder.decode((control.receive() or [b""])[0])
            spoke = Spoke(context, place.address)
            spoke.send(msgspec.msgpack.encode(JoinAsFrontEnd(token, 0)))
            loads: set[int] = set()
            while loads != {0, 1}:
                spoke.wait([], BOUND)
                publication = msgspec.msgpack.decode((spoke.receive() or [b""])[0], type=Publication)
                loads = {load.rank for load in publication.loads}
        finally:
            for one in (control, spoke):
                if one is not None:
                    one.close()
            context.term()


def test_no_secret_is_in_what_a_group_shows(site: Site) -> None:
    site.node("one")
    with launch_engines(site.config()) as group:
        shown = repr(group.addresses) + repr(group.stats()) + repr(group)
        keys = group.addresses.keys
        assert keys is not None
        assert group.join_secret == site.token.read_text().strip()
        for secret in (group.join_secret, keys.server_secret, keys.client_secret):
            assert secret
            assert secret not in shown
