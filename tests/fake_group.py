"""A launcher and engine cores by hand, on the test's event loop: they say what they are told to, and note the rest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from outboard import DPLBAsyncMPClient, EngineAddresses, EngineState, EngineStatus, FaultConfig, ParallelConfig
from outboard.client.async_mp import AsyncMPClient
from outboard.config import TransportConfig
from outboard.protocol.codec import MsgpackEncoder
from outboard.protocol.control import (
    Acknowledge,
    Attach,
    Attached,
    EngineDeath,
    Join,
    KillEngine,
    Leave,
    ReportProgress,
    ReportStall,
    Welcome,
    identity_of,
)
from outboard.protocol.messages import (
    EEP_NOTIFICATION_CALL_ID,
    AddRequest,
    EngineCoreOutputs,
    EngineCoreRequestType,
    EngineInfo,
    LeaveRank,
    UtilityCall,
    UtilityOutput,
)
from outboard.protocol.scaling import (
    AbortScale,
    CommitScale,
    Members,
    Scale,
    ScaleProgress,
    ScaleRefused,
    ScaleState,
)
from outboard.transport.inputs import connect_inputs
from outboard.transport.outputs import connect_outputs
from outboard.transport.poller import SocketPoller
from outboard.transport.session import SessionDirectory
from outboard.transport.sockets import ControlServer, make_context
from support import SOCKETS

__all__ = ["FakeEngine", "FakeGroup", "fake_group", "until"]

BOUND = 10.0
TRANSPORT = TransportConfig(sockets=SOCKETS, shared_memory_limit=0)
Message = TypeVar("Message")

_FromClient = (
    Join | Acknowledge | Attach | Leave | ReportStall | ReportProgress | KillEngine | Scale | CommitScale | AbortScale
)
_BODIES: dict[bytes, Any] = {
    EngineCoreRequestType.ADD.value: AddRequest,
    EngineCoreRequestType.UTILITY.value: UtilityCall,
    EngineCoreRequestType.LEAVE.value: LeaveRank,
}


async def until(condition: Callable[[], Any]) -> Any:
    """Waits until a condition holds; its value."""
    async with asyncio.timeout(BOUND):
        while not (value := condition()):
            await asyncio.sleep(0.002)
    return value


class FakeEngine:
    """An engine core's two sockets to one client."""

    def __init__(self, context: Any, attach: Attach) -> None:
        self.rank, self.incarnation, self.epoch = attach.rank, attach.incarnation, attach.epoch
        self._poller = SocketPoller()
        identity = identity_of(attach.rank, attach.incarnation)
        self._input = connect_inputs(context, attach.input_address, attach.epoch, identity, TRANSPORT)
        try:
            self._outputs = connect_outputs(
                context, attach.output_address, attach.epoch, TRANSPORT, self._poller, lambda: None
            )
        except OSError:
            self._input.close()
            self._poller.close()
            raise
        self._encode = MsgpackEncoder(1000).encode
        self._sequence = 0
        self._heard: list[Any] = []

    @property
    def heard(self) -> list[Any]:
        """What the client has sent, aborts aside, in order."""
        while (frames := self._input.receive()) is not None:
            kind = bytes(frames[0])
            if kind in _BODIES:
                self._heard.append(msgspec.msgpack.decode(frames[1], type=_BODIES[kind]))
        return self._heard

    def count(self, kind: type) -> int:
        """How many messages of a kind the client has sent."""
        return sum(isinstance(message, kind) for message in self.heard)

    def say(self, **fields: Any) -> None:
        """Sends the client a message."""
        message = EngineCoreOutputs(self.rank, self.epoch, self._sequence, 0.0, **fields)
        self._sequence += 1
        assert self._outputs.send(self._encode(message))

    def notify(self, kind: str, rank: int | None = None) -> None:
        """Sends a notification of scaling."""
        payload = (kind, self.rank if rank is None else rank)
        self.say(utility_output=UtilityOutput(EEP_NOTIFICATION_CALL_ID, payload))

    def close(self) -> None:
        self._outputs.close(0)
        self._input.close()
        self._poller.close()


class FakeGroup:
    """Engine cores that are ready from the beginning, and one client at a time.

    Attributes:
        statuses: what a client is told when it joins.
        members: likewise.
        engines: by rank, once the client has attached.
        heard: what the client has told the launcher.
        attaches: ranks whose engine cores answer.
        on_welcome: called behind each Welcome.
    """

    def __init__(self, size: int, members: int, parallel: ParallelConfig, faults: FaultConfig) -> None:
        self._session = SessionDirectory()
        self._context = make_context()
        address = self._session.address("control")
        self._control = ControlServer(self._context, address)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(_FromClient).decode
        self._peer = b""
        self._version = 0
        self.members = members
        self.statuses: dict[int, EngineStatus] = {}
        self.engines: dict[int, FakeEngine] = {}
        self.heard: list[Any] = []
        self.refuses: set[int] = set()
        self.on_welcome: Callable[[], None] = lambda: None
        for rank in range(size):
            self.statuses[rank] = self._status(rank, EngineState.READY, 0)
        self.addresses = EngineAddresses(
            control_address=address,
            session_token=self._session.token,
            directory=str(self._session.path),
            launcher_pid=os.getpid(),
            engine="echo",
            options={},
            parallel=parallel,
            faults=faults,
            transport=TRANSPORT,
        )

    # --- what it says ---

    def tell(self, message: Any) -> None:
        self._control.send(self._peer, self._encode(message))

    def set_state(self, rank: int, state: EngineState, incarnation: int = 0, death: str = "") -> None:
        """An engine core is in another state now."""
        self.statuses[rank] = self._status(rank, state, incarnation, death)
        self.tell(self.statuses[rank])

    def announce(self, members: int) -> int:
        """There are so many ranks; the version of that."""
        self._version += 1
        self.members = members
        self.tell(Members(self._version, members))
        return self._version

    def progress(
        self, state: ScaleState, old: int, new: int, *, call: int = 1, client: int = 0, reason: str = ""
    ) -> None:
        self.tell(ScaleProgress(client, call, old, new, state, {}, reason))

    def refuse(self, call: int, error: str, reason: str) -> None:
        self.tell(ScaleRefused(call, error, reason))

    def notify_all(self, kind: str, ranks: range) -> None:
        for rank in ranks:
            self.engines[rank].notify(kind)

    # --- what it hears ---

    def all_heard(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def hear(self, kind: type[Message], count: int = 1) -> Message:
        """Waits until the client has sent so many of a kind; the last."""
        await until(lambda: len(self.all_heard(kind)) >= count)
        return self.all_heard(kind)[count - 1]

    async def take(self) -> None:
        """Answers the client, until cancelled."""
        while True:
            while (message := self._control.receive()) is not None:
                self._take(*message)
            await asyncio.sleep(0.001)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self._control.close()
        self._context.term()
        self._session.remove()

    def _status(self, rank: int, state: EngineState, incarnation: int, death: str = "") -> EngineStatus:
        self._version += 1
        facts = EngineDeath(death, rank, os.getpid(), incarnation, "running", -9, "", "", "", "") if death else None
        return EngineStatus(self._version, rank, incarnation, state, os.getpid(), EngineInfo(), death=facts)

    def _take(self, peer: bytes, frames: list[bytes]) -> None:
        message = self._decode(frames[0])
        self.heard.append(message)
        if isinstance(message, Join):
            self._peer = peer
            self.tell(Welcome(0, list(self.statuses.values()), self.members))
            self.on_welcome()
        elif isinstance(message, Attach) and message.rank in self.refuses:
            self.tell(Attached(message.rank, message.incarnation, message.epoch, "no room"))
        elif isinstance(message, Attach):
            earlier = self.engines.get(message.rank)
            if earlier is not None:
                self.engines.pop(message.rank).close()
            try:
                self.engines[message.rank] = FakeEngine(self._context, message)
            except OSError:
                return  # the client has gone already
            self.tell(Attached(message.rank, message.incarnation, message.epoch))


@asynccontextmanager
async def fake_group(
    size: int,
    *,
    members: int = -1,
    faults: FaultConfig | None = None,
    parallel: ParallelConfig | None = None,
    client_class: type[AsyncMPClient] = DPLBAsyncMPClient,
    before: Callable[[FakeGroup], None] = lambda group: None,
    **more: Any,
) -> AsyncIterator[tuple[Any, FakeGroup]]:
    """A client, and the group that it has joined."""
    group = FakeGroup(size, members, parallel or ParallelConfig(max_size=8), faults or FaultConfig())
    before(group)
    taking = asyncio.create_task(group.take())
    try:
        client = await client_class.launch(addresses=group.addresses, **more)
        try:
            yield client, group
        finally:
            await asyncio.to_thread(client.shutdown)
    finally:
        taking.cancel()
        group.close()
