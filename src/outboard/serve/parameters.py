"""From the body of a request to prompts and `SamplingParams`; what cannot be honoured is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outboard.frontend.prompt import Prompt
from outboard.protocol.sampling import SamplingParams
from outboard.serve.errors import ApiError
from outboard.serve.requests import ChatRequest, CompletionRequest, Sampling

__all__ = [
    "MOST_PROMPTS",
    "chat_messages",
    "chat_params",
    "completion_params",
    "completion_prompts",
    "stream_usage",
    "text_messages",
]

# OpenAI's default for completions; chat has none.
_COMPLETION_MAX_TOKENS = 16
MOST_PROMPTS = 2048
# Fields that `SamplingParams` has under the same name, and that mean nothing where they are null.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
# vLLM's fields that would change the answer.
_REFUSED = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "use_beam_search",
    "truncate_prompt_tokens",
)


def completion_prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts of a request; each gets `n` completions."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is empty: give a text, token ids, or a list of either", param="prompt")
    kinds = {type(entry) for entry in prompt}
    if len(kinds) > 1:
        raise ApiError(400, "prompt mixes texts, token ids and lists of them: give one kind", param="prompt")
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > MOST_PROMPTS:
        raise ApiError(400, f"prompt has {len(prompt)} entries; {MOST_PROMPTS} are the most", param="prompt")
    return list(prompt)  # type: ignore[arg-type]


def chat_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages of a request with their contents as text."""
    return text_messages(request.messages)


def text_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their contents as text; what is no text is refused by name."""
    return [_message(index, message) for index, message in enumerate(messages)]


def completion_params(request: CompletionRequest) -> SamplingParams:
    """How to continue the prompts."""
    _refuse("echo", request.echo)
    _refuse("suffix", request.suffix)
    _refuse_common(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise _unsupported("best_of", "only the value of n is")
    limit = _COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return _params(request, limit, request.logprobs)


def chat_params(request: ChatRequest, follows_grammars: bool = False) -> SamplingParams:
    """How to answer the messages.

    Args:
        follows_grammars: whether the engine does (`EngineInfo.structured_outputs`).
    """
    for name in ("tools", "functions", "audio", "prediction", "web_search_options"):
        _refuse(name, getattr(request, name))
    if request.function_call not in (None, "none", "auto"):
        raise _unsupported("function_call")
    if request.tool_choice not in (None, "none", "auto"):
        raise _unsupported("tool_choice")
    _refuse_common(request)
    if request.modalities not in (None, [], ["text"]):
        raise _unsupported("modalities", 'only ["text"] is')
    structured = _structured_outputs(request.response_format or {}, follows_grammars)
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    elif request.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    params = _params(request, limit, logprobs)
    params.structured_outputs = structured
    return params


def _structured_outputs(response_format: dict[str, Any], follows_grammars: bool) -> dict[str, Any] | None:
    """What OpenAI's `response_format` asks for, in vLLM's words."""
    form = response_format.get("type", "text")
    if form == "text":
        return None
    if not follows_grammars:
        raise _unsupported("response_format", f"this engine follows no grammar: only the type 'text' is, not {form!r}")
    if form == "json_object":
        return {"json_object": True}
    if form != "json_schema":
        raise _unsupported("response_format", f"the types text, json_object and json_schema are, not {form!r}")
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        what = "response_format.json_schema.schema must be a JSON schema"
        raise ApiError(400, what, param="response_format.json_schema")
    return {"json": schema}


def _params(request: Sampling, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    # Deltas also where the answer is one document: with the first of them a request waits no more.
    return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, output_kind="delta")


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where}.role must be a text, such as 'user'", param=f"{where}.role")
    if message.get("tool_calls") or message.get("role") in ("tool", "function"):
        raise _unsupported(where, "tools are not")
    if isinstance(content, list):
        content = "".join(_text_of(where, part) for part in content)
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be a text or a list of text parts", param=f"{where}.content")
    return {**message, "content": content}


def _text_of(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise _unsupported(f"{where}.content", f"only parts of type 'text' are, not {kind!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise ApiError(400, f"{where}.content has a text part without text", param=f"{where}.content")
    return text


def _refuse(name: str, value: Any) -> None:
    if value:
        raise _unsupported(name)


def _refuse_common(request: Sampling) -> None:
    for name in _REFUSED:
        _refuse(name, getattr(request, name))
    if any((request.logit_bias or {}).values()):
        raise _unsupported("logit_bias")


def _unsupported(param: str, but: str = "leave it out") -> ApiError:
    return ApiError(400, f"{param} is not supported; {but}", code="unsupported_parameter", param=param)


def stream_usage(request: Sampling) -> Sequence[bool]:
    """Whether a stream ends with an event of counts, and whether all its events have them."""
    options = request.stream_options
    if options is None:
        return False, False
    if not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    in_all = bool(options.continuous_usage_stats)
    return in_all or bool(options.include_usage), in_all
