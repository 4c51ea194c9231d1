"""A node: runs engine cores for a head on another machine, for as long as that is there.

    joining --welcomed--> serving --the head is silent for too long, ends, or knows us no more--> joining
    serving --stop--> leaving --all have ended--> over

One time from hello until the end of serving is a life, with an id and connection of its own. When it ends all its
engine cores are ended first: they must not serve on while the head starts others in their place.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import select
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from outboard._version import __version__
from outboard.engines.registry import resolve_engine
from outboard.errors import ConfigError, ProtocolError
from outboard.launch.node_ranks import NodeRanks
from outboard.launch.silence import Silence
from outboard.launch.startup import search_path, sendable_options
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.messages import PROTOCOL_VERSION
from outboard.protocol.nodes import (
    FromHead,
    HeadLeaves,
    HeadPing,
    NodeHello,
    NodeLeaves,
    NodePing,
    NodeRefused,
    NodeWelcome,
    RankForgotten,
    SignalRank,
    StartRank,
    WatchRank,
    proof_of,
)
from outboard.transport.session import SessionDirectory
from outboard.transport.sockets import ZmqContext
from outboard.transport.spoke import Spoke

__all__ = ["Node"]

logger = logging.getLogger("outboard.node")

# How long a head may take to answer a hello, seconds; then another one is sent, by a new connection.
_ANSWER_BOUND = 5.0
# Between two lives, seconds; doubles while lives are short.
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 10.0
_LONG_LIFE = 30.0
# Last words may take so long to leave, milliseconds.
_LINGER_MS = 1000
# Of so many lives in which no answer came a head is told, should it have heard of them.
_MOST_EARLIER = 100
# What has happened to a node.
_STOPPED = "is being stopped"
# How often to say that no head answers, seconds.
_SAY_AGAIN = 60.0


class Node:
    """Runs in the thread that calls `run`; `stop` may be called from any thread, and from a signal handler.

    Args:
        context: for its sockets; has the keys. It is the caller's.
        head: ZeroMQ address where the head lets nodes join, "tcp://host:port".
        secret: what it shares with the head.
        name: what people call it; default: the host's name.
        ranks: engine cores that it has room for.
        engine: the only engine that it is willing to run, as in `EngineConfig`; "": any.
        options: options that this engine must have.
        lone_for: seconds without a head after which `run` ends; None: it tries for ever.

    Attributes:
        name: what people call it.
        joined: whether a head has it now.

    Raises:
        ConfigError: no such engine, or options that cannot be sent.
    """

    def __init__(
        self,
        context: ZmqContext,
        head: str,
        secret: str,
        *,
        name: str = "",
        ranks: int = 1,
        engine: str = "",
        options: Mapping[str, Any] | None = None,
        lone_for: float | None = None,
    ) -> None:
        self.name = name or socket.gethostname()
        self.joined = False
        self._context = context
        self._head = head
        self._secret = secret
        self._ranks = ranks
        self._engine = resolve_engine(engine) if engine else ""
        self._options = sendable_options(dict(options or {}))
        self._lone_for = lone_for
        self._search_path = os.pathsep.join(search_path())
        self._stops = 0
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._earlier: list[str] = []  # ids of lives that a head may still count on
        self._silent_since = 0.0  # no head has answered since then
        self._said_at = 0.0

    def stop(self) -> None:
        """Asks for the end: engine cores may end by themselves. A second call kills them. Does not wait."""
        self._stops += 1
        os.eventfd_write(self._stop_fd, 1)

    def close(self) -> None:
        """Releases the descriptor. Idempotent; not while `run` is under way."""
        stop_fd, self._stop_fd = self._stop_fd, -1
        if stop_fd >= 0:
            os.close(stop_fd)

    def run(self) -> None:
        """Serves one head after the other until `stop`, or until none has been there for too long.

        Raises:
            ConfigError: a head has refused this node for what it is; the message says why.
            OSError: no descriptor or directory is to be had.
        """
        session = SessionDirectory()
        pause = _FIRST_PAUSE
        self._silent_since = self._said_at = time.monotonic()
        try:
            while not self._stops and not self._is_lone():
                born = time.monotonic()
                self._live(session)
                pause = _FIRST_PAUSE if time.monotonic() - born > _LONG_LIFE else min(pause * 2, _LONGEST_PAUSE)
                if not self._stops:
                    self._wait(pause)
        finally:
            session.remove()

    def _is_lone(self) -> bool:
        return self._lone_for is not None and time.monotonic() - self._silent_since >= self._lone_for

    def _live(self, session: SessionDirectory) -> None:
        """One life."""
        node_id = secrets.token_hex(16)
        spoke = Spoke(self._context, self._head, linger_ms=_LINGER_MS)
        try:
            life = _Life(spoke, node_id)
            welcome = self._join(life)
            if welcome is None:
                return
            self.joined = True
            self._earlier = [node_id]
            logger.info("joined the head at %s", self._head)
            ranks = NodeRanks(welcome, session, self._ranks, self._search_path)
            try:
                reason = self._serve(life, ranks, welcome)
            except BaseException:
                ranks.end_all()
                raise
            finally:
                self.joined = False
            life.send(NodeLeaves(node_id, reason, False))
            exits = ranks.end_all()
            for last_words in (*exits, NodeLeaves(node_id, reason, True)):
                life.send(last_words)
            self._silent_since = self._said_at = time.monotonic()
            if not self._stops:
                logger.warning("node %s %s; %d engine cores have been ended", self.name, reason, len(exits))
        finally:
            spoke.close()

    def _wait(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._stop_fd, select.POLLIN)
        poller.poll(seconds * 1000)

    # --- joining ---

    def _join(self, life: _Life) -> NodeWelcome | None:
        """Says hello; None: nobody has answered in time, or the head does not take us now."""
        hello = NodeHello(
            PROTOCOL_VERSION,
            __version__,
            platform.python_version(),
            life.node_id,
            self.name,
            self._ranks,
            proof_of(self._secret, life.node_id),
            self._earlier[-_MOST_EARLIER:],
            self._engine,
            self._options,
        )
        life.send(hello)
        deadline = time.monotonic() + _ANSWER_BOUND
        if self._lone_for is not None:
            deadline = min(deadline, self._silent_since + self._lone_for)
        while not self._stops and (left := deadline - time.monotonic()) > 0:
            life.wait([self._stop_fd], left)
            for message in life.messages():
                if isinstance(message, NodeWelcome):
                    return message
                if isinstance(message, NodeRefused):
                    if message.final:
                        raise ConfigError(f"the head at {self._head} does not take this node: {message.reason}")
                    return None
        self._earlier.append(life.node_id)  # it may have been welcomed in vain
        if self._stops:
            life.send(NodeLeaves(life.node_id, _STOPPED, True))
        self._say_silent()
        return None

    def _say_silent(self) -> None:
        now = time.monotonic()
        if now >= self._said_at and not self._stops:
            self._said_at = now + _SAY_AGAIN
            logger.warning(
                "no head has answered at %s for %.0f s: is it up, can this machine reach it, and do both have the same "
                "token file? It is tried on.",
                self._head,
                now - self._silent_since,
            )

    # --- serving ---

    def _serve(self, life: _Life, ranks: NodeRanks, welcome: NodeWelcome) -> str:
        """Does what the head wants; what has happened to this node when that is over."""
        now = time.monotonic()
        silence = Silence(welcome.patience, welcome.interval, now)
        ping_at = now
        stops = 0  # those that have been seen
        leave_by: float | None = None
        while True:
            dues = [due for due in (ping_at, ranks.due, leave_by) if due is not None]
            life.wait([self._stop_fd, *ranks.sentinels], min(dues) - time.monotonic())
            now = time.monotonic()
            for message in life.messages():
                silence.heard()
                if isinstance(message, HeadLeaves):
                    return "has been left by its head"
                if isinstance(message, NodeRefused):
                    return "is not known to its head any more"
                self._obey(message, life, ranks, now)
            for exited in ranks.look(now):
                life.send(exited)
            if silence.listened(now):
                return f"has heard nothing of its head for {silence.seconds:.1f} s"
            if stops != self._stops:
                stops = self._take_stop()
                leave_by = self._leave(life, ranks, stops, now + welcome.shutdown_timeout)
            if leave_by is not None and (not len(ranks) or stops > 1 or now >= leave_by):
                return _STOPPED
            if now >= ping_at:
                ping_at = now + welcome.interval
                life.send(NodePing(life.node_id))
                if stops:
                    life.send(NodeLeaves(life.node_id, _STOPPED, False))
                for message in (*ranks.unanswered(), *ranks.progress()):
                    life.send(message)

    def _obey(self, message: FromHead, life: _Life, ranks: NodeRanks, now: float) -> None:
        answer: object | None = None
        match message:
            case StartRank():
                answer = ranks.start(message)
            case SignalRank():
                answer = ranks.signal(message, now)
            case WatchRank():
                ranks.watch(message)
            case RankForgotten():
                ranks.forget(message)
            case HeadPing() | NodeWelcome():
                pass  # it was heard
        if answer is not None:
            life.send(answer)

    def _take_stop(self) -> int:
        try:
            os.eventfd_read(self._stop_fd)
        except BlockingIOError:
            pass
        return self._stops

    def _leave(self, life: _Life, ranks: NodeRanks, stops: int, by: float) -> float:
        """Tells the head that this node goes, and its engine cores to end; by when they must have."""
        if stops == 1:
            life.send(NodeLeaves(life.node_id, _STOPPED, False))
            ranks.terminate_all()
        return by


class _Life:
    """The connection of one life."""

    def __init__(self, spoke: Spoke, node_id: str) -> None:
        self.node_id = node_id
        self.wait = spoke.wait
        self._spoke = spoke
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(FromHead)
        self._dropped = 0

    def send(self, message: Any) -> None:
        """Sends; what a head that is away cannot take is said again later."""
        self._spoke.send(self._encode(message))

    def messages(self) -> Iterator[FromHead]:
        """All that have come."""
        while (frames := self._spoke.receive()) is not None:
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"{len(frames)} frames; a message on the node channel has one")
                message: FromHead = self._decoder.decode(frames[0])
            except ProtocolError as error:
                if not self._dropped:
                    logger.warning("dropped a message of the head: %s; more are only counted", error)
                self._dropped += 1
                continue
            yield message
