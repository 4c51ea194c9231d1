"""What a step produces, as columns."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboard.engine.batch import Columns, OutputBatch
from outboard.protocol.messages import EngineCoreOutput, EngineCoreOutputs


class Batch(OutputBatch):
    """A batch with these requests open, their handles 10, 11, ..., all of one client."""

    def __init__(self, *request_ids: str) -> None:
        super().__init__()
        self.columns = Columns()
        for handle, request_id in enumerate(request_ids, 10):
            self.open(request_id, handle, self.columns)


def columns(batch: Batch | Columns) -> tuple[list[int], list[int], list[int] | None]:
    found = batch.columns if isinstance(batch, Batch) else batch
    return found.handles, found.tokens, found.counts


def objects(found: Columns) -> list[EngineCoreOutput]:
    """What a client makes of it; request ids are the handles."""
    message = EngineCoreOutputs(0, 0, 0, 0.0, found.handles, found.tokens, found.counts, found.finished, found.extras)
    message.request_ids = [str(handle) for handle in found.handles]
    return message.outputs


def test_extend_adds_one_token_each() -> None:
    batch = Batch("a", "b", "c")
    batch.extend(["a", "c"], [1, 2])
    batch.extend(("b",), (3,))
    batch.extend([], [])
    assert columns(batch) == ([10, 12, 11], [1, 2, 3], None)
    assert batch.columns.finished is None
    assert batch.columns.extras is None


def test_extend_skips_requests_that_are_closed_or_unknown() -> None:
    batch = Batch("a", "b", "c")
    batch.close("b")
    batch.extend(["a", "b", "c", "never heard of"], [1, 2, 3, 4])
    assert columns(batch) == ([10, 12], [1, 3], None)
    batch.extend(["b"], [5])
    assert columns(batch) == ([10, 12], [1, 3], None)


@pytest.mark.parametrize("end", ["close", "add"])
def test_extend_skips_what_has_ended_since_the_last_time(end: str) -> None:
    batch = Batch("a", "b")
    batch.extend(["a", "b"], [1, 2])
    if end == "close":
        batch.close("b")
    else:
        batch.add("b", finish_reason="stop")
    batch.columns.clear()
    batch.extend(["a", "b"], [3, 4])
    assert columns(batch)[:2] == ([10], [3])


def test_add_keeps_no_counts_while_there_is_one_token_each() -> None:
    batch = Batch("a", "b")
    batch.add("a", [1])
    batch.add("b", (2,), finish_reason="stop", stop_reason=2)
    assert columns(batch) == ([10, 11], [1, 2], None)
    assert batch.columns.finished == [(1, "stop", 2)]


@pytest.mark.parametrize("tokens", [[], [7, 8]], ids=["none", "two"])
def test_counts_appear_with_the_first_other_number_of_tokens(tokens: list[int]) -> None:
    batch = Batch("a", "b")
    batch.extend(["a", "b"], [1, 2])
    batch.add("a", tokens)
    batch.extend(["a", "b"], [3, 4])
    batch.add("b", [5])
    assert columns(batch) == ([10, 11, 10, 10, 11, 11], [1, 2, *tokens, 3, 4, 5], [1, 1, len(tokens), 1, 1, 1])


def test_counts_appear_at_once_in_an_empty_batch() -> None:
    batch = Batch("a")
    batch.add("a", [1, 2])
    assert columns(batch) == ([10], [1, 2], [2])


def test_extend_with_closed_requests_where_there_are_counts() -> None:
    batch = Batch("a", "b")
    batch.add("a", [])
    batch.close("a")
    batch.extend(["a", "b"], [1, 2])
    assert columns(batch) == ([10, 11], [2], [0, 1])


def test_a_finished_request_is_skipped_from_then_on() -> None:
    batch = Batch("a", "b")
    batch.add("a", [1], finish_reason="length")
    batch.add("a", [2])
    batch.add("a", finish_reason="stop")
    batch.extend(["a", "b"], [3, 4])
    batch.scheduled("a")
    assert columns(batch) == ([10, 11], [1, 4], None)
    assert batch.columns.finished == [(0, "length", None)]
    assert (len(batch), batch.open_requests) == (1, ["b"])


def test_add_to_an_unknown_request_leaves_no_trace() -> None:
    batch = Batch("a")
    batch.add("b", [1, 2], "error", "x", [{1: 0.0}], {"r": 1}, "why", 5)
    assert columns(batch) == ([], [], None)
    assert (batch.columns.finished, batch.columns.extras) == (None, None)


def test_rich_fields_go_to_the_position_of_their_request() -> None:
    batch = Batch("a", "b", "c")
    batch.extend(["a", "b"], [1, 2])
    batch.add("c", [3], logprobs=[{3: -1.0}], num_cached_tokens=4)
    batch.add("a", finish_reason="stop", stop_reason="END", result={"x": 0})
    batch.add("b", finish_reason="error", error="why")
    assert objects(batch.columns) == [
        EngineCoreOutput("10", [1]),
        EngineCoreOutput("11", [2]),
        EngineCoreOutput("12", [3], new_logprobs=[{3: -1.0}], num_cached_tokens=4),
        EngineCoreOutput("10", [], "stop", "END", result={"x": 0}),
        EngineCoreOutput("11", [], "error", error="why"),
    ]


@pytest.mark.parametrize("result", [0, False, "", [], {}], ids=repr)
def test_a_result_may_be_false(result: Any) -> None:
    batch = Batch("a")
    batch.add("a", result=result)
    assert objects(batch.columns)[0].result == result


@pytest.mark.parametrize(("ids", "tokens"), [(["a", "b"], [1]), (["a"], [1, 2]), (["a"], []), ([], [1])])
def test_extend_with_as_many_ids_as_tokens_only(ids: list[str], tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=f"extend.. got {len(ids)} request ids but {len(tokens)} tokens"):
        Batch("a", "b").extend(ids, tokens)


def test_extend_of_wrong_lengths_with_a_closed_request() -> None:
    with pytest.raises(ValueError):
        Batch("a").extend(["a", "closed"], [1])


# --- several clients -------------------------------------------------------------------------------------------------


def test_each_client_has_its_columns() -> None:
    batch = Batch("a", "b", "c")
    others = Columns()
    for handle, request_id in enumerate("xyz", 10):
        batch.open(request_id, handle, others)
    for _ in range(2):  # found out, then known
        batch.extend(["a", "x", "y", "b", "z"], [1, 2, 3, 4, 5])
        batch.extend(["c", "x", "y"], [6, 7, 8])
        batch.extend(("y",), (9,))
    assert columns(batch) == ([10, 11, 12] * 2, [1, 4, 6] * 2, None)
    assert columns(others) == ([10, 11, 12, 10, 11, 11] * 2, [2, 3, 5, 7, 8, 9] * 2, None)
    batch.add("x", [1, 2], "stop")
    assert columns(batch)[2] is None
    assert others.finished == [(12, "stop", None)]
    assert others.open == {11: "y", 12: "z"}
    assert (len(batch), batch.open_requests) == (5, ["a", "b", "c", "y", "z"])


def test_equal_handles_of_two_clients() -> None:
    batch = Batch("a")
    others = Columns()
    batch.open("x", 10, others)
    batch.close("a")
    batch.extend(["a", "x"], [1, 2])
    assert columns(batch) == ([], [], None)
    assert columns(others) == ([10], [2], None)


# --- queue times -----------------------------------------------------------------------------------------------------


def test_scheduled_tells_the_queue_time_once() -> None:
    before = time.monotonic()
    batch = Batch("a", "b")
    batch.extend(["b"], [1])
    batch.scheduled("a")
    batch.scheduled("a")
    batch.extend(["a"], [2])
    assert columns(batch) == ([11, 10, 10], [1, 2], [1, 0, 1])
    assert batch.columns.extras is not None
    assert list(batch.columns.extras.queue_times) == [1]
    assert 0 <= batch.columns.extras.queue_times[1] <= time.monotonic() - before


def test_scheduled_after_clear_is_not_told_again() -> None:
    batch = Batch("a")
    batch.scheduled("a")
    batch.columns.clear()
    batch.scheduled("a")
    assert batch.columns.handles == []


@pytest.mark.parametrize("end", ["close", "finish", "unknown"])
def test_scheduled_of_a_request_that_has_ended(end: str) -> None:
    batch = Batch("a")
    if end == "close":
        batch.close("a")
    elif end == "finish":
        batch.add("a", finish_reason="stop")
        batch.columns.clear()
    batch.scheduled("unknown" if end == "unknown" else "a")
    assert (batch.columns.handles, batch.columns.extras) == ([], None)


# --- life ------------------------------------------------------------------------------------------------------------


def test_clear_forgets_columns_and_keeps_requests() -> None:
    batch = Batch("a", "b")
    batch.add("a", [1, 2], finish_reason="stop", result=1)
    sent = batch.columns.handles
    batch.columns.clear()
    assert columns(batch) == ([], [], None)
    assert (batch.columns.finished, batch.columns.extras) == (None, None)
    assert batch.open_requests == ["b"]
    batch.extend(["b"], [3])
    assert sent == [10]  # what was handed on is not touched
    assert columns(batch) == ([11], [3], None)


def test_an_id_may_be_opened_again_with_another_handle() -> None:
    batch = Batch("a")
    batch.close("a")
    batch.close("a")
    batch.open("a", 99, batch.columns)
    batch.extend(["a"], [1])
    assert batch.columns.handles == [99]


def test_the_token_columns_are_the_batch_s_own() -> None:
    tokens = [1, 2]
    batch = Batch("a", "b")
    batch.extend(["a", "b"], tokens)
    tokens.clear()
    assert batch.columns.tokens == [1, 2]


ids = st.sampled_from("abcde")  # d is closed at first, e never opened
calls = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.lists(ids, max_size=5)),
        st.tuples(st.just("add"), ids, st.integers(0, 3), st.booleans()),
        st.tuples(st.just("close"), ids),
        st.tuples(st.just("scheduled"), ids),
        st.tuples(st.just("clear")),
    ),
    max_size=30,
)


@given(calls)
def test_any_calls_give_each_open_request_its_tokens_in_order(script: list[tuple[Any, ...]]) -> None:
    batch = Batch("a", "b", "c", "d")
    batch.close("d")
    open_ids = {"a": "10", "b": "11", "c": "12"}
    expected: dict[str, list[int]] = {"10": [], "11": [], "12": []}
    got: dict[str, list[int]] = {"10": [], "11": [], "12": []}
    ended: set[str] = set()

    def take() -> None:
        if batch.columns.counts is None:
            assert len(batch.columns.tokens) == len(batch.columns.handles)
        for output in objects(batch.columns):
            assert output.request_id not in ended
            got[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                ended.add(output.request_id)
        batch.columns.clear()

    token = 0
    for name, *args in script:
        if name == "extend":
            numbers = list(range(token, token + len(args[0])))
            token += len(numbers)
            batch.extend(args[0], numbers)
            for request_id, number in zip(args[0], numbers, strict=True):
                if request_id in open_ids:
                    expected[open_ids[request_id]].append(number)
        elif name == "add":
            request_id, count, finish = args
            numbers = list(range(token, token + count))
            token += count
            batch.add(request_id, numbers, "stop" if finish else None)
            if request_id in open_ids:
                expected[open_ids[request_id]] += numbers
                if finish:
                    del open_ids[request_id]
        elif name == "close":
            batch.close(args[0])
            open_ids.pop(args[0], None)
        elif name == "scheduled":
            batch.scheduled(args[0])
        else:
            take()
    take()
    assert got == expected
    assert sorted(batch.open_requests) == sorted(open_ids)
