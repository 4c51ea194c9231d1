"""What the head decides about nodes: a desk on a channel that is none."""

from __future__ import annotations

import platform
import re
import select
from typing import Any

import msgspec
import pytest

from outboard._version import __version__
from outboard.errors import EngineDeadError
from outboard.launch.nodes.admission import HeadFacts
from outboard.launch.nodes.desk import NodeDesk
from outboard.launch.nodes.remote import RemoteProcess
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.messages import PROTOCOL_VERSION, EngineInfo, ErrorReport, Ready
from outboard.protocol.nodes import (
    FromHead,
    HeadLeaves,
    HeadPing,
    NodeHello,
    NodeLeaves,
    NodePing,
    NodeRefused,
    NodeWelcome,
    RankExited,
    RankForgotten,
    RankProgress,
    RankStarted,
    SignalRank,
    StartRank,
    WatchRank,
    proof_of,
)

SECRET = "a secret of at least 32 characters"


class Channel:
    """What was said comes by `say`, what is told stays in `told`."""

    fd = -1
    address = "tcp://head:1"

    def __init__(self) -> None:
        self.said: list[tuple[bytes, list[bytes]]] = []
        self.told: list[tuple[bytes, Any]] = []
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(FromHead)
        self.closed = 0

    def pending(self) -> bool:
        return bool(self.said)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        return self.said.pop(0) if self.said else None

    def send(self, receiver: bytes, body: bytes) -> None:
        self.told.append((receiver, self._decoder.decode(body)))

    def close(self, linger_ms: int = 0) -> None:
        self.closed += 1


class Head:
    """A desk, its channel and its clock."""

    def __init__(self, **facts: Any) -> None:
        self.now = 1000.0
        self.channel = Channel()
        known: dict[str, Any] = {
            "secret": SECRET,
            "engine": "outboard.engines.mock:MockEngine",
            "options": {"step_ms": 2.0, "fast": True},
            "control_address": "tcp://head:2",
            "session_token": "token",
            "keys": "keys",
        }
        self.desk = NodeDesk(self.channel, HeadFacts(**(known | facts)), self.now)
        self.progress: list[RankProgress] = []
        self.desk.on_progress = self.progress.append

    def hear(self, peer: bytes, *messages: Any) -> list[Any]:
        """The desk hears this; what it tells that peer."""
        self.channel.said += [(peer, [msgspec.msgpack.encode(message)]) for message in messages]
        self.desk.take_all(self.now)
        return self.told(peer)

    def told(self, peer: bytes) -> list[Any]:
        """What this peer has been told since the last time."""
        found = [message for receiver, message in self.channel.told if receiver == peer]
        self.channel.told = [one for one in self.channel.told if one[0] != peer]
        return found

    def join(self, node_id: str = "n1", **changes: Any) -> list[Any]:
        return self.hear(node_id.encode(), hello(node_id, **changes))

    def pass_time(self, seconds: float, *alive: str) -> None:
        """Second after second, in which these nodes ping."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for node_id in alive:
                self.hear(node_id.encode(), NodePing(node_id))
            self.desk.look(self.now)


def hello(node_id: str = "n1", **changes: Any) -> NodeHello:
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "outboard_version": __version__,
        "python_version": platform.python_version(),
        "node_id": node_id,
        "name": f"name-{node_id}",
        "ranks": 2,
        "proof": proof_of(SECRET, node_id),
    }
    return NodeHello(**(fields | changes))


@pytest.fixture
def head() -> Head:
    return Head()


def over(process: RemoteProcess) -> bool:
    poller = select.poll()
    poller.register(process.sentinel, select.POLLIN)
    return bool(poller.poll(0))


def reason(process: RemoteProcess, phase: str = "running") -> str:
    return process.death(phase, EngineDeadError).reason


def test_a_node_joins_and_is_told_all_that_it_must_know(head: Head) -> None:
    [welcome] = head.join()
    assert welcome == NodeWelcome("n1", "tcp://head:2", "token", "keys", 1.0, 10.0, 10.0, 60.0)
    [room] = head.desk.rooms()
    # It is not known whether the node is still there: a cut may have held up its hello.
    assert (room.name, room.places, room.taken, room.free) == ("name-n1", 2, 0, 0)
    head.hear(b"n1", NodePing("n1"))
    assert head.desk.rooms()[0].free == 2
    assert head.join() == [welcome]  # it says so again where it has had no answer
    assert len(head.desk.rooms()) == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"proof": proof_of("another secret, of 32 characters too", "n1")}, "token is not this head's"),
        ({"proof": proof_of(SECRET, "n2")}, "token is not this head's"),
        ({"proof": b""}, "token is not this head's"),
        ({"outboard_version": "0.0.1"}, f"it has outboard 0.0.1 .* the head has {__version__}"),
        ({"protocol_version": 99}, r"protocol version 99\)"),
        ({"python_version": "3.9.1"}, "it has Python 3.9.1, the head has"),
        ({"ranks": 0}, "room for 0 ranks"),
        ({"ranks": 100_000}, "room for 100000 ranks"),
        ({"name": ""}, "its name must be"),
        ({"name": "two\nlines"}, "its name must be"),
        ({"engine": "my:Engine"}, "willing to run my:Engine only, the head runs outboard.engines.mock:MockEngine"),
        ({"engine": "outboard.engines.mock:MockEngine", "options": {"step_ms": "3"}}, "step_ms=3 only, the head has"),
        ({"engine": "outboard.engines.mock:MockEngine", "options": {"seed": "3"}}, "the head does not set seed"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_by_name(head: Head, changes: dict[str, Any], named: str) -> None:
    [refused] = head.join(**changes)
    assert isinstance(refused, NodeRefused)
    assert refused.final
    assert re.search(named, refused.reason), refused.reason
    assert head.desk.rooms() == []
    assert head.desk.dropped["refused"] == 1


def test_a_node_may_say_what_it_is_willing_to_run(head: Head) -> None:
    options = {"step_ms": "2.0", "fast": "true"}  # as a command line has them
    [answer] = head.join(engine="outboard.engines.mock:MockEngine", options=options)
    assert isinstance(answer, NodeWelcome)


def test_nodes_with_one_name_are_told_apart(head: Head) -> None:
    head.join("first", name="same")
    head.join("second", name="same")
    assert [room.name for room in head.desk.rooms()] == ["same", "same-second"]


def test_a_rank_is_started_and_its_death_reported(head: Head) -> None:
    head.join()
    process = head.desk.start("n1", 3, 1, {"DEVICE": "1"})
    assert head.told(b"n1") == [StartRank(3, 1, {"DEVICE": "1"})]
    assert head.desk.rooms()[0].taken == 1
    head.hear(b"n1", RankStarted(3, 1))
    process.identify(77, 77)
    assert not over(process)
    report = ErrorReport("builtins.ValueError", "too hot\nindeed", "Traceback ...")
    exited = RankExited(3, 1, 77, 1, "a line of stderr\n", report, "")
    assert head.hear(b"n1", exited) == [RankForgotten(3, 1)]
    assert over(process)
    assert head.desk.rooms()[0].taken == 0
    error = process.death("running", EngineDeadError)
    assert error.reason == (
        "Engine core rank 3 (pid 77 on node name-n1) died while running: ValueError: too hot (exit code 1)."
    )
    assert (error.exit_code, error.stderr_tail, error.incarnation) == (1, "a line of stderr\n", 1)
    assert error.remote_traceback == "Traceback ..."
    assert head.hear(b"n1", exited) == [RankForgotten(3, 1)]  # it had not heard that
    process.close()


def test_what_killed_it_and_why_it_could_not_be_started(head: Head) -> None:
    head.join()
    killed = head.desk.start("n1", 0, 0, {})
    never = head.desk.start("n1", 1, 0, {})
    head.hear(b"n1", RankExited(0, 0, 5, -9, verdict="the kernel's out-of-memory killer struck"))
    head.hear(b"n1", RankExited(1, 0, failure="Too many open files"))
    assert reason(killed).endswith("killed by SIGKILL; the kernel's out-of-memory killer struck.")
    assert reason(never) == "Engine core rank 1 cannot be started on node name-n1: Too many open files"
    assert reason(never) != never.death("running", EngineDeadError, "timed out").reason == "timed out"
    for process in (killed, never):
        process.close()


def test_what_was_not_answered_is_said_again(head: Head) -> None:
    head.join()
    process = head.desk.start("n1", 0, 0, {})
    head.told(b"n1")
    head.pass_time(1, "n1")
    assert head.told(b"n1")[-2:] == [HeadPing("n1"), StartRank(0, 0, {})]
    head.hear(b"n1", RankStarted(0, 0))
    process.terminate()
    process.terminate()
    assert head.told(b"n1") == [SignalRank(0, 0, False)]
    head.pass_time(1, "n1")
    assert head.told(b"n1")[-2:] == [HeadPing("n1"), SignalRank(0, 0, False)]
    process.watch(7, Ready("", EngineInfo(), [], 5, 6, 12))
    process.kill()
    head.pass_time(1, "n1")
    assert head.told(b"n1")[-3:] == [HeadPing("n1"), WatchRank(0, 0, 7, 5, 6, 12), SignalRank(0, 0, True)]
    head.hear(b"n1", RankExited(0, 0, 7, -9))
    head.told(b"n1")
    head.pass_time(1, "n1")
    assert head.told(b"n1") == [HeadPing("n1")]
    process.close()


def test_a_kill_that_comes_before_the_start_is_all_that_is_said(head: Head) -> None:
    head.join()
    process = head.desk.start("n1", 0, 0, {})
    process.kill()
    head.told(b"n1")
    head.pass_time(1, "n1")
    assert head.told(b"n1") == [HeadPing("n1"), SignalRank(0, 0, True)]
    process.close()


def test_a_silent_node_is_lost_after_the_patience_and_others_are_not(head: Head) -> None:
    head.join("n1")
    head.join("n2")
    lost, kept = head.desk.start("n1", 0, 0, {}), head.desk.start("n2", 1, 0, {})
    lost.identify(9, 9)
    head.pass_time(9, "n2")
    assert not over(lost)
    head.pass_time(1, "n2")
    assert over(lost)
    assert reason(lost) == (
        "Engine core rank 0 (pid 9 on node name-n1) died while running: its node name-n1 has been silent for 10.0 s."
    )
    assert not over(kept)
    assert [room.name for room in head.desk.rooms()] == ["name-n2"]
    head.pass_time(100, "n2")
    assert not over(kept)
    for process in (lost, kept):
        process.close()


def test_a_node_that_was_given_up_is_told_so_and_may_join_again(head: Head) -> None:
    head.join("n1")
    head.pass_time(10)
    head.told(b"n1")
    [refused] = head.hear(b"n1", NodePing("n1"))
    assert isinstance(refused, NodeRefused)
    assert not refused.final
    assert head.hear(b"n1", NodeLeaves("n1", "has heard nothing", True)) == []  # its last words need no answer
    assert head.desk.dropped == {"unknown node": 1}
    [welcome] = head.join("n2", replaces=["n1"])
    assert isinstance(welcome, NodeWelcome)
    assert len(head.desk.rooms()) == 1


def test_a_node_that_joins_anew_has_lost_what_it_ran(head: Head) -> None:
    head.join("n1")
    process = head.desk.start("n1", 0, 0, {})
    head.join("n2", name="name-n1", replaces=["n0", "n1"])
    assert over(process)
    assert "its node name-n1 had lost this head, and has joined again" in reason(process)
    assert [(room.node_id, room.name, room.taken) for room in head.desk.rooms()] == [("n2", "name-n1", 0)]
    process.close()


def test_a_connection_that_is_a_new_one_is_found_by_the_ping(head: Head) -> None:
    head.join("n1")
    process = head.desk.start("n1", 0, 0, {})
    assert head.hear(b"new", RankExited(0, 0, 5, 1)) == []  # who is that?
    assert not over(process)
    # It is about to lose patience, and so hears at once that the head is there.
    assert head.hear(b"new", NodePing("n1"), RankExited(0, 0, 5, 1)) == [HeadPing("n1"), RankForgotten(0, 0)]
    assert head.hear(b"new", NodePing("n1")) == []
    assert over(process)
    head.pass_time(1)
    assert head.told(b"new") == [HeadPing("n1")]
    process.close()


def test_a_node_that_leaves_gets_no_ranks_and_is_named_as_the_cause(head: Head) -> None:
    head.join("n1")
    process = head.desk.start("n1", 0, 0, {})
    wanted = head.desk.start("n1", 1, 0, {})
    wanted.terminate()
    head.hear(b"n1", NodeLeaves("n1", "is being stopped", False))
    assert head.desk.rooms()[0].free == 0
    head.hear(b"n1", RankExited(0, 0, 8, 0), RankExited(1, 0, 9, 0))
    assert reason(process).endswith("died while running: its node name-n1 is being stopped.")
    assert reason(wanted, "stopping").endswith("died while stopping: exit code 0.")
    head.hear(b"n1", NodeLeaves("n1", "is being stopped", True))
    assert head.desk.rooms() == []
    for one in (process, wanted):
        one.close()


def test_a_process_that_is_given_up_keeps_its_place_until_it_has_ended(head: Head) -> None:
    head.join("n1", ranks=1)
    process = head.desk.start("n1", 0, 0, {})
    process.end(0)
    assert process.death("running", EngineDeadError).exit_code == -9
    process.close()
    assert head.desk.rooms()[0].free == 0
    head.pass_time(1, "n1")
    assert SignalRank(0, 0, True) in head.told(b"n1")
    head.hear(b"n1", RankExited(0, 0, 4, -9))
    assert head.desk.rooms()[0].free == 1


def test_progress_is_passed_on_of_what_runs(head: Head) -> None:
    head.join()
    process = head.desk.start("n1", 0, 2, {})
    good = RankProgress(0, 2, 7, 0.1, 1, {0: 5}, "running", 0.9)
    head.hear(b"n1", good, RankProgress(0, 1, 7, 0.1, 1, {}, "running", 0.9))
    head.hear(b"stranger", good)
    assert head.progress == [good]
    assert head.desk.dropped == {"unknown rank": 1, "stranger": 1}
    process.close()


def test_junk_is_counted(head: Head) -> None:
    head.channel.said += [(b"x", [b"\xc1"]), (b"x", []), (b"x", [b"\x90", b"\x90"]), (b"x", [b"\x91\xa1z"])]
    head.desk.take_all(head.now)
    assert head.desk.dropped["undecodable"] == 4
    assert head.channel.told == []


def test_when_the_head_ends_all_nodes_are_told_once(head: Head) -> None:
    head.join("n1")
    process = head.desk.start("n1", 0, 0, {})
    head.told(b"n1")
    head.desk.close()
    head.desk.close()
    assert head.told(b"n1") == [HeadLeaves("n1")]
    assert head.channel.closed == 1
    assert over(process)
    process.kill()  # as whoever still has it may
    process.close()


def test_no_secret_is_shown() -> None:
    assert SECRET not in repr(Head().desk._facts)
