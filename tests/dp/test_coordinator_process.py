"""The coordinator as a process: what goes in and out of its socket, and junk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outboard.dp.coordinator_state import LoadReport, Publication
from outboard.dp.messages import AskControl, JoinAsFrontEnd, Joined, ListenAsRank, SpeakAsRank
from outboard.dp.waves import FirstRequest, Phase, RankReport, SetControl, StartWave, is_paused
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.control import Acknowledge, CoordinatorReady
from outboard.protocol.environment import CoordinatorEnvironment
from outboard.protocol.scaling import (
    Members,
)
from outboard.transport.sockets import ControlServer, make_context
from outboard.transport.spoke import Spoke

TOKEN = "secret"
BOUND = 20.0
SPOKES: list[Spoke] = []  # to be closed


class Peer:
    """One DEALER, and what came by it."""

    def __init__(self, context: Any, address: str) -> None:
        self.spoke = Spoke(context, address)
        SPOKES.append(self.spoke)
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(Joined | StartWave | SetControl | Publication)

    def say(self, *messages: Any) -> None:
        for message in messages:
            assert self.spoke.send(msgspec.msgpack.encode(message))

    def hear(self, timeout: float = BOUND) -> Any:
        """The next message; None if there is none in time."""
        self.spoke.wait([], timeout)
        frames = self.spoke.receive()
        return None if frames is None else self._decoder.decode(frames[0])

    def hear_until(self, condition: Callable[[Any], bool]) -> Any:
        deadline = time.monotonic() + BOUND
        while time.monotonic() < deadline:
            message = self.hear(deadline - time.monotonic())
            if message is not None and condition(message):
                return message
        raise AssertionError("this was not said in time")


class Rank:
    def __init__(self, context: Any, address: str, rank: int, incarnation: int = 0) -> None:
        self.rank, self.incarnation = rank, incarnation
        self.ear = Peer(context, address)
        self.mouth = Peer(context, address)
        self.ear.say(ListenAsRank(TOKEN, rank, incarnation))
        assert self.ear.hear() == Joined(0)
        self.mouth.say(SpeakAsRank(TOKEN, rank, incarnation))

    def report(self, wave: int, phase: Phase, control: int = 0, size: int = 2) -> None:
        self.mouth.say(RankReport(0, 0, size, self.rank, wave, phase, control))

    def load(self, sequence: int, running: int) -> None:
        self.mouth.say(LoadReport(self.rank, self.incarnation, sequence, 0, running))


class Place:
    """A coordinator that runs, and who may talk to it."""

    def __init__(self, path: Path) -> None:
        self.context = make_context()
        self._launcher = control = ControlServer(self.context, f"ipc://{path}/control")
        self.address = f"ipc://{path}/coordinator"
        who = CoordinatorEnvironment(f"ipc://{path}/control", TOKEN, self.address, 0)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outboard.dp.coordinator"],
            env={**os.environ, **who.to_environ()},
            stderr=subprocess.PIPE,
            text=True,
        )
        control.wait([], BOUND)
        message = control.receive()
        assert message is not None
        self._peer = message[0]
        ready = msgspec.msgpack.decode(message[1][0], type=CoordinatorReady)
        assert ready == CoordinatorReady(TOKEN, 0, self.process.pid)

    def tell(self, body: bytes) -> None:
        """As its launcher."""
        self._launcher.send(self._peer, body)

    def told(self) -> Acknowledge:
        """What its launcher was told."""
        self._launcher.wait([], BOUND)
        message = self._launcher.receive()
        assert message is not None
        return msgspec.msgpack.decode(message[1][0], type=Acknowledge)

    def rank(self, rank: int, incarnation: int = 0) -> Rank:
        return Rank(self.context, self.address, rank, incarnation)

    def peer(self) -> Peer:
        return Peer(self.context, self.address)

    def front_end(self, index: int = 0) -> Peer:
        peer = self.peer()
        peer.say(JoinAsFrontEnd(TOKEN, index))
        return peer

    def stop(self) -> str:
        """Ends it; what it had written to stderr."""
        self.process.kill()
        return str(self.process.communicate()[1])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        while SPOKES:
            SPOKES.pop().close()
        self._launcher.close()
        self.context.term()


@pytest.fixture
def place(short_tmp: Path) -> Iterator[Place]:
    place = Place(short_tmp)
    yield place
    place.close()


def loads(publication: Publication) -> list[tuple[int, int]]:
    return [(load.rank, load.running) for load in publication.loads]


def test_loads_reach_every_front_end_and_no_more_often_than_every_100_ms(place: Place) -> None:
    one, other = place.front_end(0), place.front_end(1)
    ranks = [place.rank(0), place.rank(1)]
    started = time.monotonic()
    for sequence in range(1, 51):
        for rank in ranks:
            rank.load(sequence, sequence)
        time.sleep(0.01)
    took = time.monotonic() - started
    seen: list[list[Publication]] = [[], []]
    for publications, peer in zip(seen, (one, other), strict=True):
        while not publications or loads(publications[-1]) != [(0, 50), (1, 50)]:
            publications.append(peer.hear())
        assert len(publications) <= took / 0.1 + 4
        assert [p.sequence for p in publications] == sorted({p.sequence for p in publications})
    assert one.hear(0.5) is None, "published although nothing had changed"


def test_one_who_comes_late_is_told_at_once(place: Place) -> None:
    first = place.front_end(0)
    place.rank(0).load(1, 7)
    first.hear_until(lambda publication: loads(publication) == [(0, 7)])
    assert loads(place.front_end(1).hear(1.0)) == [(0, 7)]


def test_a_new_incarnation_takes_the_place_of_the_old(place: Place) -> None:
    front_end = place.front_end()
    old = place.rank(0)
    old.load(1, 7)
    front_end.hear_until(lambda publication: loads(publication) == [(0, 7)])
    new = place.rank(0, incarnation=1)
    front_end.hear_until(lambda publication: loads(publication) == [])
    old.load(2, 9)  # it may have been on its way
    new.load(1, 1)
    assert loads(front_end.hear_until(lambda publication: publication.loads)) == [(0, 1)]


def test_ranks_that_are_no_members_any_more_are_published_no_more_and_still_step(place: Place) -> None:
    front_end = place.front_end()
    ranks = [place.rank(0), place.rank(1)]
    for rank in ranks:
        rank.report(0, Phase.IDLE)
        rank.load(1, 5)
    front_end.hear_until(lambda publication: loads(publication) == [(0, 5), (1, 5)])
    place.tell(b"junk")
    place.tell(msgspec.msgpack.encode(Members(9, 1)))
    assert place.told() == Acknowledge(9)
    ranks[1].load(2, 4)  # it still ends what it has
    front_end.hear_until(lambda publication: loads(publication) == [(0, 5)])
    assert [rank.ear.hear() for rank in ranks] == [SetControl(0, 0)] * 2
    ranks[0].report(0, Phase.OPENING)
    assert ranks[1].ear.hear() == StartWave(0, 0)
    place.tell(msgspec.msgpack.encode(Members(10, 2)))
    assert place.told() == Acknowledge(10)
    front_end.hear_until(lambda publication: loads(publication) == [(0, 5), (1, 4)])


def test_another_group_of_another_size_whose_ranks_are_partly_gone(place: Place) -> None:
    front_end = place.front_end()
    ranks = [place.rank(rank) for rank in range(3)]
    for rank in ranks:
        rank.mouth.say(RankReport(0, 0, 3, rank.rank, 4, Phase.IDLE, 0))
    front_end.hear_until(lambda publication: publication.wave is not None and publication.wave.wave == 4)
    assert [rank.ear.hear() for rank in ranks] == [SetControl(0, 0)] * 3
    for peer in (ranks[2].ear, ranks[2].mouth):
        peer.spoke.close()
    ranks[0].mouth.say(RankReport(1, 0, 2, 0, 0, Phase.OPENING, 0))
    assert ranks[0].ear.hear() == SetControl(1, 0)
    assert ranks[0].ear.hear(0.1) is None
    ranks[1].mouth.say(RankReport(0, 0, 3, 1, 5, Phase.OPENING, 0))  # of the old group: void
    assert ranks[1].ear.hear(0.1) is None
    ranks[1].mouth.say(RankReport(1, 0, 2, 1, 0, Phase.IDLE, 0))
    assert [ranks[1].ear.hear(), ranks[1].ear.hear()] == [SetControl(1, 0), StartWave(1, 0)]
    wave = front_end.hear_until(lambda publication: publication.wave is not None and publication.wave.group == 1).wave
    assert (wave.wave, wave.running) == (0, True)
    back = place.rank(2, incarnation=1)
    for rank in (*ranks[:2], back):
        rank.mouth.say(RankReport(2, 0, 3, rank.rank, 0, Phase.IDLE, 0))
    assert [rank.ear.hear() for rank in (*ranks[:2], back)] == [SetControl(2, 0)] * 3
    front_end.say(FirstRequest(2, 0))
    assert [rank.ear.hear() for rank in (*ranks[:2], back)] == [StartWave(2, 0)] * 3


def test_a_wave_and_nothing_said_before_all_have_reported(place: Place) -> None:
    front_end = place.front_end()
    ranks = [place.rank(0), place.rank(1)]
    ranks[0].report(0, Phase.IDLE)
    ranks[0].load(1, 1)
    assert front_end.hear_until(lambda publication: publication.loads).wave is None
    ranks[1].report(0, Phase.IDLE)
    state = front_end.hear_until(lambda publication: publication.wave is not None).wave
    assert (state.wave, state.running) == (0, False)

    assert [rank.ear.hear() for rank in ranks] == [SetControl(0, 0)] * 2  # there is no pause
    front_end.say(FirstRequest(0, 0))
    assert [rank.ear.hear() for rank in ranks] == [StartWave(0, 0)] * 2
    ranks[0].report(0, Phase.OPENING)
    assert front_end.hear_until(lambda publication: publication.wave.running)
    ranks[1].report(0, Phase.OPENING)
    for rank in ranks:
        rank.report(1, Phase.IDLE)
    assert front_end.hear_until(lambda publication: publication.wave.wave == 1 and not publication.wave.running)
    ranks[1].report(1, Phase.OPENING)  # it has work
    assert ranks[0].ear.hear() == StartWave(0, 1)
    assert ranks[1].ear.hear(0.1) is None


def test_a_pause_reaches_all_and_a_late_one_is_void(place: Place) -> None:
    ranks = [place.rank(0), place.rank(1)]
    for rank in ranks:
        rank.report(0, Phase.IDLE)
        rank.mouth.say(AskControl(0, 0, True))  # both are asked to pause: that is one pause
    controls = [rank.ear.hear_until(lambda message: is_paused(message.control)).control for rank in ranks]
    assert controls[0] == controls[1]
    for rank in ranks:
        assert rank.ear.hear(0.1) is None
        rank.report(0, Phase.IDLE, controls[0])
    ranks[0].mouth.say(AskControl(0, controls[0], False))
    resumed = [rank.ear.hear().control for rank in ranks]
    assert resumed[0] == resumed[1] > controls[0]
    assert not is_paused(resumed[0])
    ranks[1].mouth.say(AskControl(0, controls[0], True))  # before it knew of the resume
    assert ranks[0].ear.hear(0.2) is None


def test_junk_strangers_and_wrong_tokens_are_dropped_and_it_goes_on(place: Place) -> None:
    stranger = place.peer()
    for body in (
        b"",
        b"\xc1",
        b"junk" * 100,
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode(["listen_as_rank"]),
    ):
        stranger.spoke.socket.send(body)
    stranger.spoke.socket.send_multipart([b"a", b"b"])
    stranger.say(
        ListenAsRank("wrong", 0, 0),
        SpeakAsRank(TOKEN, 5, 0),  # a rank that does not listen, whoever is first
        JoinAsFrontEnd("wrong", 0),
        RankReport(0, 0, 1, 0, 0, Phase.RUNNING, 0),
        LoadReport(0, 0, 1, 100, 100),
        AskControl(0, 0, True),
        FirstRequest(0, 0),
    )
    front_end = place.front_end()
    rank = place.rank(0)
    rank.load(1, 3)
    publication = front_end.hear_until(lambda publication: publication.loads)
    assert loads(publication) == [(0, 3)]
    assert publication.wave is None
    assert stranger.hear(0.1) is None
    said = place.stop()
    for reason in ("undecodable", "token", "stranger"):
        assert said.count(f"({reason})") == 1  # once, however many there were
