"""Both shapes of an answer, by the types of the `openai` package, which allow nothing of a wrong type here."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.frontend.outputs import CompletionOutput
from outboard.serve.formats import DONE, ChatFormat, CompletionFormat, Usage
from outboard.serve.logprobs import TokenTexts

_USAGE = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
_LOGPROBS = [{97: -0.5, 98: -1.5}]
_NASTY = 'line\nbreak\r\n "quoted" \u2028 é \N{GRINNING FACE}'


def _chat(most: int | None = 1) -> ChatFormat:
    return ChatFormat("chatcmpl-1", "m", TokenTexts(ByteTokenizer()), most)


def _completion() -> CompletionFormat:
    return CompletionFormat("cmpl-1", "m", TokenTexts(ByteTokenizer()), 1)


def _event(written: bytes) -> Any:
    assert written.startswith(b"data: ") and written.endswith(b"\n\n")
    assert len(written.splitlines()) == 2  # one line, and the empty one: bytes know only \n and \r as ends
    return json.loads(written[6:])


def _valid(kind: Any, document: Any) -> Any:
    """As the type, and every field that is not of the type is known here."""
    return kind.model_validate(document, strict=True)


def test_usage() -> None:
    assert _USAGE.document() == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_the_end_of_a_stream() -> None:
    assert DONE == b"data: [DONE]\n\n"


@pytest.mark.parametrize("logprobs", [None, _LOGPROBS])
@pytest.mark.parametrize(("finish", "stop"), [("stop", None), ("stop", "x"), ("stop", 7), ("length", None)])
def test_documents_are_what_openai_has(logprobs: Any, finish: Any, stop: Any) -> None:
    outputs = [
        CompletionOutput(0, _NASTY, [97], finish, stop, logprobs),
        CompletionOutput(1, "", [97], finish, stop, logprobs),
    ]
    chat = _valid(ChatCompletion, json.loads(_chat().document(outputs, _USAGE)))
    assert (chat.id, chat.object, chat.model) == ("chatcmpl-1", "chat.completion", "m")
    assert [one.message.content for one in chat.choices] == [_NASTY, ""]
    assert chat.choices[1].index == 1 and chat.choices[0].finish_reason == finish
    assert chat.choices[0].stop_reason == stop  # as in vLLM
    assert chat.usage.total_tokens == 5
    assert (chat.choices[0].logprobs is None) == (logprobs is None)

    completion = _valid(Completion, json.loads(_completion().document(outputs, _USAGE)))
    assert (completion.id, completion.object, completion.model) == ("cmpl-1", "text_completion", "m")
    assert [one.text for one in completion.choices] == [_NASTY, ""]
    assert completion.usage.prompt_tokens_details.cached_tokens == 1


@pytest.mark.parametrize("usage", [None, _USAGE])
@pytest.mark.parametrize("logprobs", [None, _LOGPROBS])
@pytest.mark.parametrize(("text", "finish"), [(_NASTY, None), ("", "stop"), ("b", "length"), ("", None)])
def test_events_are_what_openai_has(usage: Usage | None, logprobs: Any, text: str, finish: Any) -> None:
    new = CompletionOutput(0, text, [97], finish, None, logprobs)
    chunk = _valid(ChatCompletionChunk, _event(_chat().event(3, new, usage)))
    assert chunk.object == "chat.completion.chunk"
    [choice] = chunk.choices
    assert (choice.index, choice.delta.content or "", choice.finish_reason) == (3, text, finish)
    assert choice.delta.role is None
    assert (chunk.usage is None) == (usage is None)
    if logprobs is not None:
        assert choice.logprobs.content[0].top_logprobs[0].token == "a"

    # The package has one type for both, which wants the reason of an end: it builds events without looking.
    document = _event(_completion().event(3, new, usage))
    if finish is None:
        assert document["choices"][0]["finish_reason"] is None
        document["choices"][0]["finish_reason"] = "stop"
    completion = _valid(Completion, document)
    assert (completion.choices[0].index, completion.choices[0].text) == (3, text)


def test_all_events_of_a_stream_have_one_id_and_time() -> None:
    form = _chat()
    events = [form.opening(0), form.event(0, CompletionOutput(0, "a", [97]), None), form.usage_event(_USAGE)]
    heads = {(one["id"], one["created"], one["model"], one["object"]) for one in map(_event, events)}
    assert len(heads) == 1


def test_the_event_of_usage_has_no_choice() -> None:
    for form, kind in ((_chat(), ChatCompletionChunk), (_completion(), Completion)):
        event = _valid(kind, _event(form.usage_event(_USAGE)))
        assert event.choices == [] and event.usage.completion_tokens == 2


def test_openings() -> None:
    [choice] = _valid(ChatCompletionChunk, _event(_chat().opening(2))).choices
    assert (choice.index, choice.delta.role, choice.delta.content) == (2, "assistant", "")
    assert _completion().opening(2) == b""


@pytest.mark.parametrize("form", [_chat(), _completion()])
def test_what_is_around_a_text_makes_an_event_of_it(form: Any) -> None:
    before, behind = form.around_text(4)
    quick = _event(before + msgspec.json.encode(_NASTY) + behind)
    usual = _event(form.event(4, CompletionOutput(0, _NASTY, [97]), None))
    assert usual["choices"][0].pop("stop_reason") is None
    assert quick == usual


def test_offsets_of_tokens_go_on_through_a_stream() -> None:
    form = _completion()

    def offsets(index: int, *tokens: int) -> list[int]:
        new = CompletionOutput(0, "", list(tokens), None, None, [{token: -1.0} for token in tokens])
        found: list[int] = _event(form.event(index, new, None))["choices"][0]["logprobs"]["text_offset"]
        return found

    assert offsets(0, 97, 98) == [0, 1]
    assert offsets(1, 97) == [0]
    assert offsets(0, 99) == [2]


def test_chat_without_alternatives_has_none() -> None:
    new = CompletionOutput(0, "a", [97], None, None, _LOGPROBS)
    [choice] = _event(_chat(0).event(0, new, None))["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
