"""Sampling parameters: vLLM's defaults, and each bad value named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboard.errors import InvalidRequestError, OutboardError
from outboard.protocol.sampling import SamplingParams

# vLLM's `SamplingParams`, by its source (vllm/sampling_params.py); the output kind is an enum there, CUMULATIVE.
VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "structured_outputs": None,
    "output_kind": "cumulative",
}


def test_the_defaults_are_those_of_vllm() -> None:
    defaults = msgspec.structs.asdict(SamplingParams())
    assert defaults == VLLM_DEFAULTS
    assert {name: type(value) for name, value in defaults.items()} == {
        name: type(value) for name, value in VLLM_DEFAULTS.items()
    }


def test_nothing_is_sent_of_the_defaults() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams(top_k=5))) == {"top_k": 5}


BAD: list[tuple[str, Any]] = [
    ("structured_outputs", {}),
    ("structured_outputs", {"json": {}, "regex": "x"}),
    ("n", 0),
    ("n", -1),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("min_tokens", -1),
    ("min_tokens", 17),  # above max_tokens
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", float("nan")),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", float("nan")),
    ("presence_penalty", -2.1),
    ("presence_penalty", 2.1),
    ("presence_penalty", float("nan")),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", float("nan")),
    ("logprobs", -1),
    ("output_kind", "stream"),
    ("output_kind", None),
    ("stop", ""),
    ("stop", ["a", ""]),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} must be .*, not ") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, (OutboardError, ValueError))
    if name != "stop":  # which is shown as the list that it becomes
        assert str(caught.value).endswith(repr(value))


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, value in BAD if name != "stop"])
def test_a_bad_value_from_the_wire_is_named(name: str, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.msgpack.decode(msgspec.msgpack.encode({name: value or 0}), type=SamplingParams)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", "2"),
        ("n", 1.5),
        ("max_tokens", "5"),
        ("temperature", None),
        ("top_k", 0.5),
        ("logprobs", "2"),
        ("seed", "x"),
        ("stop", 5),
        ("stop", [5]),
    ],
)
def test_a_value_of_a_wrong_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**{name: value})


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": -1},
        {"top_p": 1e-9},
        {"temperature": 0},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"max_tokens": None, "min_tokens": 1000},
        {"max_tokens": 5, "min_tokens": 5},
        {"logprobs": 0},
        {"stop": []},
        {"stop": [], "detokenize": False},
        {"detokenize": False, "stop_token_ids": [1]},
    ],
    ids=repr,
)
def test_the_edges_are_allowed(params: dict[str, Any]) -> None:
    assert msgspec.structs.asdict(SamplingParams(**params)).items() >= params.items()


def test_one_stop_string_becomes_a_list() -> None:
    assert SamplingParams(stop="END").stop == ["END"]
    assert SamplingParams(stop=["a", "b"]).stop == ["a", "b"]


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="stop must be used with detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "n": st.integers(1, 9),
            "max_tokens": st.none() | st.integers(1, 1 << 40),
            "temperature": st.floats(0, 100),
            "top_p": st.floats(0.01, 1),
            "top_k": st.integers(-1, 1000),
            "min_p": st.floats(0, 1),
            "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
            "stop": st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1)),
            "stop_token_ids": st.none() | st.lists(st.integers(0, 2**31 - 1)),
            "logprobs": st.none() | st.integers(0, 20),
            "ignore_eos": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "output_kind": st.sampled_from(["cumulative", "delta", "final_only"]),
        },
    )
)
def test_what_is_valid_comes_back_from_the_wire(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
