"""A backlog in parts: whoever gets them gets what he would have got in one piece."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outboard.client.receiver import Receiver
from outboard.engine.batch import Columns, OutputBatch, Part
from outboard.engine.splitting import split
from outboard.protocol.codec import MsgpackDecoder, MsgpackEncoder
from outboard.protocol.messages import EngineCoreOutputs

IDS = [f"r{number}" for number in range(4)]


class Sender:
    """One client's columns and what has left of them, as the client decodes it.

    Args:
        most: of a part; None: nothing is ever split.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.columns = Columns()
        self.batch = OutputBatch(clock=lambda: 1.5)
        for handle, request_id in enumerate(IDS):
            self.batch.open(request_id, handle, self.columns)
        self.messages: list[EngineCoreOutputs] = []
        self._encode = MsgpackEncoder(inline_bytes=64).encode
        self._decode: MsgpackDecoder[EngineCoreOutputs] = MsgpackDecoder(EngineCoreOutputs)

    def split(self) -> None:
        if self.most is None:
            return
        for part in split(self.columns, self.most):
            assert part.handles
            self._leave(part)
        assert max(len(self.columns.handles), len(self.columns.tokens)) <= self.most

    def take(self) -> None:
        """Sends all, as where the port takes it."""
        self.split()
        self._leave(self.columns)
        self.columns.clear()

    def _leave(self, part: Part) -> None:
        if self.most is not None:
            assert len(part.tokens) <= self.most and len(part.handles) <= self.most
        message = EngineCoreOutputs(0, 0, 0, 0.0, part.handles, part.tokens, part.counts, part.finished, part.extras)
        [body] = self._encode(message)
        decoded = self._decode.decode(body)
        assert Receiver._well_formed(decoded)
        decoded.request_ids = [str(handle) for handle in decoded.handles]
        self.messages.append(decoded)

    def told(self) -> dict[str, dict[str, Any]]:
        """What each request was told, by field and in order; that nothing follows an end."""
        found: dict[str, dict[str, Any]] = defaultdict(lambda: defaultdict(list))
        for message in self.messages:
            for output in message.outputs:
                mine = found[output.request_id]
                assert not mine["end"], "an output behind the end"
                mine["tokens"] += output.new_token_ids
                mine["logprobs"] += output.new_logprobs or []
                mine["cached"].append(output.num_cached_tokens)
                if output.queue_time is not None:
                    mine["queue time"].append((len(mine["tokens"]) - len(output.new_token_ids), output.queue_time))
                if output.result is not None:  # and how many tokens were before it
                    mine["result"].append((len(mine["tokens"]), output.result))
                if output.error is not None:
                    mine["error"].append((len(mine["tokens"]), output.error))
                if output.finish_reason is not None:
                    mine["end"].append((len(mine["tokens"]), output.finish_reason, output.stop_reason))
        for mine in found.values():
            mine["cached"] = sum(mine["cached"])
        return {handle: dict(mine) for handle, mine in found.items()}


indices = st.integers(0, len(IDS) - 1)
outputs = st.fixed_dictionaries(
    {"number": st.integers(0, 12)},
    optional={
        "logprobs": st.just(True),
        "end": st.sampled_from(["stop", "length", "error"]),
        "result": st.integers(0, 9),
        "error": st.text(max_size=3),
        "num_cached_tokens": st.integers(1, 9),
    },
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.lists(indices, max_size=8)),
        st.tuples(st.just("add"), st.tuples(indices, outputs)),
        st.tuples(st.just("scheduled"), indices),
        st.tuples(st.just("split"), st.none()),
        st.tuples(st.just("take"), st.none()),
    ),
    max_size=30,
)


@given(events, st.integers(1, 9))
def test_parts_say_what_one_message_would_have_said(events: list[tuple[str, Any]], most: int) -> None:
    whole, parts = Sender(None), Sender(most)
    for sender in (whole, parts):
        token = 0
        for name, value in events:
            if name == "extend":
                sender.batch.extend([IDS[index] for index in value], range(token, token + len(value)))
                token += len(value)
            elif name == "scheduled":
                sender.batch.scheduled(IDS[value])
            elif name == "add":
                index, fields = value[0], dict(value[1])
                tokens = range(token, token + fields.pop("number"))
                token += len(tokens)
                logprobs = [{one: -1.0} for one in tokens] if fields.pop("logprobs", False) else None
                sender.batch.add(IDS[index], tokens, fields.pop("end", None), logprobs=logprobs, **fields)
            elif sender is parts:
                getattr(parts, name)()
        sender.take()
    assert parts.told() == whole.told()


def test_parts_are_full() -> None:
    """A backlog of many small steps does not become many small messages."""
    sender = Sender(100)
    for step in range(251):
        sender.batch.extend(IDS, [step] * 4)
    sender.take()
    assert [len(message.tokens) for message in sender.messages] == [100] * 10 + [4]
    assert all(message.counts is None for message in sender.messages)


def test_outputs_without_tokens_are_bounded_too() -> None:
    sender = Sender(3)
    for number in range(8):
        sender.batch.add("r1", result=number)
    sender.take()
    assert [len(message.handles) for message in sender.messages] == [3, 3, 2]
    assert sender.told()["1"]["result"] == [(0, number) for number in range(8)]


def test_one_output_with_too_many_tokens_is_divided() -> None:
    sender = Sender(4)
    sender.batch.add("r0", [1])
    tokens = range(10)
    sender.batch.add("r1", tokens, "stop", 9, [{one: 0.0} for one in tokens], num_cached_tokens=3)
    sender.take()
    assert [(message.handles, message.counts) for message in sender.messages] == [([0], [1])] + [
        ([1], [count]) for count in (4, 4, 2)
    ]
    assert [message.finished for message in sender.messages] == [None, None, None, [(0, "stop", 9)]]
    mine = sender.told()["1"]
    assert (mine["tokens"], mine["cached"], mine["end"]) == (list(tokens), 3, [(10, "stop", 9)])
    assert mine["logprobs"] == [{one: 0.0} for one in tokens]
