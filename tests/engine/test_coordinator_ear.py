"""An engine core's ear for the coordinator: it hears one of them at a time."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from outboard.dp.messages import Joined, ListenAsRank
from outboard.dp.waves import SetControl
from outboard.engine.coordination import CoordinatorEar
from outboard.engine.events import CoordinatorJoined
from outboard.engine.incoming import Drops
from outboard.protocol.control import CoordinatorAt
from outboard.transport.sockets import ControlServer, make_context
from outboard.transport.spoke import Spoke

TOKEN = "secret"
BOUND_MS = 10_000


def receive(hub: ControlServer) -> bytes:
    """The sender of the next message, which introduces a rank."""
    assert hub.wait([], BOUND_MS / 1000) is not None
    message = hub.receive()
    assert message is not None
    assert msgspec.msgpack.decode(message[1][0], type=ListenAsRank) == ListenAsRank(TOKEN, 0, 0)
    return message[0]


def wait(spoke: Spoke | None) -> None:
    assert spoke is not None
    assert spoke.socket.poll(BOUND_MS)


def test_what_a_former_coordinator_says_is_not_heard_once_there_is_another(short_tmp: Path) -> None:
    """The wave protocol builds on it: a resume that comes late must not undo what the next coordinator believes."""
    context = make_context()
    former, place = ControlServer(context, f"ipc://{short_tmp}/0"), CoordinatorAt(0, f"ipc://{short_tmp}/0")
    current, next_place = ControlServer(context, f"ipc://{short_tmp}/1"), CoordinatorAt(1, f"ipc://{short_tmp}/1")
    inbox: SimpleQueue[Any] = SimpleQueue()
    ear = CoordinatorEar(context, ListenAsRank(TOKEN, 0, 0), inbox, Drops())
    try:
        first = ear.follow(place)
        peer = receive(former)
        former.send(peer, msgspec.msgpack.encode(SetControl(0, 3)))
        wait(first)
        ear.read()
        assert inbox.get_nowait() == SetControl(0, 3)

        former.send(peer, msgspec.msgpack.encode(SetControl(0, 4)))
        wait(first)
        second = ear.follow(next_place)
        current.send(receive(current), msgspec.msgpack.encode(Joined(1)))
        wait(second)
        ear.read()
        joined = inbox.get_nowait()
        assert isinstance(joined, CoordinatorJoined)
        assert inbox.empty()
        joined.mouth.close()
        assert first is not None
        first.close()
    finally:
        ear.close()
        former.close()
        current.close()
        context.destroy(0)
