"""Sampling parameters, with vLLM's names and defaults."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal

import msgspec

from outboard.errors import InvalidRequestError

__all__ = ["FinishReason", "RequestOutputKind", "SamplingParams"]

RequestOutputKind = Literal["cumulative", "delta", "final_only"]
FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to continue a prompt. Names and defaults are vLLM's.

    Attributes:
        n: how many completions of the same prompt; each is a request of its own to the engine core.
        max_tokens: the most tokens a completion may have; None: as many as the model's length allows.
        min_tokens: no end-of-sequence token and no stop string counts before this many tokens.
        temperature: 0 is greedy.
        top_p, top_k, min_p: the usual cuts; `top_k` 0 or -1 means all tokens.
        presence_penalty, frequency_penalty: -2 to 2. repetition_penalty: above 0, 1 is none.
        seed: makes sampling repeatable where the engine can; completion `i` of `n` uses `seed + i`.
        stop: strings that end a completion; they are looked for in the front end, across token borders.
        stop_token_ids: tokens that end a completion.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: how many log probabilities a token; 0: the chosen token's alone; None: none.
        detokenize: make text of the tokens. False leaves `text` empty and saves the work.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        structured_outputs: what the text has to be: `{"json": schema}`, a JSON document that fits the schema, or
            `{"json_object": True}`, any. Only for engines that say that they can (`EngineInfo.structured_outputs`).
        output_kind: "cumulative": each output holds all so far; "delta": only what is new; "final_only": one output.

    Raises:
        InvalidRequestError: a value is out of its range. The message names the parameter.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = "cumulative"
    structured_outputs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self._is_usual():
            self._check()

    def _is_usual(self) -> bool:
        """Whether all is right at a glance: an engine core makes one of these a request."""
        max_tokens, temperature, top_p = self.max_tokens, self.temperature, self.top_p
        return (
            type(self.n) is int
            and self.n >= 1
            and (max_tokens is None or (type(max_tokens) is int and max_tokens >= 1))
            and type(temperature) is float
            and temperature >= 0.0
            and type(top_p) is float
            and 0.0 < top_p <= 1.0
            and (self.min_tokens, self.top_k, self.min_p, self.presence_penalty, self.frequency_penalty) == _OFF
            and self.repetition_penalty == 1.0
            and (self.seed is None or type(self.seed) is int)
            and self.stop is None
            and self.stop_token_ids is None
            and self.logprobs is None
            and self.output_kind in _OUTPUT_KINDS
            and self.structured_outputs is None
        )

    def _check(self) -> None:
        for name, types in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, types):
                _require(False, name, value, " or ".join(cls.__name__ for cls in types))
        _require(self.n >= 1, "n", self.n, "at least 1")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1, or None")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "at most max_tokens")
        _require(self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1 or more")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "-2 to 2")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "-2 to 2")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", self.logprobs, "0 or more, or None")
        _require(
            self.output_kind in _OUTPUT_KINDS,
            "output_kind",
            self.output_kind,
            "'cumulative', 'delta' or 'final_only'",
        )
        asked = self.structured_outputs
        _require(
            asked is None or len(asked) == 1, "structured_outputs", asked, 'of one entry, such as {"json": schema}'
        )
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop:
            texts = all(isinstance(text, str) and text for text in self.stop)
            _require(texts, "stop", self.stop, "strings that are not empty")
            _require(self.detokenize, "stop", self.stop, "used with detokenize=True")
        if self.stop_token_ids:
            ids = all(isinstance(token_id, int) for token_id in self.stop_token_ids)
            _require(ids, "stop_token_ids", self.stop_token_ids, "token ids")


# What it is to have no least length, no top-k, no min-p and no penalties.
_OFF = (0, 0, 0.0, 0.0, 0.0)
_OUTPUT_KINDS = ("cumulative", "delta", "final_only")

_TYPES: dict[str, tuple[type, ...]] = {
    "n": (int,),
    "max_tokens": (int, NoneType),
    "min_tokens": (int,),
    "temperature": (float, int),
    "top_p": (float, int),
    "top_k": (int,),
    "min_p": (float, int),
    "presence_penalty": (float, int),
    "frequency_penalty": (float, int),
    "repetition_penalty": (float, int),
    "seed": (int, NoneType),
    "stop": (str, list, NoneType),
    "stop_token_ids": (list, NoneType),
    "logprobs": (int, NoneType),
    "structured_outputs": (dict, NoneType),
}


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise InvalidRequestError(f"{name} must be {allowed}, not {value!r}")
