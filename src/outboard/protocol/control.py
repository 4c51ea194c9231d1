"""The control channel: what a launcher, its engine cores and its front ends tell each other, beside all data.

    front end     Join              -> launcher      Welcome (the state of every engine core) or Refused
    launcher      EngineStatus      -> front ends    acknowledged: Acknowledge names the last version seen
    launcher      EngineProgress    -> front ends    of engine cores on other hosts
    front end     Attach            -> launcher      AttachClient -> engine core
    engine core   ClientAttached    -> launcher      Attached     -> front end
    front end     Leave             -> launcher      DetachClient -> engine cores
    front end     ReportStall, ReportProgress, KillEngine -> launcher
    coordinator   CoordinatorReady -> launcher   CoordinatorAt -> engine cores, front ends

What changes the number of ranks travels here, too (scaling.py).

All are single frames over ROUTER and DEALER, never PUB/SUB: nobody misses anything. The handshake of an engine core
(messages.py) comes before all this, on the same socket.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Any

import msgspec

from outboard.errors import EngineDeadError
from outboard.protocol.messages import EngineInfo, ErrorReport
from outboard.protocol.shm import ArenaAddress

__all__ = [
    "Acknowledge",
    "Attach",
    "AttachClient",
    "Attached",
    "ClientAttached",
    "CoordinatorAt",
    "CoordinatorReady",
    "CoordinatorRefused",
    "DetachClient",
    "EngineDeath",
    "EngineProgress",
    "EngineState",
    "EngineStatus",
    "Join",
    "KillEngine",
    "Leave",
    "ReportProgress",
    "ReportStall",
    "StallReport",
    "Welcome",
    "identity_of",
]


class EngineState(Enum):
    """Where an engine core is in its life.

    STARTING -> READY <-> STALLED
    READY or STALLED -> RESTARTING -> READY        while the restart policy allows it
    any -> DEAD                                    it ended, and will not come back
    any -> STOPPED                                 it was asked to end
    """

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    DEAD = "dead"
    STOPPED = "stopped"


class EngineDeath(msgspec.Struct, array_like=True, frozen=True):
    """How an engine core ended: the facts of an `EngineDeadError`, as they travel."""

    reason: str
    rank: int
    pid: int | None
    incarnation: int
    phase: str
    exit_code: int | None
    remote_type: str
    remote_message: str
    remote_traceback: str
    stderr_tail: str
    lost: str = ""

    @classmethod
    def of(cls, error: EngineDeadError) -> EngineDeath:
        """The facts of an error."""
        return cls(*(getattr(error, name) for name in cls.__struct_fields__))

    def facts(self) -> dict[str, Any]:
        """Keyword arguments for `EngineDeadError` and its subclasses, `reason` among them."""
        return msgspec.structs.asdict(self)


class StallReport(msgspec.Struct, array_like=True, frozen=True):
    """Why an engine core is thought to hang.

    Attributes:
        age: seconds since it last gave a sign of progress.
        steps: how many steps it had taken by then.
        process: what the system says of the process: "stopped", "blocked", "running" (it burns CPU), "sleeping" (it
            waits for something) or "gone".
        cpu: share of a core that it used meanwhile.
        stack: its Python stack; "" where it could not give any.
    """

    age: float
    steps: int
    process: str
    cpu: float
    stack: str = ""


def identity_of(rank: int, incarnation: int) -> bytes:
    """An engine core's ZeroMQ identity, for inputs that go by ZeroMQ: no other incarnation has it."""
    return b"engine" + struct.pack(">HI", rank, incarnation)


# --- launcher and front end ------------------------------------------------------------------------------------------


class Join(msgspec.Struct, array_like=True, tag="join"):
    """First message of a front end. One with the index of an earlier one takes its place."""

    protocol_version: int
    outboard_version: str
    session_token: str
    client_index: int
    pid: int


class EngineStatus(msgspec.Struct, array_like=True, tag="status"):
    """The state of one engine core, whenever it changes. `version` rises by one with each, over all engine cores.

    Attributes:
        death: how the last incarnation ended; with RESTARTING and DEAD.
        stall: with STALLED.
        progress_fd, stack_fd: descriptors in the process `pid`: its progress page, and where its stacks are dumped on
            `stack_signal`. -1 on a node: `EngineProgress` tells what is there.
        node: name of the node where the process runs; "": the launcher's host.
        waits: why there is no room to start it; "" where it does not wait for that.
    """

    version: int
    rank: int
    incarnation: int
    state: EngineState
    pid: int | None = None
    info: EngineInfo | None = None
    typed_utilities: list[str] = []
    death: EngineDeath | None = None
    stall: StallReport | None = None
    progress_fd: int = -1
    stack_fd: int = -1
    stack_signal: int = 0
    node: str = ""
    waits: str = ""


class EngineProgress(msgspec.Struct, array_like=True, tag="engine_progress"):
    """How an engine core on a node goes on, to every front end again and again: no progress page can be read there.

    Attributes:
        steps, activity: as on a progress page.
        age: seconds since the last sign of life, when it was read.
        taken: messages taken from this front end.
        process, cpu, stack: as in `StallReport`; the share is since the last message of this kind, the stack is there
            once half of `FaultConfig.stall_timeout` is over.
    """

    rank: int
    incarnation: int
    steps: int
    age: float
    activity: int
    taken: int
    process: str
    cpu: float
    stack: str = ""


class Welcome(msgspec.Struct, array_like=True, tag="welcome"):
    """Answer to `Join`. `slot` is this front end's place on every progress page; `members` as in `Members`."""

    slot: int
    engines: list[EngineStatus]
    members: int = -1


class Acknowledge(msgspec.Struct, array_like=True, tag="acknowledge"):
    """A front end has taken note of all states up to this version."""

    version: int


class Attach(msgspec.Struct, array_like=True, tag="attach"):
    """A front end has sockets for this engine core. Names are never used twice, and `epoch` is a random number."""

    rank: int
    incarnation: int
    epoch: int
    input_address: str
    output_address: str
    arena: ArenaAddress | None = None


class Attached(msgspec.Struct, array_like=True, tag="attached"):
    """The engine core serves this front end in this epoch; or `refused` says why not."""

    rank: int
    incarnation: int
    epoch: int
    refused: str = ""


class Leave(msgspec.Struct, array_like=True, tag="leave"):
    """A front end goes: what it asked for is aborted everywhere."""


class ReportStall(msgspec.Struct, array_like=True, tag="stall"):
    """A front end waits for an engine core that makes no progress."""

    rank: int
    incarnation: int
    report: StallReport


class ReportProgress(msgspec.Struct, array_like=True, tag="progress"):
    """An engine core that was reported as stalled goes on."""

    rank: int
    incarnation: int


class KillEngine(msgspec.Struct, array_like=True, tag="kill"):
    """An engine core is of no more use, for this reason; the restart policy decides what comes then.

    `report` is the exception that it told of, if it did.
    """

    rank: int
    incarnation: int
    reason: str
    report: ErrorReport | None = None


# --- launcher and engine core ----------------------------------------------------------------------------------------


class AttachClient(msgspec.Struct, array_like=True, tag="attach_client"):
    """Serve a front end: connect to its sockets. An earlier one with its index is detached first."""

    client_index: int
    epoch: int
    slot: int
    pid: int
    input_address: str
    output_address: str
    identity: bytes
    arena: ArenaAddress | None = None


class ClientAttached(msgspec.Struct, array_like=True, tag="client_attached"):
    """Answer to `AttachClient`; its inputs are read from now on."""

    session_token: str
    client_index: int
    epoch: int
    refused: str = ""


class DetachClient(msgspec.Struct, array_like=True, tag="detach_client"):
    """A front end is gone: abort its requests, close its sockets. An unknown epoch is no error."""

    client_index: int
    epoch: int


# --- the coordinator of several ranks --------------------------------------------------------------------------------


class CoordinatorReady(msgspec.Struct, array_like=True, tag="coordinator_ready"):
    """First message of a coordinator: it can be reached, on other hosts at `tcp_address`."""

    session_token: str
    incarnation: int
    pid: int
    tcp_address: str = ""


class CoordinatorRefused(msgspec.Struct, array_like=True, tag="coordinator_refused"):
    """How many connections of strangers this coordinator has turned away so far, by reason."""

    session_token: str
    incarnation: int
    refused: dict[str, int]


class CoordinatorAt(msgspec.Struct, array_like=True, tag="coordinator_at"):
    """Where the coordinator is; one with a greater incarnation takes the place of an earlier one, which is dead."""

    incarnation: int
    address: str
