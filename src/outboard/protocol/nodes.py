"""The node channel: what a head and the nodes that run engine cores for it tell each other.

    node    NodeHello      -> head    NodeWelcome or NodeRefused
    head    StartRank      -> node    RankStarted or RankExited
    head    SignalRank     -> node    RankExited
    node    RankExited     -> head    RankForgotten
    head    WatchRank      -> node    RankProgress, again and again
    node    NodePing       -> head    HeadPing, each in every interval
    node    NodeLeaves     -> head
    head    HeadLeaves     -> node

A connection may break and come back, and loses what was under way. So whatever has not been answered is said again
behind the next ping, and to hear it twice does nothing. `node_id` is random and names one life of a node, from its
hello until head and node lose each other; it is never used again, and nobody else knows it.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import msgspec

from outboard.protocol.messages import ErrorReport

__all__ = [
    "FromHead",
    "FromNode",
    "HeadLeaves",
    "HeadPing",
    "NodeHello",
    "NodeLeaves",
    "NodePing",
    "NodeRefused",
    "NodeWelcome",
    "RankExited",
    "RankForgotten",
    "RankProgress",
    "RankStarted",
    "SignalRank",
    "StartRank",
    "WatchRank",
    "proof_of",
]


def proof_of(secret: str, node_id: str) -> bytes:
    """What a node shows of the secret that it shares with its head, without telling it."""
    return hashlib.blake2b(node_id.encode(), key=hashlib.sha256(secret.encode()).digest()).digest()


# --- of the node -----------------------------------------------------------------------------------------------------


class NodeHello(msgspec.Struct, array_like=True, tag="node_hello"):
    """First message of a node.

    What another version makes of it must still be readable, and so must `NodeRefused`: fields are only appended, with
    defaults.

    Attributes:
        protocol_version, outboard_version, python_version: its own.
        node_id: of this life.
        name: what people call it.
        ranks: how many it has room for.
        proof: of the shared secret, see `proof_of`.
        replaces: the `node_id` of each earlier life that this head may still count on.
        engine: the reference of the only engine that it is willing to run; "": any.
        options: options that this engine must have.
    """

    protocol_version: int
    outboard_version: str
    python_version: str
    node_id: str
    name: str
    ranks: int
    proof: bytes
    replaces: list[str] = []
    engine: str = ""
    options: dict[str, Any] = {}


class NodePing(msgspec.Struct, array_like=True, tag="node_ping"):
    """The node is there; by it a head finds a node again whose connection was a new one."""

    node_id: str


class NodeLeaves(msgspec.Struct, array_like=True, tag="node_leaves"):
    """The node takes no more ranks, and ends those that it has.

    Attributes:
        node_id: of the node.
        reason: what happens to it, such as "is being stopped".
        over: whether it has none left, and this life of it is over.
    """

    node_id: str
    reason: str
    over: bool


class RankStarted(msgspec.Struct, array_like=True, tag="rank_started"):
    """The process of this incarnation is there."""

    rank: int
    incarnation: int


class RankExited(msgspec.Struct, array_like=True, tag="rank_exited"):
    """The process of this incarnation has ended, with all that belongs to it.

    Attributes:
        pid: of the engine core; None: there was none.
        exit_code: 0 or more, or minus the signal that ended it; None: it was never started.
        stderr_tail: the last that it wrote to stderr.
        report: the exception that ended it.
        verdict: what is known of the kernel's out-of-memory killer; "": nothing.
        failure: why it could not be started; "" where it was.
    """

    rank: int
    incarnation: int
    pid: int | None = None
    exit_code: int | None = None
    stderr_tail: str = ""
    report: ErrorReport | None = None
    verdict: str = ""
    failure: str = ""


class RankProgress(msgspec.Struct, array_like=True, tag="rank_progress"):
    """The progress page (progress.py) of an engine core that its front ends cannot read themselves.

    Attributes:
        steps, activity: as on the page.
        age: seconds since the last sign of life, when it was read.
        taken: messages taken from each front end, by its slot; those that have sent none may be missing.
        process: what the system says of the process, as in `StallReport`.
        cpu: share of a core that it has used since the last message of this kind.
        stack: its Python stack, where it is about to count as hanging; "" where it could not give any.
    """

    rank: int
    incarnation: int
    steps: int
    age: float
    activity: int
    taken: dict[int, int]
    process: str
    cpu: float
    stack: str = ""


# --- of the head -----------------------------------------------------------------------------------------------------


class NodeWelcome(msgspec.Struct, array_like=True, tag="node_welcome"):
    """The head takes the node.

    Attributes:
        node_id: of the node.
        control_address: where engine cores find the head.
        session_token: what they show there.
        keys: what encrypts their connections, as they find it in their environment.
        interval: seconds from one ping to the next.
        patience: how long either may be silent before it is given up, seconds.
        shutdown_timeout: how long an engine core gets to end by itself, seconds.
        stall_timeout: how long a step may take before it counts as a hang, seconds.
    """

    node_id: str
    control_address: str
    session_token: str
    keys: str
    interval: float
    patience: float
    shutdown_timeout: float
    stall_timeout: float


class NodeRefused(msgspec.Struct, array_like=True, tag="node_refused"):
    """The head does not take the node, or knows it no more.

    `final`: it never will, as the node is; else the node may come again with a new `node_id`.
    """

    node_id: str
    reason: str
    final: bool


class HeadPing(msgspec.Struct, array_like=True, tag="head_ping"):
    """The head is there."""

    node_id: str


class HeadLeaves(msgspec.Struct, array_like=True, tag="head_leaves"):
    """The head ends: so must all engine cores, at once. Another head may come."""

    node_id: str


class StartRank(msgspec.Struct, array_like=True, tag="start_rank"):
    """Start an engine core. `env`: variables of its own, beside those of the node."""

    rank: int
    incarnation: int
    env: dict[str, str]


class SignalRank(msgspec.Struct, array_like=True, tag="signal_rank"):
    """Ask an engine core for its end, or `kill` it. One that has not been started must not be any more."""

    rank: int
    incarnation: int
    kill: bool


class WatchRank(msgspec.Struct, array_like=True, tag="watch_rank"):
    """An engine core is ready: tell how it goes on. `pid` is its process, the others are as in `Ready`."""

    rank: int
    incarnation: int
    pid: int
    progress_fd: int
    stack_fd: int
    stack_signal: int


class RankForgotten(msgspec.Struct, array_like=True, tag="rank_forgotten"):
    """The head knows how this incarnation ended."""

    rank: int
    incarnation: int


FromNode: TypeAlias = NodeHello | NodePing | NodeLeaves | RankStarted | RankExited | RankProgress
FromHead: TypeAlias = (
    NodeWelcome | NodeRefused | HeadPing | HeadLeaves | StartRank | SignalRank | WatchRank | RankForgotten
)
