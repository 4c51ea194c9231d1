"""An engine core's two ends of the coordinator's channel: the input thread's ear, the busy loop's mouth."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import msgspec

from outboard.dp.messages import Joined, ListenAsRank, SpeakAsRank
from outboard.dp.waves import SetControl, StartWave
from outboard.engine.events import CoordinatorJoined
from outboard.engine.incoming import Drops
from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.control import CoordinatorAt
from outboard.transport.sockets import ZmqContext
from outboard.transport.spoke import Spoke

__all__ = ["CoordinatorEar", "SocketMouth"]

# What was said last may take so long to leave when the process ends, milliseconds.
_LINGER_MS = 200


class SocketMouth:
    """What the busy loop tells one incarnation of the coordinator. Made in the input thread, then the busy loop's.

    Args:
        spoke: the socket.
        coordinator: incarnation of the coordinator.
    """

    def __init__(self, spoke: Spoke, coordinator: int) -> None:
        self._spoke = spoke
        self._encode = msgspec.msgpack.Encoder().encode
        self.coordinator = coordinator

    def say(self, message: Any) -> bool:
        """Sends a message; False if the coordinator takes none."""
        return self._spoke.send(self._encode(message))

    def close(self) -> None:
        self._spoke.close()


class CoordinatorEar:
    """Follows the coordinator from one incarnation to the next. Belongs to the input thread.

    Args:
        context: of the sockets.
        who: how this rank introduces itself.
        inbox: the busy loop's queue.
        drops: counts what makes no sense.
    """

    def __init__(self, context: ZmqContext, who: ListenAsRank, inbox: SimpleQueue[Any], drops: Drops) -> None:
        self._context = context
        self._who = who
        self._inbox = inbox
        self._drops = drops
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(Joined | StartWave | SetControl)
        self._place = CoordinatorAt(-1, "")
        self._spoke: Spoke | None = None

    def follow(self, place: CoordinatorAt) -> Spoke | None:
        """The coordinator is there now. Returns the socket to read by `read`; None if it was there before."""
        if place.incarnation <= self._place.incarnation:
            return None
        self._place = place
        self._spoke = spoke = Spoke(self._context, place.address)
        spoke.send(msgspec.msgpack.encode(self._who))
        return spoke

    @property
    def spoke(self) -> Spoke | None:
        """The socket that is read."""
        return self._spoke

    def read(self) -> bool:
        """Takes all messages that are there; whether some are left."""
        while self._spoke is not None and (frames := self._spoke.receive()) is not None:
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"{len(frames)} frames; a message of the coordinator has one")
                message = self._decoder.decode(frames[0])
            except ProtocolError as error:
                self._drops.note("coordinator", error)
                continue
            if isinstance(message, Joined):
                message = self._make_mouth()
            self._inbox.put(message)
        return False

    def _make_mouth(self) -> CoordinatorJoined:
        spoke = Spoke(self._context, self._place.address, linger_ms=_LINGER_MS)
        mouth = SocketMouth(spoke, self._place.incarnation)
        mouth.say(SpeakAsRank(self._who.session_token, self._who.rank, self._who.incarnation))
        return CoordinatorJoined(mouth)

    def close(self) -> None:
        if self._spoke is not None:
            self._spoke.close()
