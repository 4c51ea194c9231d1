"""The handshake under every order of good and bad messages, of the right and of wrong peers."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outboard.launch.handshake import EngineHandshake, HandshakeState
from outboard.protocol.messages import (
    PROTOCOL_VERSION,
    EngineInfo,
    ErrorReport,
    Failed,
    Hello,
    Init,
    Ready,
    Refused,
)
from sample_messages import encoded

TOKEN = "the session's token"
RANK, INCARNATION = 1, 2
INIT = msgspec.structs.replace(msgspec.msgpack.decode(encoded(Init)[0], type=Init), rank=RANK, incarnation=INCARNATION)

PEERS = st.sampled_from([b"one", b"two", b""])
TOKENS = st.sampled_from([TOKEN, TOKEN, TOKEN, "", "guess", TOKEN + " "])
ODD: list[Any] = [[], {}, ["hello"], ["ready", TOKEN], INIT, Refused("x")]
GARBAGE = st.one_of(st.binary(max_size=20), st.sampled_from([msgspec.msgpack.encode(value) for value in ODD]))


class AnyOrder(RuleBasedStateMachine):
    """Peers that say anything. What is checked are promises, not how the handshake keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.handshake = EngineHandshake(TOKEN, INIT)
        self.greeted: bytes | None = None  # who got INIT
        self.refusals = 0

    def tell(self, peer: bytes, frames: list[bytes], token: str = "", kind: Any = None) -> None:
        before = self.handshake.state
        answer = self.handshake.receive(peer, frames)
        after = self.handshake.state
        reply = None if answer is None else msgspec.msgpack.decode(answer, type=Init | Refused)
        if isinstance(reply, Refused):
            self.refusals += 1
            assert reply.reason
            assert TOKEN not in reply.reason
            assert after is not HandshakeState.READY or before is after
        elif isinstance(reply, Init):
            assert reply == INIT
            assert kind is Hello and token == TOKEN
            assert self.greeted is None
            assert (before, after) == (HandshakeState.WAITING_HELLO, HandshakeState.WAITING_READY)
            self.greeted = peer
        else:  # it was believed: only what the greeted peer says with our token
            assert token == TOKEN
            assert peer == self.greeted
            assert before is HandshakeState.WAITING_READY
            assert after is {Ready: HandshakeState.READY, Failed: HandshakeState.FAILED}[kind]
        if before in (HandshakeState.READY, HandshakeState.FAILED):
            assert after is before
        if after is not before and kind is None:  # garbage ends only the child's own start
            assert peer == self.greeted
            assert after is HandshakeState.FAILED
        if kind is not None and token != TOKEN:
            assert isinstance(reply, Refused)
            assert after is before

    @rule(
        peer=PEERS,
        token=TOKENS,
        version=st.sampled_from([PROTOCOL_VERSION] * 4 + [0, PROTOCOL_VERSION + 1]),
        rank=st.sampled_from([RANK] * 4 + [0]),
        incarnation=st.sampled_from([INCARNATION] * 4 + [1, 3]),
    )
    def hello(self, peer: bytes, token: str, version: int, rank: int, incarnation: int) -> None:
        message = Hello(version, "1.2.3", token, rank, incarnation, 10, 11)
        greeted = self.greeted
        self.tell(peer, [msgspec.msgpack.encode(message)], token, Hello)
        if (version, rank, incarnation) != (PROTOCOL_VERSION, RANK, INCARNATION):
            assert self.greeted is greeted

    @rule(peer=PEERS, token=TOKENS)
    def ready(self, peer: bytes, token: str) -> None:
        self.tell(peer, [msgspec.msgpack.encode(Ready(token, EngineInfo(model="m")))], token, Ready)

    @rule(peer=PEERS, token=TOKENS)
    def failed(self, peer: bytes, token: str) -> None:
        self.tell(peer, [msgspec.msgpack.encode(Failed(token, ErrorReport("a", "b", "c")))], token, Failed)

    @rule(peer=PEERS, body=GARBAGE)
    def garbage(self, peer: bytes, body: bytes) -> None:
        self.tell(peer, [body])

    @rule(peer=PEERS, count=st.sampled_from([0, 2, 3]))
    def wrong_number_of_frames(self, peer: bytes, count: int) -> None:
        self.tell(peer, [msgspec.msgpack.encode(Ready(TOKEN, EngineInfo()))] * count)

    @invariant()
    def what_it_says_of_itself_fits(self) -> None:
        handshake = self.handshake
        state = handshake.state
        assert (handshake.hello is not None) == (self.greeted is not None)
        assert (handshake.ready is not None) == (state is HandshakeState.READY)
        assert (handshake.failure is not None) == (state is HandshakeState.FAILED)
        assert (handshake.info is not None) == (state is HandshakeState.READY)
        assert state is not HandshakeState.READY or self.greeted is not None
        assert handshake.refused == self.refusals


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
