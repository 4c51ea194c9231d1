"""The head's desk for nodes: who has joined, what runs where, and who is lost.

It starts and ends engine cores there, hears how they end, and gives up a node that has been silent for too long. No
thread, no waiting; its launcher calls it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from outboard.errors import ProtocolError
from outboard.launch.nodes.admission import HeadFacts, refusal_of
from outboard.launch.nodes.remote import RemoteProcess
from outboard.launch.nodes.silence import Silence
from outboard.launch.placement import Room
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.nodes import (
    FromNode,
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
)

__all__ = ["NodeChannel", "NodeDesk"]

logger = logging.getLogger("outboard.launch")


class NodeChannel(Protocol):
    """What the desk needs of its socket, see `NodeServer`."""

    fd: int
    address: str

    @property
    def refused(self) -> dict[str, int]:
        """How many connections were turned away."""

    def pending(self) -> bool:
        """Whether something has come that is to be received."""

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """(sender, frames) of the next message; None if there is none."""

    def send(self, receiver: bytes, body: bytes) -> None:
        """Sends to a peer that has sent something; a peer that is gone is no error."""

    def close(self, linger_ms: int = 0) -> None:
        """Closes; what has not left may take so long."""


@dataclass(slots=True)
class _Node:
    """One life of a node."""

    node_id: str
    name: str
    places: int
    peer: bytes
    silence: Silence
    leaving: bool = False
    answered: bool = False  # whether it has said anything since its hello
    ranks: dict[tuple[int, int], RemoteProcess] = field(default_factory=dict)  # by rank and incarnation


class NodeDesk:
    """Belongs to the launcher's thread, but for `rooms`.

    Args:
        channel: the bound socket.
        facts: of the head.
        now: the time.

    Attributes:
        address, secret: where nodes join, and what they must know.
        fd: readable when something has come, unless `pending` tells so.
        due: when to call `look` although nothing has come.
        on_progress: called with what a node tells of an engine core that is there.
        dropped: how many messages were dropped, by reason.
    """

    def __init__(self, channel: NodeChannel, facts: HeadFacts, now: float) -> None:
        self._channel = channel
        self._facts = facts
        self._nodes: dict[str, _Node] = {}  # by node_id, in the order in which they joined
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(FromNode)
        self._encode = msgspec.msgpack.Encoder().encode
        self.fd = channel.fd
        self.pending = channel.pending
        self.address = channel.address
        self.secret = facts.secret
        self.due = now + facts.interval
        self.on_progress: Callable[[RankProgress], None] = lambda progress: None
        self.dropped: Counter[str] = Counter()
        self._closed = False

    # --- for the launcher ---

    def rooms(self) -> list[Room]:
        """What each node has room for."""
        nodes = list(self._nodes.values())  # at once: other threads may ask
        return [
            Room(node.node_id, node.name, node.places, len(node.ranks), node.leaving, not node.answered)
            for node in nodes
        ]

    def start(self, node_id: str, rank: int, incarnation: int, env: Mapping[str, str]) -> RemoteProcess:
        """Starts an engine core on a node."""
        node = self._nodes[node_id]
        process = RemoteProcess(rank, incarnation, dict(env), node.name, lambda message: self._tell(node, message))
        node.ranks[process.key] = process
        return process

    def lose(self, name: str, what: str, word: str) -> None:
        """Gives up the node of this name, if it is there: somebody knows that it "has died", say.

        `word`: see `EngineDeadError.lost`.
        """
        for node in [node for node in self._nodes.values() if node.name == name]:
            self._lose(node, what, word)

    @property
    def refused(self) -> dict[str, int]:
        """How many connections of strangers were turned away, by reason. For any thread."""
        return self._channel.refused

    def take_all(self, now: float) -> None:
        """Takes all messages that are there."""
        while (message := self._channel.receive()) is not None:
            self._take(*message, now)

    def look(self, now: float) -> None:
        """Gives up who has been silent for too long, and says what is to be said again. Call it behind `take_all`."""
        for node in list(self._nodes.values()):
            if node.silence.listened(now):
                self._lose(node, f"has been silent for {node.silence.seconds:.1f} s", "silent")
        if now < self.due:
            return
        self.due = now + self._facts.interval
        for node in self._nodes.values():
            self._tell(node, HeadPing(node.node_id))
            for process in node.ranks.values():
                for message in process.unanswered():
                    self._tell(node, message)

    def close(self, linger_ms: int = 0) -> None:
        """Has all nodes end what they run, and closes the socket. Idempotent."""
        for node in self._nodes.values():
            self._tell(node, HeadLeaves(node.node_id))
            for process in node.ranks.values():
                process.lose("its head has gone", "stopped")
        self._nodes.clear()
        if not self._closed:
            self._closed = True
            self._channel.close(linger_ms)

    # --- messages ---

    def _take(self, sender: bytes, frames: list[bytes], now: float) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"{len(frames)} frames; a message on the node channel has one")
            message = self._decoder.decode(frames[0])
        except ProtocolError as error:
            self._drop("undecodable", str(error))
            return
        if isinstance(message, NodeHello):
            self._on_hello(sender, message, now)
        elif isinstance(message, (NodePing, NodeLeaves)):
            self._on_sign(sender, message)
        elif (node := self._by_peer(sender)) is None:
            self._drop("stranger", f"{type(message).__name__} of a peer that is no node")
        else:
            node.silence.heard()
            self._on_rank(node, message)

    def _on_hello(self, sender: bytes, hello: NodeHello, now: float) -> None:
        known = self._nodes.get(hello.node_id)
        if known is None:
            refusal = refusal_of(hello, self._facts)
            if refusal:
                self._drop("refused", refusal)
                self._send(sender, NodeRefused(hello.node_id, refusal, True))
                return
            for earlier in hello.replaces:
                if earlier in self._nodes:
                    self._lose(self._nodes[earlier], "had lost this head, and has joined again", "silent")
            facts = self._facts
            silence = Silence(facts.patience, facts.interval, now)
            known = _Node(hello.node_id, self._name(hello), hello.ranks, sender, silence)
            self._nodes[hello.node_id] = known
            logger.info("node %s has joined, with room for %d engine cores", known.name, known.places)
        known.peer = sender
        known.silence.heard()
        self._tell(known, self._welcome(hello.node_id))

    def _name(self, hello: NodeHello) -> str:
        """What to call it: its name, and where another one has that, part of its id."""
        taken = any(node.name == hello.name for node in self._nodes.values())
        return f"{hello.name}-{hello.node_id[:6]}" if taken else hello.name

    def _welcome(self, node_id: str) -> NodeWelcome:
        facts = self._facts
        return NodeWelcome(
            node_id,
            facts.control_address,
            facts.session_token,
            facts.keys,
            facts.interval,
            facts.patience,
            facts.shutdown_timeout,
            facts.stall_timeout,
        )

    def _on_sign(self, sender: bytes, message: NodePing | NodeLeaves) -> None:
        node = self._nodes.get(message.node_id)
        if node is None and isinstance(message, NodeLeaves):
            return  # that was given up before
        if node is None:
            self._drop("unknown node", "NodePing of a node that has not joined, or was lost")
            self._send(sender, NodeRefused(message.node_id, "this head does not know it, or has given it up", False))
            return
        node.silence.heard()
        node.answered = True
        if node.peer != sender:  # it has lost its connection, or has given it up, and is about to lose patience
            node.peer = sender
            self._tell(node, HeadPing(node.node_id))
        if isinstance(message, NodeLeaves):
            if not node.leaving:
                logger.info("node %s %s", node.name, message.reason)
            node.leaving = True
            for process in node.ranks.values():
                process.node_leaves = message.reason
            if message.over:
                self._lose(node, message.reason, "stopped")

    def _on_rank(self, node: _Node, message: RankStarted | RankExited | RankProgress) -> None:
        process = node.ranks.get((message.rank, message.incarnation))
        if isinstance(message, RankExited):
            self._tell(node, RankForgotten(message.rank, message.incarnation))
            if process is not None:
                del node.ranks[process.key]
                process.on_exited(message)
        elif process is None:
            self._drop("unknown rank", f"{type(message).__name__} of rank {message.rank}, which does not run there")
        elif isinstance(message, RankStarted):
            process.on_started()
        else:
            self.on_progress(message)

    def _lose(self, node: _Node, what: str, word: str) -> None:
        del self._nodes[node.node_id]
        logger.log(logging.WARNING if node.ranks else logging.INFO, "node %s has gone: it %s", node.name, what)
        for process in node.ranks.values():
            process.lose(f"its node {node.name} {what}", word)

    def _by_peer(self, peer: bytes) -> _Node | None:
        return next((node for node in self._nodes.values() if node.peer == peer), None)

    def _tell(self, node: _Node, message: Any) -> None:
        if node.node_id in self._nodes:
            self._send(node.peer, message)

    def _send(self, peer: bytes, message: Any) -> None:
        self._channel.send(peer, self._encode(message))

    def _drop(self, reason: str, detail: str) -> None:
        if not self.dropped[reason]:
            logger.warning("dropped a message on the node channel (%s): %s; more are only counted", reason, detail)
        self.dropped[reason] += 1
