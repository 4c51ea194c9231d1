"""One life of a node: its connection to the head, from hello until the end of serving."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from outboard.errors import ProtocolError
from outboard.launch.nodes.ranks import NodeRanks
from outboard.launch.nodes.silence import Silence
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.nodes import (
    FromHead,
    HeadLeaves,
    HeadPing,
    NodeLeaves,
    NodePing,
    NodeRefused,
    NodeWelcome,
    RankForgotten,
    SignalRank,
    StartRank,
    WatchRank,
)
from outboard.transport.spoke import Spoke

__all__ = ["STOPPED", "NodeLife", "StopRequest"]

logger = logging.getLogger("outboard.node")

# A head that has not been heard for so many intervals gets a new connection, and another one in each further interval:
# after a cut the system waits for about as long again before it sends anew by the old one.
_FIRST_RENEWAL = 2
# What has happened to a node whose end was wanted.
STOPPED = "is being stopped"


class StopRequest:
    """Tells a node that its end is wanted, from any thread or signal handler.

    Attributes:
        count: how often that was said.
        fd: readable when it was said since `seen`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ask(self) -> None:
        """The end is wanted; said once more, at once."""
        self.count += 1
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def seen(self) -> None:
        """What was said so far has been noted."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def wait(self, seconds: float) -> None:
        """Waits so long, or until the end is wanted."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        poller.poll(seconds * 1000)

    def close(self) -> None:
        """Releases the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class NodeLife:
    """Belongs to the node's thread.

    Args:
        spoke: its connection; the caller's.
        node_id: names it.
        stop: tells when the node is to end.

    Attributes:
        node_id: names it.
    """

    def __init__(self, spoke: Spoke, node_id: str, stop: StopRequest) -> None:
        self.node_id = node_id
        self._stop = stop
        self._spoke = spoke
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(FromHead)
        self._dropped = 0

    def wait(self, fds: Sequence[int], timeout: float) -> None:
        """Waits until a message is there, an end is wanted or one of `fds` is readable, at most `timeout` seconds."""
        if self._stop.fd in self._spoke.wait([self._stop.fd, *fds], timeout):
            self._stop.seen()

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

    # --- serving ---

    def serve(self, ranks: NodeRanks, welcome: NodeWelcome) -> str:
        """Does what the head wants; what has happened to this node when that is over."""
        now = time.monotonic()
        silence = Silence(welcome.patience, welcome.interval, now)
        ping_at = now
        renew_at = _FIRST_RENEWAL * welcome.interval  # seconds of silence
        stops = 0  # those that have been seen
        leave_by: float | None = None
        while True:
            dues = [due for due in (ping_at, ranks.due, leave_by) if due is not None]
            self.wait([*ranks.sentinels], min(dues) - time.monotonic())
            now = time.monotonic()
            for message in self.messages():
                silence.heard()
                if isinstance(message, HeadLeaves):
                    return "has been left by its head"
                if isinstance(message, NodeRefused):
                    return "is not known to its head any more"
                self.obey(message, ranks, now)
            for exited in ranks.look(now):
                self.send(exited)
            if silence.listened(now):
                return f"has heard nothing of its head for {silence.seconds:.1f} s"
            if silence.seconds >= renew_at:
                renew_at = silence.seconds + welcome.interval
                self._spoke.renew()
                ping_at = now
            elif not silence.seconds:
                renew_at = _FIRST_RENEWAL * welcome.interval
            if stops != self._stop.count:
                stops = self._stop.count
                leave_by = leave_by or now + welcome.shutdown_timeout
                self.send(NodeLeaves(self.node_id, STOPPED, False))
                ranks.terminate_all()
            if leave_by is not None and (not len(ranks) or stops > 1 or now >= leave_by):
                return STOPPED
            if now >= ping_at:
                ping_at = now + welcome.interval
                self.ping(ranks, bool(stops))

    def ping(self, ranks: NodeRanks, leaving: bool) -> None:
        """Says that the node is there, how its engine cores go on, and once more what the head has not answered."""
        self.send(NodePing(self.node_id))
        if leaving:
            self.send(NodeLeaves(self.node_id, STOPPED, False))
        for message in (*ranks.unanswered(), *ranks.progress()):
            self.send(message)

    def obey(self, message: FromHead, ranks: NodeRanks, now: float) -> None:
        """Does what a message of the head wants, and answers."""
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
            self.send(answer)
