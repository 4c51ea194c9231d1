"""A real engine-core process, with a launcher and front ends that are made by hand (fake_launcher.py)."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from fake_launcher import FakeLauncher, FrontEnd, eventually

from outboard.protocol.control import DetachClient
from outboard.protocol.progress import BUSY, FROZEN, IDLE, MAX_SLOTS
from outboard.transport.unix_inputs import UnixInputSender
from outboard.transport.zmq_inputs import ZmqInputSender
from support import SOCKETS

Start = Callable[..., FakeLauncher]


def letters(start: int, stop: int) -> list[int]:
    return [97 + i % 26 for i in range(start, stop)]


@pytest.fixture
def start(short_tmp: Path) -> Iterator[Start]:
    """Starts an engine core, and ends it after the test."""
    launchers: list[FakeLauncher] = []

    def start(engine: str = "echo", **options: Any) -> FakeLauncher:
        launchers.append(FakeLauncher(short_tmp, engine, **options))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.close()


# --- coming and going ------------------------------------------------------------------------------------------------


def test_two_clients_stream_at_once(start: Start) -> None:
    launcher = start("mock", step_ms=1)
    clients = [launcher.attach(index, index) for index in range(2)]
    for number, client in enumerate(clients):
        for handle in range(4):
            client.add(handle, 20 + number + handle)
    for number, client in enumerate(clients):
        client.receive_until(lambda client=client: client.finished(0, 1, 2, 3))
        expected = {handle: [*letters(0, 20 + number + handle), "length"] for handle in range(4)}
        assert client.tokens() == expected
    assert launcher.stop() == 0


def test_a_burst_is_taken_to_its_end_and_delays_no_other(start: Start) -> None:
    launcher = start("mock", start_after=1001)
    many, one = launcher.attach(0, 0), launcher.attach(1, 1)
    for handle in range(1000):
        many.add(handle, 1)
    eventually(lambda: launcher.progress(0).taken == 1000)
    one.add(0, 1)
    one.receive_until(lambda: one.finished(0))
    many.receive_until(lambda: many.finished(*range(1000)))


def test_a_client_that_is_gone_is_detached_and_another_takes_its_place(start: Start) -> None:
    launcher = start("mock", step_ms=1)
    gone, stays = launcher.attach(0, 0), launcher.attach(1, 1)
    gone.add(0, 1_000_000)
    stays.add(0, 300)
    gone.receive_until(lambda: len(gone.tokens()[0]) > 3)
    gone.close()  # as a front end that was killed: no word to anybody
    launcher.detach(gone)
    again = launcher.attach(0, 0)
    again.add(0, 5)
    again.receive_until(lambda: again.finished(0))
    assert again.tokens() == {0: [*letters(0, 5), "length"]}
    stays.receive_until(lambda: stays.finished(0))
    assert stays.tokens() == {0: [*letters(0, 300), "length"]}
    stays.call(0, "get_stats")
    stats = stays.receive_until(stays.answers)[0].result
    assert (stats["requests"], stats["running"]) == (0, 0)
    assert launcher.stop() == 0


def test_a_client_that_is_not_detached_gives_way_to_one_with_its_index(start: Start) -> None:
    launcher = start("mock", step_ms=1)
    old = launcher.attach(3, 0)
    old.add(0, 1_000_000)
    old.receive_until(lambda: old.tokens()[0])
    new = launcher.attach(3, 0)
    new.add(0, 5)
    new.receive_until(lambda: new.finished(0))
    assert new.tokens() == {0: [*letters(0, 5), "length"]}
    launcher.detach(old)  # late: its epoch is over
    new.call(0, "get_stats")
    assert new.receive_until(new.answers)[0].result["requests"] == 0


def test_an_unknown_client_is_detached_without_ado(start: Start) -> None:
    launcher = start()
    client = launcher.attach()
    for index, epoch in ((0, client.epoch + 1), (7, client.epoch), (-1, 0)):
        launcher.send_body(msgspec.msgpack.encode(DetachClient(index, epoch)))
    client.add(0, 3)
    client.receive_until(lambda: client.finished(0))
    assert client.tokens() == {0: [1, 2, 3, "stop"]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"slot": MAX_SLOTS}, "slot"),
        ({"slot": -1}, "slot"),
        ({"input_address": "nonsense"}, "ZeroMQ"),
        ({"output_address": "ipc://" + "x" * 200}, "ZeroMQ"),
        *([({"identity": b""}, "ZeroMQ")] if SOCKETS == "zmq" else []),
        ({"epoch": 1}, "epoch"),
    ],
    ids=str,
)
def test_a_client_that_cannot_be_served_is_refused_alone(start: Start, changes: dict[str, Any], reason: str) -> None:
    launcher = start()
    first = launcher.attach(0)
    assert first.epoch == 1
    refused = launcher.introduce(launcher.front_end(1, 1), **changes)
    assert reason in refused.refused
    assert refused.client_index == 1
    first.add(0, 3)
    first.receive_until(lambda: first.finished(0))
    second = launcher.attach(1, 1)
    second.add(0, 3)
    second.receive_until(lambda: second.finished(0))
    assert launcher.stop() == 0  # which a socket that was left open would not let happen


def test_clients_are_refused_before_descriptors_run_out(start: Start) -> None:
    """ZeroMQ would abort the whole process."""
    launcher = start("faulty:CallableEngine")
    assert launcher.process.poll() is None
    taken = len(os.listdir(f"/proc/{launcher.process.pid}/fd"))  # noqa: PTH208
    resource.prlimit(launcher.process.pid, resource.RLIMIT_NOFILE, (taken + 20, taken + 20))
    served = []
    while len(served) < 50:
        client = launcher.front_end(len(served), len(served))
        if refused := launcher.introduce(client).refused:
            assert "too few file descriptors" in refused
            break
        served.append(client)
    assert 0 < len(served) < 20
    served[0].call(0, "count")
    served[0].receive_until(served[0].answers)


def test_junk_ends_nothing(start: Start) -> None:
    launcher = start()
    client = launcher.attach()
    for _ in range(3):
        launcher.send_body(b"junk")
        launcher.send_body(b"two", b"frames")
        if isinstance(client.inputs, ZmqInputSender):
            client.inputs._socket.send_multipart([client.identity, b"one frame"])
            client.sent += 1
        else:
            client.send_frames(b"", b"")
        client.send_frames(b"\x00", b"junk")
        client.send_frames(b"\x77", b"body")
        client.send_frames(b"\x01", msgspec.msgpack.encode([client.epoch + 1, [0]]))
        client.send_frames(b"a", b"b", b"c", b"d")
    client.add(0, 3)
    client.receive_until(lambda: client.finished(0))
    assert client.tokens() == {0: [1, 2, 3, "stop"]}
    assert launcher.progress().taken == client.sent == 16
    assert launcher.stop() == 0
    logged = launcher.stderr().splitlines()
    assert 2 <= len([line for line in logged if "dropped a message" in line]) <= 4, logged


# --- connections that end --------------------------------------------------------------------------------------------


def raw(client: FrontEnd) -> socket.socket:
    """The socket of its inputs."""
    if not isinstance(client.inputs, UnixInputSender):
        pytest.skip("ZeroMQ has connections of its own")
    assert client.inputs._socket is not None
    return client.inputs._socket


def is_closed(one: socket.socket) -> bool:
    """Whether the peer has closed it."""
    try:
        return not one.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_broken_connection_ends_alone_and_leaves_nothing(start: Start) -> None:
    launcher = start()
    fine = launcher.attach(0)
    fine.add(0, 3)
    fine.receive_until(lambda: fine.finished(0))
    descriptors = f"/proc/{launcher.process.pid}/fd"
    before = len(os.listdir(descriptors))  # noqa: PTH208
    for number in range(1, 6):
        broken = launcher.attach(1, 1)
        broken.add(0, 3)
        broken.receive_until(lambda broken=broken: broken.finished(0))  # type: ignore[misc]
        raw(broken).send(b"\xff" * 100)
        eventually(lambda broken=broken: is_closed(raw(broken)))  # type: ignore[misc]
        broken.inputs.send([b"\x00", b"unheard"])
        fine.add(number, 3)
        fine.receive_until(lambda number=number: fine.finished(number))  # type: ignore[misc]
        launcher.detach(broken)
        eventually(lambda: len(os.listdir(descriptors)) == before)  # noqa: PTH208
    assert launcher.stop() == 0
    logged = [line for line in launcher.stderr().splitlines() if "dropped a message" in line]
    assert len(logged) == 1 and "broken connection" in logged[0], logged


@pytest.mark.parametrize("how", ["closed", "junk", "half a message"])
def test_it_sleeps_between_the_end_of_a_connection_and_the_news_of_it(start: Start, how: str) -> None:
    """A descriptor whose peer is gone is readable for ever."""
    launcher = start()
    clients = [launcher.attach(index, index) for index in range(2)]
    connection = raw(clients[0])
    if how != "closed":
        connection.send(b"\xff" * 100 if how == "junk" else b"\x10")
    clients[0].inputs.stop()
    clients[1].call(0, "is_paused")
    clients[1].receive_until(clients[1].answers)  # and whatever is there has been looked at
    process = psutil.Process(launcher.process.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(0.5)
    assert sum(process.cpu_times()[:2]) - before < 0.1
    launcher.detach(clients[0])
    again = launcher.attach(0)
    again.add(0, 3)
    again.receive_until(lambda: again.finished(0))
    assert launcher.stop() == 0


def test_a_client_is_detached_while_much_is_unread(start: Start) -> None:
    launcher = start()
    clients = [launcher.attach(index, index) for index in range(2)]
    launcher.process.send_signal(signal.SIGSTOP)
    for handle in range(300):
        clients[0].add(handle, 3)
    launcher.detach(clients[0])
    launcher.process.send_signal(signal.SIGCONT)
    for handle in range(3):
        clients[1].add(handle, 3)
    clients[1].receive_until(lambda: clients[1].finished(0, 1, 2))
    again = launcher.attach(0)
    again.add(0, 3)
    again.receive_until(lambda: again.finished(0))
    assert launcher.stop() == 0


def test_arrays_cross_by_each_client_s_shared_memory(start: Start) -> None:
    launcher = start("faulty:CallableEngine")
    clients = [launcher.attach(index, index, shared_memory=64 << 20) for index in range(2)]
    for client in clients:
        assert client.memory.pool is not None and client.memory.reader is not None
        client.call(0, "echo", np.full(1 << 20, client.index))
        [[array], _] = client.receive_until(client.answers)[0].result
        assert array.tolist() == [client.index] * (1 << 20)
        assert client.memory.pool.reserved >= array.nbytes
        assert client.memory.reader.held == 1
    launcher.detach(clients[0])
    clients[1].call(1, "echo", np.full(1 << 20, 7))
    [[array], _] = clients[1].receive_until(lambda: clients[1].answers()[1:])[0].result
    assert int(array.sum()) == 7 << 20


# --- signs of life ---------------------------------------------------------------------------------------------------


def test_the_page_tells_what_it_is_at(start: Start) -> None:
    launcher = start("mock", step_ms=1)
    assert launcher.progress().activity == IDLE
    client = launcher.attach()
    client.add(0, 1_000_000)
    client.receive_until(lambda: client.tokens()[0])
    before = launcher.progress()
    assert before.activity == BUSY
    eventually(lambda: launcher.progress().steps > before.steps + 5)
    after = launcher.progress()
    assert after.time > before.time
    assert abs(time.monotonic_ns() - after.time) < 10e9
    client.call(0, "pause_generation", "keep")
    client.receive_until(client.answers)
    eventually(lambda: launcher.progress().activity == FROZEN)
    client.call(1, "resume_generation")
    eventually(lambda: launcher.progress().activity == BUSY)
    client.abort(0)
    eventually(lambda: launcher.progress().activity == IDLE)
    assert launcher.progress().taken == client.sent == 4


def test_a_utility_that_blocks_the_loop_shows_on_the_page(start: Start) -> None:
    launcher = start("faulty:CallableEngine")
    client, other = launcher.attach(0, 0), launcher.attach(1, 1)
    client.call(0, "block", 1000)
    eventually(lambda: launcher.progress(0).taken == 1)
    assert launcher.progress(0).activity == BUSY
    other.call(0, "count")
    first = launcher.progress(1)
    time.sleep(0.05)
    assert launcher.progress(1) == first  # no step, no new time, and the other's message is not taken
    assert (first.taken, launcher.progress(0).taken) == (0, 1)


@pytest.mark.parametrize("kind", ["sleep", "spin", "gil"])
def test_stacks_are_dumped_while_the_loop_hangs(start: Start, kind: str) -> None:
    launcher = start("outboard.testing.faulty:FaultyEngine", hang_in="utility", hang_kind=kind)
    client = launcher.attach()
    client.call(0, "ping")
    eventually(lambda: launcher.progress().activity == BUSY)
    for _ in range(2):
        text = launcher.stacks()
        assert "in hang" in text and "\0" not in text
    assert launcher.progress().activity == BUSY


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_stop_aborts_for_all_clients(start: Start) -> None:
    launcher = start("mock", step_ms=1)
    clients = [launcher.attach(index, index) for index in range(2)]
    for client in clients:
        client.add(0, 1_000_000)
        client.receive_until(lambda client=client: client.tokens()[0])
    assert launcher.stop() == 0
    for client in clients:
        client.receive_until(lambda client=client: client.finished(0))
        assert client.tokens()[0][-1] == "abort"


def test_its_death_is_told_to_all_clients(start: Start) -> None:
    launcher = start("faulty:DyingEngine", step=3)
    clients = [launcher.attach(index, index) for index in range(2)]
    clients[0].add(0, 100)
    for client in clients:
        client.receive_until(lambda client=client: client.dead)
        assert client.dead[0].report.message == "boom"
    assert launcher.process.wait(10) == 1
    report = launcher.report.read_report()
    assert report is not None and report.message == "boom"


def test_a_stop_with_no_client(start: Start) -> None:
    assert start().stop() == 0


def test_a_stop_while_a_client_takes_nothing_is_bounded(start: Start) -> None:
    launcher = start("mock")
    client = launcher.attach()
    client.add(0, 1_000_000_000)
    client.receive_until(lambda: client.tokens()[0])
    eventually(lambda: launcher.progress().steps > 50_000)  # far more than its sockets hold
    assert launcher.stop() == 0


def test_a_client_that_comes_while_the_engine_shuts_down(start: Start) -> None:
    launcher = start("outboard.testing.faulty:FaultyEngine", hang_in="shutdown", hang_seconds=2)
    launcher.process.terminate()
    eventually(lambda: "in hang" in launcher.stacks())
    assert not launcher.introduce(launcher.front_end()).refused
    assert launcher.process.wait(10) == 0


def test_an_engine_that_leaves_by_sys_exit_ends_the_process(start: Start) -> None:
    launcher = start("outboard.testing.faulty:FaultyEngine", die_in="step", way="sys_exit")
    client = launcher.attach()
    client.add(0, 5)
    assert launcher.process.wait(10) == 7
