"""Log probabilities by the texts of tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from outboard.engine.core import Tokenizer
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.serve.logprobs import TokenTexts, chat_logprobs, completion_logprobs


class _Counting(ByteTokenizer):
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def decode(self, token_ids: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        assert not skip_special_tokens  # each token is to have a text
        self.asked += token_ids
        return super().decode(token_ids)


def _texts(tokenizer: Tokenizer | None = None) -> TokenTexts:
    return TokenTexts(tokenizer or ByteTokenizer())


def test_each_token_is_looked_up_once() -> None:
    tokenizer = _Counting()
    texts = _texts(tokenizer)
    assert texts.of([97, 98, 97]) == ["a", "b", "a"]
    assert texts.of(iter([98, 99])) == ["b", "c"]
    assert texts.of([]) == []
    assert tokenizer.asked == [[97], [98], [99]]


def test_without_a_tokenizer_a_text_is_the_id() -> None:
    assert TokenTexts(None).of([5]) == ["token_id:5"]


_TOKENS = [97, 98]
_LOGPROBS = [{97: -0.5, 99: -1.5}, {98: -3.0, 99: -0.1, 100: -0.2}]


def test_completions() -> None:
    found = completion_logprobs(_TOKENS, _LOGPROBS, _texts())
    assert found == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"a": -0.5, "c": -1.5}, {"b": -3.0, "c": -0.1, "d": -0.2}],
        "text_offset": [0, 1],
    }
    Logprobs.model_validate(found, strict=True)


def test_offsets_go_on_where_the_last_part_ended() -> None:
    assert completion_logprobs(_TOKENS, _LOGPROBS, _texts(), 7)["text_offset"] == [7, 8]


@pytest.mark.parametrize(
    ("most", "top"),
    [(0, [[], []]), (1, [["a"], ["c"]]), (2, [["a", "c"], ["c", "d"]]), (20, [["a", "c"], ["c", "d", "b"]])],
)
def test_chat_has_as_many_alternatives_as_were_asked_for(most: int, top: Sequence[Sequence[str]]) -> None:
    """Likeliest first; the chosen token is among them where it is likely enough."""
    found = chat_logprobs(_TOKENS, _LOGPROBS, _texts(), most)
    assert [[one["token"] for one in entry["top_logprobs"]] for entry in found["content"]] == top
    assert [(one["token"], one["logprob"]) for one in found["content"]] == [("a", -0.5), ("b", -3.0)]
    ChoiceLogprobs.model_validate(found, strict=True)


def test_bytes_of_a_token() -> None:
    [entry] = chat_logprobs([0xC3], [{0xC3: -1.0}], _texts(), 0)["content"]
    assert entry["bytes"] == list(entry["token"].encode())


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_what_json_does_not_know_becomes_the_lowest(value: float) -> None:
    chat = chat_logprobs([97], [{97: value}], _texts(), 1)
    completion = completion_logprobs([97], [{97: value}], _texts())
    assert chat["content"][0]["logprob"] == chat["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
    assert completion["token_logprobs"] == [-9999.0] and completion["top_logprobs"] == [{"a": -9999.0}]
    json.dumps([chat, completion], allow_nan=False)


def test_a_chosen_token_that_is_not_listed_has_the_lowest() -> None:
    assert chat_logprobs([97], [{98: -1.0}], _texts(), 1)["content"][0]["logprob"] == -9999.0
