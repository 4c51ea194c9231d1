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
import socket
import time
from collections.abc import Mapping
from typing import Any

from outboard._version import __version__
from outboard.engines.registry import resolve_engine
from outboard.errors import ConfigError
from outboard.launch.nodes.life import STOPPED, NodeLife, StopRequest
from outboard.launch.nodes.ranks import NodeRanks
from outboard.launch.startup import search_path, sendable_options
from outboard.protocol.messages import PROTOCOL_VERSION
from outboard.protocol.nodes import (
    NodeHello,
    NodeLeaves,
    NodeRefused,
    NodeWelcome,
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
        self._stop = StopRequest()
        self._earlier: list[str] = []  # ids of lives that a head may still count on
        self._silent_since = 0.0  # no head has answered since then
        self._said_at = 0.0

    def stop(self) -> None:
        """Asks for the end: engine cores may end by themselves. A second call kills them. Does not wait."""
        self._stop.ask()

    def close(self) -> None:
        """Releases the descriptor. Idempotent; not while `run` is under way."""
        self._stop.close()

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
            while not self._stop.count and not self._is_lone():
                born = time.monotonic()
                served = self._live(session)
                # A head that takes it and loses it again and again is not to be troubled much.
                short = served and time.monotonic() - born < _LONG_LIFE
                pause = min(pause * 2, _LONGEST_PAUSE) if short else _FIRST_PAUSE
                if not self._stop.count:
                    self._stop.wait(pause)
        finally:
            session.remove()

    def _is_lone(self) -> bool:
        return self._lone_for is not None and time.monotonic() - self._silent_since >= self._lone_for

    def _live(self, session: SessionDirectory) -> bool:
        """One life; whether it came to serve a head."""
        node_id = secrets.token_hex(16)
        spoke = Spoke(self._context, self._head, linger_ms=_LINGER_MS)
        try:
            life = NodeLife(spoke, node_id, self._stop)
            welcome = self._join(life)
            if welcome is None:
                spoke.close(linger=bool(self._stop.count))  # nobody is to be welcomed who has gone
                return False
            self.joined = True
            self._earlier = [node_id]
            logger.info("joined the head at %s", self._head)
            ranks = NodeRanks(welcome, session, self._ranks, self._search_path)
            try:
                reason = life.serve(ranks, welcome)
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
            if not self._stop.count:
                logger.warning("node %s %s; %d engine cores have been ended", self.name, reason, len(exits))
            return True
        finally:
            spoke.close()

    # --- joining ---

    def _join(self, life: NodeLife) -> NodeWelcome | None:
        """Says hello; None: nobody has answered in time, or the head does not take us now."""
        hello = NodeHello(
            PROTOCOL_VERSION,
            __version__,
            platform.python_version(),
            life.node_id,
            self.name,
            self._ranks,
            proof_of(self._secret, life.node_id),
            self._earlier,
            self._engine,
            self._options,
        )
        life.send(hello)
        deadline = time.monotonic() + _ANSWER_BOUND
        if self._lone_for is not None:
            deadline = min(deadline, self._silent_since + self._lone_for)
        while not self._stop.count and (left := deadline - time.monotonic()) > 0:
            life.wait([], left)
            for message in life.messages():
                if isinstance(message, NodeWelcome):
                    return message
                if isinstance(message, NodeRefused):
                    if message.final:
                        raise ConfigError(f"the head at {self._head} does not take this node: {message.reason}")
                    return None
        self._earlier = [*self._earlier[1 - _MOST_EARLIER :], life.node_id]  # it may have been welcomed in vain
        if self._stop.count:
            life.send(NodeLeaves(life.node_id, STOPPED, True))
        self._say_silent()
        return None

    def _say_silent(self) -> None:
        now = time.monotonic()
        if now >= self._said_at and not self._stop.count:
            self._said_at = now + _SAY_AGAIN
            logger.warning(
                "no head has answered at %s for %.0f s: is it up, can this machine reach it, and do both have the same "
                "token file? It is tried on.",
                self._head,
                now - self._silent_since,
            )
