"""From bodies to prompts and `SamplingParams`."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
import pytest

from outboard.errors import InvalidRequestError
from outboard.serve.errors import ApiError
from outboard.serve.parameters import (
    MOST_PROMPTS,
    chat_messages,
    chat_params,
    completion_params,
    completion_prompts,
    stream_usage,
)
from outboard.serve.requests import ChatRequest, CompletionRequest

_T = TypeVar("_T")
_HELLO = [{"role": "user", "content": "hello"}]


def _read(kind: type[_T], fields: dict[str, Any]) -> _T:
    return msgspec.json.decode(json.dumps(fields), type=kind)


def _completion(**fields: Any) -> CompletionRequest:
    return _read(CompletionRequest, {"prompt": "hello", **fields})


def _chat(**fields: Any) -> ChatRequest:
    return _read(ChatRequest, {"messages": _HELLO, **fields})


# --- prompts ---


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", ["hello"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_the_four_shapes_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert completion_prompts(_completion(prompt=prompt)) == prompts


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [1]], ["a", ["b"]], ["a"] * (MOST_PROMPTS + 1)])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises((ApiError, msgspec.ValidationError)) as caught:
        completion_prompts(_completion(prompt=prompt))
    if isinstance(caught.value, ApiError):
        assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_a_long_list_of_token_ids_is_one_prompt() -> None:
    assert completion_prompts(_completion(prompt=[1] * (MOST_PROMPTS + 1))) == [[1] * (MOST_PROMPTS + 1)]


# --- messages ---


def test_parts_of_text_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = _chat(messages=[{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": parts}])
    assert chat_messages(request) == [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": "ab"},
    ]


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({"role": "user"}, "messages[1].content", "invalid_value"),
        ({"role": "user", "content": None}, "messages[1].content", "invalid_value"),
        ({"role": "user", "content": 3}, "messages[1].content", "invalid_value"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content", "invalid_value"),
        ({"role": "user", "content": ["a"]}, "messages[1].content", "unsupported_parameter"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages[1].content",
            "unsupported_parameter",
        ),
        ({"role": "tool", "content": "x"}, "messages[1]", "unsupported_parameter"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages[1]", "unsupported_parameter"),
        ({"content": "x"}, "messages[1].role", "invalid_value"),
        ({"role": 3, "content": "x"}, "messages[1].role", "invalid_value"),
    ],
)
def test_messages_that_cannot_be_honoured_are_refused_by_place(
    message: dict[str, Any], param: str, code: str | None
) -> None:
    with pytest.raises(ApiError) as caught:
        chat_messages(_chat(messages=[*_HELLO, message]))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


# --- sampling ---


def test_defaults_are_those_of_openai() -> None:
    completion = completion_params(_completion())
    assert (completion.max_tokens, completion.n, completion.temperature) == (16, 1, 1.0)
    assert completion.logprobs is None and completion.output_kind == "delta"
    chat = chat_params(_chat())
    assert chat.max_tokens is None and chat.output_kind == "delta"


def test_null_is_as_if_it_were_left_out() -> None:
    names = {
        field.name
        for field in msgspec.structs.fields(CompletionRequest)
        if field.name not in ("prompt", "model", "stream_options")
    }
    request = _completion(**dict.fromkeys(names))
    assert completion_params(request) == completion_params(_completion())
    names = {field.name for field in msgspec.structs.fields(ChatRequest)} - {"messages"}
    assert chat_params(_chat(**dict.fromkeys(names))) == chat_params(_chat())
    assert stream_usage(_chat(**dict.fromkeys(names))) == (False, False)


def test_all_parameters_arrive() -> None:
    given = {
        "n": 2,
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "seed": 7,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [4],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    for params in (
        completion_params(_completion(**given, stop="x", logprobs=3)),
        chat_params(_chat(**given, stop=["x"], logprobs=True, top_logprobs=3)),
    ):
        assert {name: getattr(params, name) for name in given} == given
        assert params.stop == ["x"] and params.logprobs == 3


def test_the_newer_limit_of_chat_goes_first() -> None:
    assert chat_params(_chat(max_tokens=3)).max_tokens == 3
    assert chat_params(_chat(max_tokens=3, max_completion_tokens=4)).max_tokens == 4


def test_log_probabilities_of_chat() -> None:
    assert chat_params(_chat(logprobs=True)).logprobs == 0
    assert chat_params(_chat(logprobs=False)).logprobs is None
    assert chat_params(_chat(logprobs=False, top_logprobs=0)).logprobs is None
    with pytest.raises(ApiError) as caught:
        chat_params(_chat(top_logprobs=2))
    assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"logit_bias": {}},
        {"logit_bias": {"50256": 0}},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True},
    ],
)
def test_what_changes_nothing_is_taken(harmless: dict[str, Any]) -> None:
    assert chat_params(_chat(**harmless)) == chat_params(_chat())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("prediction", {"type": "content"}),
        ("web_search_options", {"user_location": None}),
        ("logit_bias", {"50256": -100}),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        chat_params(_chat(**{name: value}))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_parameter", name)


@pytest.mark.parametrize(("name", "value"), [("echo", True), ("suffix", "x"), ("best_of", 3), ("logit_bias", {"1": 1})])
def test_completions_refuse_too(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion_params(_completion(**{name: value}))
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


def test_best_of_n_is_n() -> None:
    assert completion_params(_completion(best_of=1)).n == 1
    assert completion_params(_completion(best_of=2, n=2)).n == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", 10**30),  # more than a message to the engine core can hold
        ("min_tokens", -1),
        ("min_tokens", 10**30),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("presence_penalty", 3),
        ("seed", 1 << 63),
        ("top_k", -2),
        ("top_k", 1 << 31),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("stop", ["x"] * 65),
        ("stop", 1),
        ("stop_token_ids", [-1]),
        ("stream", "yes"),
        ("logprobs", 21),
        ("prompt", [-1]),
        ("prompt", [1 << 31]),
        ("prompt", [True]),
        ("prompt", None),
        ("max_completion_tokens", 10**30),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: Any) -> None:
    kind = ChatRequest if name == "max_completion_tokens" else CompletionRequest
    needed: dict[str, Any] = {"messages": _HELLO, "prompt": "x"}
    with pytest.raises(msgspec.ValidationError, match=name):
        _read(kind, {**needed, name: value})


@pytest.mark.parametrize("fields", [{"stop": ""}, {"stop": ["a", ""]}, {"min_tokens": 3, "max_tokens": 2}])
def test_what_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        completion_params(_completion(**fields))


# --- usage of streams ---


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (None, (False, False)),
        ({}, (False, False)),
        ({"include_usage": False}, (False, False)),
        ({"include_usage": None}, (False, False)),
        ({"include_usage": True}, (True, False)),
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
        ({"continuous_usage_stats": True}, (True, True)),
        ({"include_usage": True, "include_obfuscation": False}, (True, False)),
    ],
)
def test_usage_of_a_stream(options: Any, asked: tuple[bool, bool]) -> None:
    assert tuple(stream_usage(_chat(stream=True, stream_options=options))) == asked


def test_usage_of_a_stream_that_is_none() -> None:
    with pytest.raises(ApiError) as caught:
        stream_usage(_chat(stream_options={"include_usage": True}))
    assert caught.value.param == "stream_options"
