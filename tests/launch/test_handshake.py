"""The launcher's half of the handshake: no IO, so every order of messages can be tried."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outboard._version import __version__
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

TOKEN = "secret"
OWN, OTHER = b"own", b"other"
INIT = Init(
    engine="m:C",
    options={"o": 1},
    sys_path=["/x"],
    rank=1,
    incarnation=2,
    high_water_mark=1000,
    max_message_bytes=1 << 32,
    inline_bytes=1 << 16,
)
INFO = EngineInfo(max_model_len=77, extra={"x": 1})
REPORT = ErrorReport("m.E", "text", "traceback")


def hello(**changes: Any) -> Hello:
    return msgspec.structs.replace(Hello(PROTOCOL_VERSION, "0.1", TOKEN, 1, 2, pid=100, pgid=101), **changes)


def tell(handshake: EngineHandshake, message: Any, sender: bytes = OWN) -> Any:
    """Sends a message, or raw bytes; the decoded answer."""
    body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    answer = handshake.receive(sender, [body])
    return None if answer is None else msgspec.msgpack.decode(answer, type=Init | Refused)


def facts(handshake: EngineHandshake) -> tuple[Any, ...]:
    return handshake.state, handshake.hello, handshake.info, handshake.failure


@pytest.fixture
def handshake() -> EngineHandshake:
    return EngineHandshake(TOKEN, INIT)


@pytest.fixture
def greeted(handshake: EngineHandshake) -> EngineHandshake:
    assert tell(handshake, hello()) == INIT
    return handshake


def assert_refused(answer: Any, handshake: EngineHandshake, *words: str) -> None:
    assert isinstance(answer, Refused)
    assert all(word in answer.reason for word in words), answer.reason
    assert handshake.refused == 1
    assert TOKEN not in answer.reason


# --- the proper way --------------------------------------------------------------------------------------------------


def test_hello_init_ready(handshake: EngineHandshake) -> None:
    assert facts(handshake) == (HandshakeState.WAITING_HELLO, None, None, None)
    assert tell(handshake, hello()) == INIT
    assert facts(handshake) == (HandshakeState.WAITING_READY, hello(), None, None)
    assert tell(handshake, Ready(TOKEN, INFO)) is None
    assert facts(handshake) == (HandshakeState.READY, hello(), INFO, None)
    assert handshake.refused == 0


def test_hello_init_failed(greeted: EngineHandshake) -> None:
    assert tell(greeted, Failed(TOKEN, REPORT)) is None
    assert facts(greeted) == (HandshakeState.FAILED, hello(), None, REPORT)


def test_another_release_with_the_same_protocol_is_welcome(handshake: EngineHandshake) -> None:
    assert tell(handshake, hello(outboard_version="9.9.9")) == INIT


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (hello(session_token="guess"), ["session token is not this session's"]),
        (hello(session_token=""), ["session token"]),
        (hello(rank=0), ["rank 0 is not the 1"]),
        (hello(incarnation=1), ["incarnation 1 is not the 2"]),
        (hello(incarnation=3), ["incarnation 3 is not the 2"]),
        (Ready(TOKEN, INFO), ["unexpected Ready", "said no HELLO"]),
        (Failed(TOKEN, REPORT), ["unexpected Failed", "said no HELLO"]),
        (Ready("guess", INFO), ["session token"]),
        (b"", ["undecodable"]),
        (b"garbage", ["undecodable"]),
        (msgspec.msgpack.encode(["hello", "one"]), ["undecodable"]),
        (msgspec.msgpack.encode(["init", "x"]), ["undecodable"]),
        (msgspec.msgpack.encode({"token": TOKEN}), ["undecodable"]),
    ],
)
def test_what_does_not_belong_here_is_told_the_difference(
    handshake: EngineHandshake, message: Any, words: list[str]
) -> None:
    answer = tell(handshake, message)
    assert_refused(answer, handshake, *words)
    assert facts(handshake) == (HandshakeState.WAITING_HELLO, None, None, None)
    assert tell(handshake, hello()) == INIT  # and the proper way is still open


@pytest.mark.parametrize("frames", [[], [b"", b""], [msgspec.msgpack.encode(hello()), b""]], ids=len)
def test_a_message_has_one_frame(handshake: EngineHandshake, frames: list[bytes]) -> None:
    answer = handshake.receive(OWN, frames)
    assert answer is not None
    assert_refused(msgspec.msgpack.decode(answer, type=Refused), handshake, f"{len(frames)} frames")
    assert handshake.state is HandshakeState.WAITING_HELLO


@pytest.mark.parametrize("sender", [OWN, OTHER])
def test_a_second_hello(greeted: EngineHandshake, sender: bytes) -> None:
    before = facts(greeted)
    assert_refused(tell(greeted, hello(pid=999), sender), greeted, "rank 1 has said HELLO already")
    assert facts(greeted) == before
    assert tell(greeted, Ready(TOKEN, INFO)) is None
    assert greeted.state is HandshakeState.READY


@pytest.mark.parametrize("message", [Ready(TOKEN, EngineInfo()), Failed(TOKEN, REPORT)])
def test_the_end_is_told_by_whoever_said_hello(greeted: EngineHandshake, message: Any) -> None:
    before = facts(greeted)
    assert_refused(tell(greeted, message, OTHER), greeted, f"unexpected {type(message).__name__}")
    assert facts(greeted) == before


@pytest.mark.parametrize("first", [Ready(TOKEN, INFO), Failed(TOKEN, REPORT)])
@pytest.mark.parametrize("second", [Ready(TOKEN, EngineInfo()), Failed(TOKEN, ErrorReport("x", "y", "z")), hello()])
def test_the_end_is_the_end(greeted: EngineHandshake, first: Any, second: Any) -> None:
    tell(greeted, first)
    before = facts(greeted)
    assert_refused(tell(greeted, second), greeted)
    assert facts(greeted) == before


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_our_own_child_of_another_version_can_never_get_ready(handshake: EngineHandshake, version: int) -> None:
    answer = tell(handshake, hello(protocol_version=version, outboard_version="7.8.9"))
    assert_refused(answer, handshake, f"protocol version {version}", "7.8.9", f"end's {PROTOCOL_VERSION}", __version__)
    assert handshake.state is HandshakeState.FAILED
    assert handshake.failure is not None
    assert handshake.failure.type == "outboard.errors.ProtocolError"
    assert handshake.failure.message == answer.reason
    assert tell(handshake, Ready(TOKEN, INFO)).reason
    assert handshake.info is None


def test_a_stranger_of_another_version_changes_nothing(handshake: EngineHandshake) -> None:
    answer = tell(handshake, hello(protocol_version=PROTOCOL_VERSION + 1, session_token="guess"))
    assert_refused(answer, handshake, "session token")
    assert handshake.state is HandshakeState.WAITING_HELLO


@pytest.mark.parametrize("ready", [False, True])
def test_another_version_behind_our_child_s_hello_changes_nothing(greeted: EngineHandshake, ready: bool) -> None:
    """Our own child is known by then: whoever says this is not it."""
    if ready:
        tell(greeted, Ready(TOKEN, INFO))
    before = facts(greeted)
    assert isinstance(tell(greeted, hello(protocol_version=PROTOCOL_VERSION + 1), OTHER), Refused)
    assert facts(greeted) == before


# --- every order -----------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=3))
def test_garbage_changes_nothing(frames: list[bytes]) -> None:
    handshake = EngineHandshake(TOKEN, INIT)
    assert handshake.receive(OWN, frames) is not None
    assert handshake.state is HandshakeState.WAITING_HELLO
    assert handshake.refused == 1


def test_garbage_of_our_own_child_where_its_ready_belongs_fails(greeted: EngineHandshake) -> None:
    assert greeted.receive(OWN, [b"garbage"]) is not None
    assert greeted.state is HandshakeState.FAILED
    assert greeted.failure is not None and "READY makes no sense" in greeted.failure.message


class AnyOrder(RuleBasedStateMachine):
    """Messages of our own child and of foreign peers, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.handshake = EngineHandshake(TOKEN, INIT)
        self.said_hello = False
        self.end: Any = None
        self.refused = 0

    def foreign(self, message: Any, sender: bytes) -> None:
        before = facts(self.handshake)
        answer = tell(self.handshake, message, sender)
        assert isinstance(answer, Refused) and answer.reason
        assert facts(self.handshake) == before
        self.refused += 1

    @rule()
    def own_hello(self) -> None:
        answer = tell(self.handshake, hello())
        if self.said_hello:
            assert isinstance(answer, Refused)
            self.refused += 1
        else:
            assert answer == INIT
            self.said_hello = True

    @rule(message=st.sampled_from([Ready(TOKEN, INFO), Failed(TOKEN, REPORT)]))
    def own_end(self, message: Any) -> None:
        answer = tell(self.handshake, message)
        if self.said_hello and self.end is None:
            assert answer is None
            self.end = message
        else:
            assert isinstance(answer, Refused)
            self.refused += 1

    @rule(
        token=st.text(max_size=8).filter(lambda token: token != TOKEN),
        version=st.integers(0, 3),
        rank=st.integers(0, 2),
        incarnation=st.integers(0, 3),
        sender=st.sampled_from([OWN, OTHER, b""]),
    )
    def hello_with_another_token(self, token: str, version: int, rank: int, incarnation: int, sender: bytes) -> None:
        message = hello(session_token=token, protocol_version=version, rank=rank, incarnation=incarnation)
        self.foreign(message, sender)

    @rule(
        place=st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda place: place != (1, 2)),
        sender=st.sampled_from([OWN, OTHER]),
    )
    def hello_of_another_rank_or_incarnation(self, place: tuple[int, int], sender: bytes) -> None:
        self.foreign(hello(rank=place[0], incarnation=place[1]), sender)

    @precondition(lambda self: self.said_hello)
    @rule()
    def hello_of_a_second_peer(self) -> None:
        self.foreign(hello(), OTHER)

    @rule(
        message=st.sampled_from([Ready(TOKEN, EngineInfo()), Failed(TOKEN, ErrorReport("", "", ""))]),
        sender=st.sampled_from([OTHER, b""]),
    )
    def end_of_another_peer(self, message: Any, sender: bytes) -> None:
        self.foreign(message, sender)

    @rule(body=st.binary(max_size=30), sender=st.sampled_from([OTHER, b""]))
    def garbage(self, body: bytes, sender: bytes) -> None:
        self.foreign(body, sender)

    @invariant()
    def it_is_where_our_child_is(self) -> None:
        handshake = self.handshake
        if isinstance(self.end, Ready):
            expected: tuple[Any, ...] = (HandshakeState.READY, hello(), INFO, None)
        elif isinstance(self.end, Failed):
            expected = (HandshakeState.FAILED, hello(), None, REPORT)
        elif self.said_hello:
            expected = (HandshakeState.WAITING_READY, hello(), None, None)
        else:
            expected = (HandshakeState.WAITING_HELLO, None, None, None)
        assert facts(handshake) == expected
        assert handshake.refused == self.refused


TestAnyOrder = AnyOrder.TestCase
