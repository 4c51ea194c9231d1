"""Real engine cores that are told to change the size of their group, or to leave it, by a launcher made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_launcher import BOUND, FakeLauncher, FrontEnd, eventually

from outboard.protocol.control import CoordinatorAt, CoordinatorReady
from outboard.protocol.environment import CoordinatorEnvironment
from outboard.protocol.messages import EEP_NOTIFICATION_CALL_ID, RECONFIGURE_FINISHED, SHUTDOWN_COMPLETE
from outboard.protocol.scaling import (
    Drained,
    DrainRank,
    Quiesce,
    Quiet,
    Reconfigure,
    Reconfigured,
    ResumeRank,
)
from outboard.transport.sockets import ControlServer, make_context


class Group:
    """Engine cores, and a coordinator of their own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.launchers: list[FakeLauncher] = []
        self.place = CoordinatorAt(0, f"ipc://{path}/coordinator")
        self._coordinator: subprocess.Popen[bytes] | None = None

    def start_coordinator(self) -> None:
        context = make_context()
        control = ControlServer(context, f"ipc://{self._path}/for-it")
        who = CoordinatorEnvironment(f"ipc://{self._path}/for-it", "secret", self.place.address, 0)
        self._coordinator = subprocess.Popen(
            [sys.executable, "-m", "outboard.dp.coordinator"], env={**os.environ, **who.to_environ()}
        )
        control.wait([], BOUND)
        message = control.receive()
        assert message is not None
        msgspec.msgpack.decode(message[1][0], type=CoordinatorReady)
        control.close()
        context.term()

    def start(self, rank: int, engine: str, *, joining: bool = False, size: int = 1, **options: Any) -> FakeLauncher:
        init = {"elastic": True, "joining": joining, "data_parallel_size": size, "dp_sync_interval": 4}
        init |= self.facts(0)
        if joining:
            init["step_sync_address"] = "nowhere"  # it must not look for it
        launcher = FakeLauncher(self._path, engine, rank=rank, init=init, **options)
        self.launchers.append(launcher)
        assert launcher.ready.lockstep == launcher.ready.can_reinitialize == (engine == "lockstep_mock")
        return launcher

    def facts(self, group: int) -> dict[str, Any]:
        return {
            "group": group,
            "step_sync_address": f"ipc://{self._path}/sync-{group}",
            "rendezvous": f"{self._path}/meet-{group}",
        }

    def reconfigure(self, version: int, size: int, group: int) -> Reconfigure:
        return Reconfigure(version, size, **self.facts(group))

    def close(self) -> None:
        for launcher in self.launchers:
            launcher.close()
        if self._coordinator is not None:
            self._coordinator.kill()
            self._coordinator.wait()


@pytest.fixture
def group(short_tmp: Path) -> Iterator[Group]:
    group = Group(short_tmp)
    yield group
    group.close()


def letters(stop: int) -> list[int]:
    return [97 + i % 26 for i in range(stop)]


def notifications(client: FrontEnd) -> list[list[Any]]:
    return [answer.result for answer in client.answers() if answer.call_id == EEP_NOTIFICATION_CALL_ID]


def answers(client: FrontEnd, call_id: int) -> Callable[[], list[Any]]:
    return lambda: [answer.result for answer in client.answers() if answer.call_id == call_id]


def quiet(launcher: FakeLauncher, version: int) -> Quiet:
    answer: Quiet = launcher.receive(Quiet)
    assert (answer.session_token, answer.version) == ("secret", version)
    return answer


def test_a_rank_that_leaves_says_when_it_is_empty_and_ends_in_peace(group: Group) -> None:
    launcher = group.start(1, "mock", step_ms=1)
    clients = [launcher.attach(index, index) for index in range(2)]
    clients[0].add(0, 200)
    launcher.tell(Reconfigure(1, 3))
    assert launcher.receive(Reconfigured) == Reconfigured("secret", 1, 1)
    launcher.tell(DrainRank(2))
    for client in clients:
        client.leave()
    clients[0].send_frames(b"\x04", msgspec.msgpack.encode([client.epoch + 9]))  # not of this epoch
    assert launcher.receive(Drained) == Drained("secret", 1, 2)
    assert launcher.progress(0).taken == 3
    clients[0].receive_until(lambda: clients[0].finished(0))
    assert clients[0].tokens() == {0: [*letters(200), "length"]}
    launcher.process.terminate()
    for client in clients:
        client.receive_until(lambda client=client: len(notifications(client)) == 2)
        assert notifications(client) == [[RECONFIGURE_FINISHED, 1], [SHUTDOWN_COMPLETE, 1]]
    assert launcher.stop() == 0


def test_a_lockstep_group_of_one_two_and_one_again(group: Group) -> None:
    group.start_coordinator()
    old = group.start(0, "lockstep_mock", step_ms=1)
    client = old.attach()
    old.tell(group.place)
    client.add(0, 600)
    client.receive_until(lambda: len(client.tokens()[0]) > 20)

    new = group.start(1, "lockstep_mock", joining=True, size=2, step_ms=1)
    other = new.attach()
    old.tell(Quiesce(1))
    quiet(old, 1)
    steps = old.progress().steps
    for launcher in (old, new):
        launcher.tell(group.reconfigure(2, 2, 1))
    for rank, launcher in enumerate((old, new)):
        assert launcher.receive(Reconfigured) == Reconfigured("secret", rank, 2)
    assert (old.progress().steps, new.progress().steps) == (steps, 0)
    other.add(0, 300)
    new.tell(group.place)
    for launcher in (old, new):
        launcher.tell(ResumeRank(3))
    other.receive_until(lambda: other.finished(0))
    assert other.tokens() == {0: [*letters(300), "length"]}
    assert new.progress().steps >= 300

    new.tell(DrainRank(4))
    other.leave()
    assert new.receive(Drained) == Drained("secret", 1, 4)
    for launcher in (old, new):
        launcher.tell(Quiesce(5))
    for launcher in (old, new):
        quiet(launcher, 5)
    assert new.stop() == 0
    other.receive_until(lambda: [SHUTDOWN_COMPLETE, 1] in notifications(other))
    client.call(1, "pause_generation", "keep")
    client.call(2, "is_paused")
    assert client.receive_until(answers(client, 2)) == [True]
    assert answers(client, 1)() == [], "answered although the group may not be"
    old.tell(group.reconfigure(6, 1, 2), ResumeRank(7))
    assert old.receive(Reconfigured) == Reconfigured("secret", 0, 6)
    assert client.receive_until(answers(client, 1)) == [None]
    steps = old.progress().steps
    client.call(3, "get_stats")
    stats = client.receive_until(answers(client, 3))[0]
    assert (stats["paused"], stats["phase"], old.progress().steps) == (True, "idle", steps)

    old.tell(Quiesce(8))
    quiet(old, 8)
    old.tell(ResumeRank(9))
    client.call(4, "resume_generation")
    client.receive_until(lambda: client.finished(0))
    assert client.tokens() == {0: [*letters(600), "length"]}
    assert notifications(client) == [[RECONFIGURE_FINISHED, 0]] * 2
    assert old.stop() == 0


def test_what_cannot_be_is_answered_and_the_old_size_is_taken_again(group: Group) -> None:
    group.start_coordinator()
    rank = group.start(0, "lockstep_mock", step_ms=1, barrier_timeout=0.2)
    client = rank.attach()
    rank.tell(group.place, group.reconfigure(1, 2, 1))
    assert "rest" in rank.receive(Reconfigured).error
    client.add(0, 300)
    client.receive_until(lambda: client.tokens()[0])
    rank.tell(Quiesce(2))
    quiet(rank, 2)
    rank.tell(group.reconfigure(3, 2, 1))
    assert "ranks [1]" in rank.receive(Reconfigured).error
    rank.tell(group.reconfigure(4, 1, 2))
    assert rank.receive(Reconfigured) == Reconfigured("secret", 0, 4)
    rank.tell(ResumeRank(5))
    client.receive_until(lambda: client.finished(0))
    assert client.tokens() == {0: [*letters(300), "length"]}
    assert notifications(client) == [[RECONFIGURE_FINISHED, 0]]


def test_a_wish_to_rest_is_taken_back_and_comes_again(group: Group) -> None:
    group.start_coordinator()
    ranks = [group.start(rank, "lockstep_mock", size=2, step_ms=1) for rank in range(2)]
    client = ranks[0].attach()
    for rank in ranks:
        rank.tell(group.place)
    client.add(0, 300)
    client.receive_until(lambda: client.tokens()[0])
    ranks[0].tell(Quiesce(1))  # the other one is not reached
    eventually(lambda: ranks[0].progress().steps > 40)
    ranks[0].tell(ResumeRank(2), Quiesce(3))
    ranks[1].tell(Quiesce(1))
    eventually(lambda: ranks[0].progress().steps > 80)
    ranks[1].tell(ResumeRank(2), Quiesce(3))
    for rank in ranks:
        quiet(rank, 3)
    assert ranks[0].progress().steps == ranks[1].progress().steps
    for rank in ranks:
        rank.tell(ResumeRank(4))
    client.receive_until(lambda: client.finished(0))
    assert client.tokens() == {0: [*letters(300), "length"]}


def test_a_new_rank_that_is_not_wanted_after_all_ends_at_once(group: Group) -> None:
    rank = group.start(1, "lockstep_mock", joining=True, size=2)
    client = rank.attach()
    client.add(0, 5)
    eventually(lambda: rank.progress().taken == 1)
    assert rank.progress().steps == 0
    assert rank.stop() == 0
