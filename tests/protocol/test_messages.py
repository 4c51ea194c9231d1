"""Columns as objects, and a request as the engine core sees it."""

from __future__ import annotations

import time
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboard.protocol.messages import (
    AddRequest,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    OutputExtras,
)
from outboard.protocol.sampling import SamplingParams


def outputs(**columns: object) -> list[EngineCoreOutput]:
    return EngineCoreOutputs(0, 0, 0, 0.0, **columns).outputs  # type: ignore[arg-type]


def test_no_columns_are_no_outputs() -> None:
    assert outputs() == []
    assert outputs(handles=[], counts=[], request_ids=[]) == []


def test_one_token_each_needs_no_counts() -> None:
    assert outputs(handles=[7, 8], tokens=[1, 2], request_ids=["a", "b"]) == [
        EngineCoreOutput("a", [1]),
        EngineCoreOutput("b", [2]),
    ]


def test_counts_divide_the_tokens() -> None:
    found = outputs(handles=[7, 8, 9], tokens=[1, 2, 3], counts=[2, 0, 1], request_ids=["a", "b", "c"])
    assert [(output.request_id, output.new_token_ids) for output in found] == [("a", [1, 2]), ("b", []), ("c", [3])]


def test_a_request_may_occur_several_times() -> None:
    found = outputs(handles=[7, 8, 7], tokens=[1, 2, 3], finished=[(2, "stop", 3)], request_ids=["a", "b", "a"])
    assert [(output.request_id, output.new_token_ids, output.finish_reason) for output in found] == [
        ("a", [1], None),
        ("b", [2], None),
        ("a", [3], "stop"),
    ]


def test_unknown_requests_are_left_out_and_their_tokens_skipped() -> None:
    found = outputs(
        handles=[7, 8, 9],
        tokens=[1, 2, 3, 4],
        counts=[1, 2, 1],
        finished=[(1, "length", None), (2, "stop", "x")],
        extras=OutputExtras(results={1: "gone", 2: "there"}),
        request_ids=["a", None, "c"],
    )
    assert found == [EngineCoreOutput("a", [1]), EngineCoreOutput("c", [4], "stop", "x", result="there")]


def test_extras_belong_to_their_position() -> None:
    extras = OutputExtras(
        logprobs={0: [{1: -0.5}]},
        results={1: {"x": 1}},
        errors={1: "why"},
        queue_times={0: 0.0},
        num_cached_tokens={1: 5},
    )
    first, second = outputs(
        handles=[7, 8], tokens=[1], counts=[1, 0], finished=[(1, "error", None)], extras=extras, request_ids=["a", "b"]
    )
    assert first == EngineCoreOutput("a", [1], new_logprobs=[{1: -0.5}], queue_time=0.0)
    assert second == EngineCoreOutput("b", [], "error", result={"x": 1}, error="why", num_cached_tokens=5)


def test_ids_of_another_length_are_an_error() -> None:
    for ids in (["a"], ["a", "b", "c"], None):
        with pytest.raises(ValueError):
            outputs(handles=[7, 8], tokens=[1, 2], request_ids=ids)


@given(st.lists(st.tuples(st.none() | st.text(max_size=2), st.lists(st.integers(0, 9), max_size=4))))
def test_the_objects_hold_what_the_columns_do(rows: list[tuple[str | None, list[int]]]) -> None:
    found = outputs(
        handles=list(range(len(rows))),
        tokens=[token for _, tokens in rows for token in tokens],
        counts=[len(tokens) for _, tokens in rows],
        request_ids=[request_id for request_id, _ in rows],
    )
    assert [(output.request_id, output.new_token_ids) for output in found] == [
        row for row in rows if row[0] is not None
    ]


# --- AddRequest ------------------------------------------------------------------------------------------------------


def add(epoch: int = 1, handle: int = 2, prompt: bytes = b"", request_id: str = "mine") -> EngineCoreRequest:
    return AddRequest(epoch, handle, request_id, prompt, SamplingParams(), {"x": 1}, 3, 4.5).to_request()


def test_the_engine_core_sees_all_that_was_sent() -> None:
    params = SamplingParams(top_k=5)
    request = AddRequest(1, 2, "mine", b"", params, {"x": 1}, 3, 4.5).to_request()
    assert request.external_req_id == "mine"
    assert request.sampling_params is params
    assert (request.inputs, request.client_index, request.arrival_time) == ({"x": 1}, 3, 4.5)


@given(st.sets(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**62)), max_size=20))
def test_ids_are_unique_for_each_epoch_and_handle(pairs: set[tuple[int, int]]) -> None:
    assert len({add(epoch, handle).request_id for epoch, handle in pairs}) == len(pairs)


def test_the_id_does_not_depend_on_the_user() -> None:
    assert add(request_id="a").request_id == add(request_id="b").request_id
    assert add(1, 11).request_id != add(11, 1).request_id


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_the_prompt_is_an_int32_array(tokens: list[int]) -> None:
    prompt = add(prompt=np.array(tokens, np.int32).tobytes()).prompt_token_ids
    assert isinstance(prompt, array)
    assert (prompt.typecode, prompt.itemsize) == ("i", 4)
    assert prompt.tolist() == tokens
    assert all(type(token) is int for token in prompt)
    wrapped = np.asarray(prompt)
    assert wrapped.dtype == np.int32
    assert not tokens or np.shares_memory(wrapped, np.frombuffer(prompt, np.int32))


def test_a_prompt_with_a_part_of_a_token() -> None:
    with pytest.raises(ValueError):
        add(prompt=b"12345")


def test_a_request_needs_only_its_name() -> None:
    before = time.time()
    request = EngineCoreRequest(request_id="x")
    assert (list(request.prompt_token_ids), request.inputs, request.sampling_params) == ([], None, SamplingParams())
    assert request.arrival_time < before
    assert EngineCoreRequest(request_id="y").sampling_params is not request.sampling_params


def test_the_type_bytes_are_those_of_vllm() -> None:
    assert {kind.name: kind.value for kind in EngineCoreRequestType} == {
        "ADD": b"\x00",
        "ABORT": b"\x01",
        "START_DP_WAVE": b"\x02",
        "UTILITY": b"\x03",
        "LEAVE": b"\x04",
    }
