"""The launcher's half of the handshake with one engine core, as a state machine without IO.

    WAITING_HELLO --HELLO / INIT--> WAITING_READY --READY--> READY
                                                  --FAILED--> FAILED

Whoever does not belong here (another token, version, rank or incarnation; a second peer) gets `Refused` with the
difference, and changes nothing, with one exception: a peer with our token but another protocol version, before any
other has said HELLO, is our own child, which can never get ready; so the handshake fails.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from outboard._version import __version__
from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.messages import PROTOCOL_VERSION, EngineInfo, ErrorReport, Failed, Hello, Init, Ready, Refused

__all__ = ["EngineHandshake", "HandshakeState"]


class HandshakeState(Enum):
    """Where a handshake is; the value is what a time-out says of it."""

    WAITING_HELLO = "the process had started but said no HELLO"
    WAITING_READY = "the engine was being loaded and was not READY"
    READY = "the engine was ready"
    FAILED = "the engine had failed"


class EngineHandshake:
    """Decides what to answer to each message of the control channel.

    Args:
        token: the session's secret.
        init: the answer to a proper HELLO; its rank and incarnation are those that HELLO must name.

    Attributes:
        state: where it is.
        hello: who said HELLO; None before.
        ready: the READY message; None before.
        failure: why the engine core cannot get ready; None unless `state` is FAILED.
        refused: how many messages were refused or made no sense.
    """

    def __init__(self, token: str, init: Init) -> None:
        self._token = token
        self._init = init
        self._peer = b""
        self._decoder: MsgpackDecoder[Hello | Ready | Failed] = MsgpackDecoder(Hello | Ready | Failed)
        self.state = HandshakeState.WAITING_HELLO
        self.hello: Hello | None = None
        self.ready: Ready | None = None
        self.failure: ErrorReport | None = None
        self.refused = 0

    @property
    def info(self) -> EngineInfo | None:
        """What the engine reported of itself; None before READY."""
        return self.ready.info if self.ready is not None else None

    def receive(self, sender: bytes, frames: list[bytes]) -> bytes | None:
        """Takes one message; what to send back to `sender`, or None."""
        try:
            if len(frames) != 1:
                raise ProtocolError(f"{len(frames)} frames; a handshake message has one")
            message = self._decoder.decode(frames[0])
        except ProtocolError as error:
            if sender == self._peer and self.state is HandshakeState.WAITING_READY:
                self._fail(f"its READY makes no sense: {error}")  # it would wait for ever
            return self._refuse(str(error))
        if message.session_token != self._token:
            return self._refuse("the session token is not this session's")
        if isinstance(message, Hello):
            return self._on_hello(sender, message)
        if sender != self._peer or self.state is not HandshakeState.WAITING_READY:
            return self._refuse(f"unexpected {type(message).__name__}: {self.state.value}")
        if isinstance(message, Ready):
            self.ready = message
            self.state = HandshakeState.READY
        else:
            self.failure = message.report
            self.state = HandshakeState.FAILED
        return None

    def _on_hello(self, sender: bytes, hello: Hello) -> bytes:
        if hello.protocol_version != PROTOCOL_VERSION:
            reason = (
                f"protocol version {hello.protocol_version} (outboard {hello.outboard_version}) does not fit the front "
                f"end's {PROTOCOL_VERSION} (outboard {__version__}): both must run the same installation"
            )
            if self.state is HandshakeState.WAITING_HELLO:
                self._fail(reason)
            return self._refuse(reason)
        for name in ("rank", "incarnation"):
            theirs, ours = getattr(hello, name), getattr(self._init, name)
            if theirs != ours:
                return self._refuse(f"{name} {theirs} is not the {ours} that is awaited here")
        if self.state is not HandshakeState.WAITING_HELLO:
            return self._refuse(f"rank {hello.rank} has said HELLO already")
        self.hello = hello
        self._peer = sender
        self.state = HandshakeState.WAITING_READY
        return msgspec.msgpack.encode(self._init)

    def _fail(self, reason: str) -> None:
        self.failure = ErrorReport("outboard.errors.ProtocolError", reason, reason)
        self.state = HandshakeState.FAILED

    def _refuse(self, reason: str) -> bytes:
        self.refused += 1
        return msgspec.msgpack.encode(Refused(reason))
