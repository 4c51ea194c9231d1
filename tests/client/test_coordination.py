"""A client's talk with coordinators: it follows them, and says that a resting group was sent a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outboard.client.coordination import Coordination
from outboard.client.receiver import Counters
from outboard.dp.coordinator_state import Publication
from outboard.dp.messages import JoinAsFrontEnd
from outboard.dp.waves import FirstRequest, WaveState
from outboard.protocol.control import CoordinatorAt
from outboard.transport.sockets import ControlServer, make_context
from support import Run

TOKEN = "secret"


class Hub:
    """A coordinator by hand."""

    def __init__(self, context: Any, path: Path, incarnation: int) -> None:
        self.place = CoordinatorAt(incarnation, f"ipc://{path}/coord-{incarnation}")
        self.socket = ControlServer(context, self.place.address)
        self.peer = b""
        self.sequence = 0

    async def hear(self, type_: Any, timeout: float = 10.0) -> Any:
        async with asyncio.timeout(timeout):
            while (message := self.socket.receive()) is None:
                await asyncio.sleep(0.001)
        self.peer = message[0]
        return msgspec.msgpack.decode(message[1][0], type=type_)

    def publish(self, wave: WaveState | None) -> None:
        self.sequence += 1
        publication = Publication(self.place.incarnation, self.sequence, 0, [], wave)
        self.socket.send(self.peer, msgspec.msgpack.encode(publication))


class Place:
    def __init__(self, path: Path) -> None:
        self.context = make_context()
        self.path = path
        self.heard: list[Publication] = []
        self.counters = Counters()
        self.coordination = Coordination(self.context, TOKEN, 1, self.heard.append, self.counters)
        self.hubs: list[Hub] = []

    async def hub(self) -> Hub:
        hub = Hub(self.context, self.path, len(self.hubs))
        self.hubs.append(hub)
        self.coordination.follow(hub.place)
        assert await hub.hear(JoinAsFrontEnd) == JoinAsFrontEnd(TOKEN, 1)
        return hub

    async def publish(self, wave: WaveState | None) -> None:
        before = len(self.heard)
        self.hubs[-1].publish(wave)
        async with asyncio.timeout(10):
            while len(self.heard) == before:
                await asyncio.sleep(0.001)


@pytest.fixture
def place(short_tmp: Path) -> Iterator[Place]:
    place = Place(short_tmp)
    yield place
    place.coordination.detach()
    place.coordination.close()
    for hub in place.hubs:
        hub.socket.close()
    place.context.term()


def test_the_first_request_to_a_resting_group_is_told_again_until_it_runs(run: Run, place: Place) -> None:
    async def main() -> None:
        coordination = place.coordination
        coordination.attach(asyncio.get_running_loop())
        hub = await place.hub()
        coordination.request_sent()  # nothing is known of a group
        await place.publish(WaveState(0, 3, False, False))
        assert (coordination.waves.current_wave, coordination.waves.engines_running) == (3, False)
        coordination.request_sent()
        coordination.request_sent()
        loop = asyncio.get_running_loop()
        assert await hub.hear(FirstRequest) == FirstRequest(0, 3)
        told = loop.time()
        assert await hub.hear(FirstRequest) == FirstRequest(0, 3)
        assert loop.time() - told > 0.2  # the second request told nothing, the timer did
        await place.publish(WaveState(0, 3, True, False))
        coordination.request_sent()
        with pytest.raises(TimeoutError):
            await hub.hear(FirstRequest, 0.5)
        await place.publish(WaveState(0, 4, False, False))
        coordination.request_sent()
        assert await hub.hear(FirstRequest) == FirstRequest(0, 4)

    run(main())


def test_it_follows_to_the_next_coordinator_and_not_back(run: Run, place: Place) -> None:
    async def main() -> None:
        coordination = place.coordination
        old = await place.hub()
        coordination.attach(asyncio.get_running_loop())
        await place.publish(WaveState(0, 0, True, False))
        old.socket.close()
        await place.hub()
        coordination.follow(old.place)  # late news
        await place.publish(WaveState(0, 1, False, False))
        assert coordination.waves.current_wave == 1
        assert coordination.incarnation == 1
        coordination.request_sent()
        assert await place.hubs[-1].hear(FirstRequest) == FirstRequest(0, 1)

    run(main())


def test_junk_is_counted(run: Run, place: Place) -> None:
    async def main() -> None:
        place.coordination.attach(asyncio.get_running_loop())
        hub = await place.hub()
        hub.socket.send(hub.peer, b"\xc1")
        await place.publish(None)
        assert place.counters.dropped == {"undecodable publication": 1}

    run(main())
