"""What the API takes: the bodies of requests, with OpenAI's names, and vLLM's where OpenAI has none.

Fields that are not listed are ignored, as OpenAI's clients expect of older servers. Fields that would change the answer
and that Outboard cannot honour are listed, and refused by name (see parameters.py).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

__all__ = ["ChatRequest", "CompletionRequest", "DetokenizeRequest", "Sampling", "StreamOptions", "TokenizeRequest"]

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
# An engine core counts in 32 bits, and a message to it holds no more than 64.
_Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Stop = str | Annotated[list[str], msgspec.Meta(max_length=64)] | None


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`: `include_usage` asks for a last event with counts, `continuous_usage_stats` for them in all."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Sampling(msgspec.Struct, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = 1
    max_tokens: _Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 129)] | None = None
    stop: _Stop = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # vLLM's
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[_TokenId] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # vLLM's, and refused
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: int | None = None


class CompletionRequest(Sampling, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | _TokenId | list[_TokenId]]  # a list is of one kind
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None


class ChatRequest(Sampling, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize`: a text, or chat messages to put through the template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[_TokenId]
