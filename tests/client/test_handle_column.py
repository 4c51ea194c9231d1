"""Messages about the same requests as the one before share handles and ids; what is delivered is as if they did not."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from outboard.client.pending import PendingTable
from outboard.client.receiver import Counters, Receiver
from outboard.protocol.messages import EngineCoreOutputs

EPOCH = 7


class Heard:
    """A listener that keeps what it gets."""

    needs_ids = True

    def __init__(self) -> None:
        self.messages: list[EngineCoreOutputs] = []
        self.broken: list[str] = []

    def deliver(self, message: EngineCoreOutputs) -> None:
        self.messages.append(message)

    def on_engine_dead(self, rank: int, report: Any) -> None:
        raise AssertionError("it lives")

    def on_broken(self, rank: int, reason: str) -> None:
        self.broken.append(reason)

    def on_notification(self, payload: tuple[str, int]) -> bool:
        return False


class Way:
    """A receiver, and messages that all come in the same memory, as those over a socket do."""

    def __init__(self) -> None:
        self.table = PendingTable()
        self.heard = Heard()
        self.receiver = Receiver(self.table, 0, EPOCH, self.heard, Counters())
        self._memory = bytearray(1 << 12)
        self._sequence = 0

    def send(self, handles: Any, **more: Any) -> None:
        tokens = [1] * len(handles)
        body = msgspec.msgpack.encode(EngineCoreOutputs(0, EPOCH, self._sequence, 0.0, handles, tokens, **more))
        self._sequence += 1
        self._memory[:] = bytes(len(self._memory))
        self._memory[: len(body)] = body
        self.receiver.on_message(memoryview(self._memory)[: len(body)], ())


# Few handles, so that columns repeat; some of them are never given to a request.
SEND = st.tuples(st.just("send"), st.sampled_from([(0,), (1,), (0, 1), (1, 0), (0, 1, 2, 3), (300, 301)]))
STEPS = st.lists(st.one_of(SEND, SEND, st.tuples(st.sampled_from(["add", "end"]), st.integers(0, 3))))


@given(STEPS)
def test_handles_and_ids_are_those_of_each_message_when_it_came(steps: list[tuple[str, Any]]) -> None:
    way = Way()
    expected = []
    for position, (what, argument) in enumerate(steps):
        if what == "add":
            way.table.add_request(f"request {position}")
        elif what == "end":
            way.table.end_request(argument)
        else:
            expected.append((list(argument), [way.table.request_ids.get(handle) for handle in argument]))
            way.send(list(argument))
    assert [(message.handles, message.request_ids) for message in way.heard.messages] == expected
    assert not way.heard.broken


def test_the_message_that_ends_a_request_has_its_id_and_the_next_one_has_not() -> None:
    way = Way()
    way.table.add_request("a")
    way.table.add_request("b")
    way.send([0, 1])
    way.send([0, 1], finished=[(1, "stop", None)])
    way.send([0, 1])
    assert [message.request_ids for message in way.heard.messages] == [["a", "b"], ["a", "b"], ["a", None]]


def test_messages_about_the_same_requests_share_their_lists() -> None:
    way = Way()
    way.table.add_request("a")
    way.send([0])
    way.send([0])
    first, second = way.heard.messages
    assert first.handles is second.handles and first.request_ids is second.request_ids


def test_a_column_that_holds_no_handles_is_the_end() -> None:
    way = Way()
    way.send([0])
    way.send(["a"])
    assert len(way.heard.messages) == 1
    assert len(way.heard.broken) == 1
