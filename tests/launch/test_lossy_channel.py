"""Head and node agree in the end, whatever is lost between them: both real, but for the processes and the sockets."""

from __future__ import annotations

import os
import platform
import random
from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from outboard._version import __version__
from outboard.launch.nodes import ranks
from outboard.launch.nodes.admission import HeadFacts
from outboard.launch.nodes.desk import NodeDesk
from outboard.launch.nodes.life import NodeLife, StopRequest
from outboard.launch.nodes.ranks import NodeRanks
from outboard.launch.nodes.remote import RemoteProcess
from outboard.protocol.messages import PROTOCOL_VERSION
from outboard.protocol.nodes import NodeHello, NodeWelcome, proof_of

SECRET = "a secret of at least 32 characters"
PLACES = 3


class Process:
    """In place of an `EngineProcess`."""

    started: ClassVar[list[tuple[str, str]]] = []
    alive: ClassVar[list[Process]] = []

    def __init__(self, env: dict[str, str]) -> None:
        self.key = (env["OUTBOARD_RANK"], env["OUTBOARD_INCARNATION"])
        self.code: int | None = None
        self.sentinel = -1
        self.engine_pid = 7
        self.oom_verdict = ""
        self.report = SimpleNamespace(read_stderr_tail=lambda: "", read_report=lambda: None)
        self.started.append(self.key)
        self.alive.append(self)

    @classmethod
    def start(cls, env: dict[str, str], session_dir: Any) -> Process:
        return cls(env)

    def exit(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self.alive.remove(self)

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.exit(0)

    def kill(self, force: bool = False) -> None:
        self.exit(-9)

    def close(self) -> None:
        assert self.code is not None


class Wire:
    """Both ends of the channel; each message is lost with some probability, and a new connection changes the peer."""

    fd = -1
    address = ""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.loss = 0.0
        self.refused: dict[str, int] = {}
        self.peer = b"peer"
        self.to_head: deque[bytes] = deque()
        self.to_node: deque[bytes] = deque()
        self.node = SimpleNamespace(send=self._from_node, receive=self._for_node)

    def _lost(self) -> bool:
        return self.chance.random() < self.loss

    def _from_node(self, body: bytes) -> bool:
        if not self._lost():
            self.to_head.append(body)
        return True

    def _for_node(self) -> list[bytes] | None:
        return [self.to_node.popleft()] if self.to_node else None

    def pending(self) -> bool:
        return bool(self.to_head)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        return (self.peer, [self.to_head.popleft()]) if self.to_head else None

    def send(self, receiver: bytes, body: bytes) -> None:
        if receiver == self.peer and not self._lost():
            self.to_node.append(body)

    def close(self, linger_ms: int = 0) -> None:
        pass


class World:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.wire = Wire(self.chance)
        self.now = 0.0
        facts = HeadFacts(SECRET, "e:E", {}, "tcp://h:1", "token", patience=1e9)
        self.desk = NodeDesk(self.wire, facts, self.now)
        self.life = NodeLife(self.wire.node, "n1", StopRequest())  # type: ignore[arg-type]
        welcome = NodeWelcome("n1", "tcp://h:1", "token", "", 1.0, 1e9, 1.0, 60.0)
        self.ranks = NodeRanks(welcome, SimpleNamespace(path="/nowhere"), PLACES, "")  # type: ignore[arg-type]
        version, python = __version__, platform.python_version()
        self.life.send(NodeHello(PROTOCOL_VERSION, version, python, "n1", "node", PLACES, proof_of(SECRET, "n1")))
        self.take()
        self.handles: list[RemoteProcess] = []
        self.wanted: list[RemoteProcess] = []
        self.incarnations = [0] * PLACES

    def take(self) -> None:
        """Both take what is there."""
        self.desk.take_all(self.now)
        for message in self.life.messages():
            self.life.obey(message, self.ranks, self.now)
        for exited in self.ranks.look(self.now):
            self.life.send(exited)

    def pass_interval(self) -> None:
        self.now += 1.0
        self.life.ping(self.ranks, False)
        self.take()
        self.desk.look(self.now)
        self.take()

    def step(self) -> None:
        """Something happens."""
        match self.chance.randrange(7):
            case 0 | 1 if self.desk.rooms()[0].free:
                rank = self.chance.randrange(PLACES)
                process = self.desk.start("n1", rank, self.incarnations[rank], {})
                self.incarnations[rank] += 1
                self.handles.append(process)
                self.wanted.append(process)
            case 2 if self.wanted:
                process = self.wanted.pop(self.chance.randrange(len(self.wanted)))
                self.chance.choice([process.terminate, process.kill])()
            case 3 if Process.alive:
                self.chance.choice(Process.alive).exit(self.chance.choice([0, 1, -9]))
            case 4:
                self.wire.peer = self.chance.randbytes(4)  # a connection is reset, with all that was on its way
                self.wire.to_head.clear()
                self.wire.to_node.clear()
            case 5:
                self.take()
            case _:
                self.pass_interval()


@pytest.fixture(autouse=True)
def fake_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ranks, "EngineProcess", Process)
    Process.started, Process.alive = [], []
    yield


def agree(world: World) -> None:
    """What must hold once nothing is lost any more."""
    running = {process.key for process in world.handles if not process.over}
    alive = {(int(rank), int(incarnation)) for rank, incarnation in (process.key for process in Process.alive)}
    assert running == alive, "the head counts on others than there are"
    assert world.desk.rooms()[0].taken == len(alive) == len(world.ranks)
    assert alive <= {process.key for process in world.wanted}, "one runs that nobody wants"
    assert len(Process.started) == len(set(Process.started)), "one was started twice"
    assert world.ranks.unanswered() == []


@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 500, 100)], ids=str)
def test_they_agree_in_the_end(seeds: Sequence[int]) -> None:
    for seed in seeds:
        Process.started, Process.alive = [], []
        world = World(seed)
        world.wire.loss = world.chance.choice([0.0, 0.1, 0.5, 0.9])
        for _ in range(60):
            world.step()
        world.wire.loss = 0.0
        for _ in range(3):
            world.pass_interval()
        try:
            agree(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            for process in world.handles:
                process.lose("the test is over", "stopped")
                process.close()
            os.close(world.life._stop.fd)
