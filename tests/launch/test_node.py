"""A real node with real engine cores, and a head by hand: what it is told, what it tells, and what ends whom."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fake_head import BOUND, INTERVAL, PATIENCE, FakeHead, NodeProcess, all_gone, eventually, free_port

from outboard.launch.nodes.node import Node
from outboard.protocol.messages import Failed, Hello, Ready
from outboard.protocol.nodes import (
    HeadLeaves,
    NodeHello,
    NodeLeaves,
    NodePing,
    NodeRefused,
    RankExited,
    RankForgotten,
    RankProgress,
    RankStarted,
    SignalRank,
    StartRank,
    WatchRank,
)
from outboard.protocol.progress import IDLE
from outboard.transport.curve import new_token_file, read_token_file
from outboard.transport.node_server import node_context

pytestmark = pytest.mark.usefixtures("nothing_left")

Join = Callable[..., NodeProcess]


@pytest.fixture
def head(short_tmp: Path) -> Iterator[FakeHead]:
    head = FakeHead(short_tmp)
    yield head
    head.close()
    head.token.unlink()
    (short_tmp / "engine.py").unlink(missing_ok=True)
    shutil.rmtree(short_tmp / "__pycache__", ignore_errors=True)
    for path in short_tmp.glob("control-*"):
        path.unlink()


@pytest.fixture
def join(head: FakeHead, short_tmp: Path) -> Iterator[Join]:
    """Starts a node that joins the head."""
    nodes: list[NodeProcess] = []

    def join(*more: str, cwd: Path | None = None) -> NodeProcess:
        node = NodeProcess(head.address, head.token, *more, cwd=cwd)
        nodes.append(node)
        head.hear(NodeHello)
        return node

    yield join
    for node in nodes:
        node.close()


def watch(hello: Hello, ready: Ready) -> WatchRank:
    """Has an engine core watched that has just said this."""
    return WatchRank(hello.rank, hello.incarnation, hello.pid, ready.progress_fd, ready.stack_fd, ready.stack_signal)


def test_it_says_what_it_is(head: FakeHead, join: Join) -> None:
    join("--name", "gpu-1", "--ranks", "3", "--engine", "mock", "--option", "step_ms=2")
    [hello] = head.hellos
    assert (hello.name, hello.ranks, hello.replaces) == ("gpu-1", 3, [])
    assert (hello.engine, hello.options) == ("outboard.engines.mock:MockEngine", {"step_ms": "2"})
    assert head.hear(NodePing).node_id == hello.node_id
    assert head.hear(NodePing).node_id == hello.node_id


def test_it_starts_an_engine_core_that_says_ready_to_the_head(head: FakeHead, join: Join) -> None:
    node = join()
    hello, ready = head.start(4)
    assert isinstance(ready, Ready)
    head.hear(RankStarted)
    assert hello.pid in [one.pid for one in node.family()]
    # Whatever must stay secret has left the environment by now; what the head gave is there.
    environ = psutil.Process(hello.pid).environ()
    assert environ["OUTBOARD_TEST_VARIABLE"] == "of its own"
    assert not any("session" in argument or "tcp://" in argument for argument in psutil.Process(hello.pid).cmdline())
    head.tell(StartRank(4, 0, {}))  # said twice: it answers, and starts no other
    assert head.hear(RankStarted) == RankStarted(4, 0)
    assert len([one for one in node.family() if one.cmdline()[1:] == ["-P", "-m", "outboard.engine"]]) == 1


def test_how_an_engine_core_died_is_told_until_the_head_knows(head: FakeHead, join: Join, short_tmp: Path) -> None:
    join(cwd=short_tmp)
    (short_tmp / "engine.py").write_text(
        "import sys\nfrom outboard.engines.mock import MockEngine\n"
        "class Broken(MockEngine):\n"
        "    def __init__(self):\n"
        "        print('it is about to break', file=sys.stderr)\n"
        "        raise ValueError('too hot')\n"
    )
    hello, failed = head.start(0, "engine:Broken")  # found by the node's own working directory
    assert isinstance(failed, Failed)
    assert failed.report.message == "too hot"
    exited = head.hear(RankExited)
    assert (exited.rank, exited.pid, exited.exit_code) == (0, hello.pid, 1)
    assert "it is about to break" in exited.stderr_tail
    assert exited.report.type == "ValueError"
    assert head.hear(RankExited) == exited  # the head has not said that it knows
    head.tell(RankForgotten(0, 0))
    head.hear(NodePing)
    head.heard.clear()
    head.hear(NodePing)
    assert not any(isinstance(message, RankExited) for message in head.heard)


def test_an_engine_core_that_is_killed(head: FakeHead, join: Join) -> None:
    node = join("--ranks", "2")
    first, _ = head.start(0)
    second, _ = head.start(1)
    os.kill(first.pid, signal.SIGKILL)
    exited = head.hear(RankExited)
    assert (exited.rank, exited.exit_code, exited.pid) == (0, -9, first.pid)
    assert second.pid in [one.pid for one in node.family()]


def test_the_head_ends_engine_cores(head: FakeHead, join: Join) -> None:
    join("--ranks", "2")
    head.start(0)
    stopped, _ = head.start(1)
    head.tell(SignalRank(0, 0, False))
    assert head.hear(RankExited) == RankExited(0, 0, head.ready[0, 0][0].pid, 0)
    head.tell(RankForgotten(0, 0))
    os.kill(stopped.pid, signal.SIGSTOP)
    head.tell(SignalRank(1, 0, False), SignalRank(1, 0, True))
    while (exited := head.hear(RankExited)).rank == 0:
        pass  # it is told again until the node has heard that it was taken note of
    assert (exited.rank, exited.exit_code) == (1, -9)


def test_what_must_not_be_started_any_more_is_not(head: FakeHead, join: Join) -> None:
    node = join()
    head.tell(SignalRank(0, 0, True), StartRank(0, 0, {}))
    exited = head.hear(RankExited)
    assert (exited.pid, exited.exit_code) == (None, None)
    assert "not wanted" in exited.failure
    head.hear(NodePing)
    assert len(node.family()) == 1


def test_more_than_it_has_room_for_is_refused(head: FakeHead, join: Join) -> None:
    join()
    head.start(0)
    head.tell(StartRank(1, 0, {}))
    assert "it has 1 places" in head.hear(RankExited).failure


def test_what_cannot_be_started_is_told(head: FakeHead, join: Join) -> None:
    node = join()
    head.tell(StartRank(0, 0, {"NOT=A=NAME": "\0"}))
    assert head.hear(RankExited).failure
    assert len(node.family()) == 1


def test_it_tells_how_an_engine_core_goes_on(head: FakeHead, join: Join) -> None:
    join()
    hello, ready = head.start(0)
    head.tell(watch(hello, ready))
    progress = head.hear(RankProgress)
    assert (progress.rank, progress.incarnation, progress.activity, progress.taken) == (0, 0, IDLE, {})
    assert progress.process in ("sleeping", "running")
    os.kill(hello.pid, signal.SIGSTOP)
    eventually(lambda: head.hear(RankProgress).process == "stopped")
    assert head.hear(RankProgress).age > progress.age


def test_when_the_node_is_killed_nothing_is_left(head: FakeHead, join: Join) -> None:
    node = join("--ranks", "2")
    head.start(0)
    head.start(1)
    family = node.family()
    assert len(family) >= 7  # two wardens of two halves, two engine cores
    node.send(signal.SIGKILL)
    assert all_gone(family, 5.0)


def test_a_head_that_falls_silent_loses_the_engine_cores_and_may_come_back(head: FakeHead, join: Join) -> None:
    node = join()
    head.start(0)
    engines = node.family()[1:]
    first = head.node_id
    silent_from = time.monotonic()
    assert all_gone(engines, PATIENCE + 5.0)  # nobody takes or says anything here
    assert time.monotonic() - silent_from > PATIENCE - 2 * INTERVAL
    again = head.hear(NodeHello)
    assert again.replaces == [first] != [again.node_id]
    head.ready.clear()
    head.start(0)  # the same incarnation, as of another head


def test_a_short_silence_does_nothing(head: FakeHead, join: Join) -> None:
    node = join()
    head.start(0)
    engines = node.family()[1:]
    for _ in range(3):
        assert not all_gone(engines, PATIENCE / 2)
        head.hear(NodePing)
        head.hear(NodePing)
        head.take()
    assert len(head.hellos) == 1


def test_a_node_that_was_stopped_for_long_does_not_take_its_head_for_lost(head: FakeHead, join: Join) -> None:
    node = join()
    head.start(0)
    engines = node.family()[1:]
    node.send(signal.SIGSTOP)
    until = time.monotonic() + 3 * PATIENCE
    while time.monotonic() < until:
        head.take()
        time.sleep(INTERVAL / 10)
    node.send(signal.SIGCONT)
    head.heard.clear()
    for _ in range(5):
        head.hear(NodePing)
    assert not all_gone(engines, 0.1)
    assert len(head.hellos) == 1


def test_a_head_that_does_not_know_it_any_more_ends_the_engine_cores(head: FakeHead, join: Join) -> None:
    node = join()
    head.start(0)
    engines = node.family()[1:]
    head.tell(NodeRefused(head.node_id, "this head does not know it", False))
    assert all_gone(engines, 5.0)
    assert head.hear(NodeHello).node_id != head.hellos[0].node_id


def test_a_head_that_ends_ends_the_engine_cores_and_the_next_one_is_joined(short_tmp: Path) -> None:
    port = free_port()
    head = FakeHead(short_tmp, port)
    node = NodeProcess(head.address, head.token)
    try:
        head.hear(NodeHello)
        head.start(0)
        engines = node.family()[1:]
        head.tell(HeadLeaves(head.node_id))
        assert all_gone(engines, 5.0)
        head.close()
        head = FakeHead(short_tmp, port)
        head.hear(NodeHello)
        head.start(0)
    finally:
        node.close()
        head.close()
        head.token.unlink()
        for path in short_tmp.glob("control-*"):
            path.unlink()


def test_sigterm_lets_engine_cores_end_and_tells_the_head(head: FakeHead, join: Join) -> None:
    node = join("--ranks", "2")
    head.start(0)
    head.start(1)
    node.send(signal.SIGTERM)
    assert not head.hear(NodeLeaves).over
    assert {head.hear(RankExited).exit_code, head.hear(RankExited).exit_code} == {0}
    assert eventually(lambda: head.hear(NodeLeaves).over)
    status, stderr = node.wait()
    assert status == 0, stderr


def test_a_node_that_is_being_stopped_starts_nothing(head: FakeHead, join: Join) -> None:
    node = join("--ranks", "2")
    hello, _ = head.start(0)
    os.kill(hello.pid, signal.SIGSTOP)  # it takes its time
    node.send(signal.SIGTERM)
    head.hear(NodeLeaves)
    head.tell(StartRank(1, 0, {}))
    assert "is being stopped" in head.hear(RankExited).failure
    os.kill(hello.pid, signal.SIGCONT)
    assert node.wait()[0] == 0


def test_a_second_signal_ends_at_once(head: FakeHead, join: Join) -> None:
    node = join()
    hello, _ = head.start(0)
    os.kill(hello.pid, signal.SIGSTOP)  # it cannot end by itself
    node.send(signal.SIGTERM)
    head.hear(NodeLeaves)
    began = time.monotonic()
    node.send(signal.SIGTERM)
    assert head.hear(RankExited).exit_code == -9
    assert node.wait()[0] == 0
    assert time.monotonic() - began < 4.0  # the five seconds of `shutdown_timeout` were not waited for


def test_a_node_that_never_joined_ends_at_sigterm(short_tmp: Path) -> None:
    token = short_tmp / "token"
    new_token_file(token)
    node = NodeProcess(f"tcp://127.0.0.1:{free_port()}", token)
    try:
        assert node.process.stderr is not None
        assert "no head has answered" in node.process.stderr.readline()
        node.send(signal.SIGTERM)
        assert node.wait(5.0)[0] == 0
    finally:
        node.close()
        token.unlink()


def test_a_head_whose_name_is_not_known_yet_is_tried_on(short_tmp: Path) -> None:
    token = short_tmp / "token"
    new_token_file(token)
    node = NodeProcess("tcp://head.invalid:5570", token)
    try:
        assert node.process.stderr is not None
        assert "no head has answered" in node.process.stderr.readline()
        node.send(signal.SIGTERM)
        assert node.wait(5.0)[0] == 0
    finally:
        node.close()
        token.unlink()


def test_a_node_may_run_in_a_thread(head: FakeHead) -> None:
    secret = read_token_file(head.token)
    context = node_context(secret)
    node = Node(context, head.address, secret, name="threaded")
    thread = threading.Thread(target=node.run)
    thread.start()
    try:
        assert head.hear(NodeHello).name == "threaded"
        head.start(0)
        eventually(lambda: node.joined)
        node.stop()
        assert head.hear(RankExited).exit_code == 0
    finally:
        node.stop()
        thread.join(BOUND)
        assert not thread.is_alive()
        node.close()
        context.term()


def test_a_node_that_is_refused_says_why_and_ends(head: FakeHead, join: Join) -> None:
    # It was welcomed, so its head would not do that; what counts is the answer to a hello.
    head.tell = lambda *messages: FakeHead.tell(head, NodeRefused("", "it has outboard 0, the head has 1", True))  # type: ignore[method-assign]
    node = join()
    status, stderr = node.wait()
    assert status == 2
    assert "does not take this node: it has outboard 0, the head has 1" in stderr


def test_another_secret_is_of_no_use(head: FakeHead, short_tmp: Path) -> None:
    token = short_tmp / "other"
    new_token_file(token)
    node = NodeProcess(head.address, token)
    try:
        eventually(lambda: sum(head.server.refused.values()))
        head.take()
        assert head.hellos == []
        assert node.process.stderr is not None
        assert "do both have the same token file" in node.process.stderr.readline()
    finally:
        node.close()
        token.unlink()
