"""The two shapes of an answer, completions and chat: as events of a stream, and as one document."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from outboard.frontend.outputs import CompletionOutput
from outboard.serve.logprobs import TokenTexts, chat_logprobs, completion_logprobs

__all__ = ["DONE", "ChatFormat", "CompletionFormat", "Format", "Usage"]

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct, kw_only=True):
    """Counts of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def document(self) -> dict[str, Any]:
        """As the API has it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Format(Protocol):
    """How one answer looks. Events are whole lines of `text/event-stream`."""

    id: str

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """What comes before and behind the JSON of a text, in an event that has a text of this choice and no more."""
        ...

    def opening(self, index: int) -> bytes:
        """What comes before the first event of a choice."""
        ...

    def event(self, index: int, new: CompletionOutput, usage: Usage | None) -> bytes:
        """An event with all that is new of a choice."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """The last event of a stream that was asked for counts."""
        ...

    def document(self, completions: Sequence[CompletionOutput], usage: Usage) -> bytes:
        """The whole answer; one choice a completion, in order."""
        ...


class _Answer:
    """What both have in common.

    Args:
        id: of the answer.
        model: its name.
        tokens: texts of tokens; None: there are no log probabilities.
        most_logprobs: how many a token were asked for.
    """

    _object = ""
    _object_of_event = ""

    def __init__(self, id: str, model: str, tokens: TokenTexts | None, most_logprobs: int | None = None) -> None:
        self.id = id
        self._model = model
        self._created = int(time.time())
        self._tokens = tokens
        self._most_logprobs = most_logprobs or 0
        self._offsets: dict[int, int] = {}  # by choice: where the text of the next token begins

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _event(self, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
        document = {**self._head(self._object_of_event), "choices": choices}
        if usage is not None:
            document["usage"] = usage.document()
        return b"data: " + _encode(document) + b"\n\n"

    def usage_event(self, usage: Usage) -> bytes:
        return self._event([], usage)

    def _document(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return _encode({**self._head(self._object), "choices": choices, "usage": usage.document()})

    def _around(self, choice: dict[str, Any]) -> tuple[bytes, bytes]:
        before, behind = self._event([choice], None).split(_HERE)
        return before, behind


# Stands for the text while an event is taken apart.
_MARK = "\u2063outboard\u2063"
_HERE = _encode(_MARK)


class CompletionFormat(_Answer):
    """`/v1/completions`."""

    _object = _object_of_event = "text_completion"

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        return self._around({"index": index, "text": _MARK, "logprobs": None, "finish_reason": None})

    def opening(self, index: int) -> bytes:
        return b""

    def event(self, index: int, new: CompletionOutput, usage: Usage | None) -> bytes:
        return self._event([self._choice(index, new)], usage)

    def document(self, completions: Sequence[CompletionOutput], usage: Usage) -> bytes:
        return self._document([self._choice(index, one) for index, one in enumerate(completions)], usage)

    def _choice(self, index: int, one: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if one.logprobs is not None and self._tokens is not None:
            offset = self._offsets.get(index, 0)
            logprobs = completion_logprobs(one.token_ids, one.logprobs, self._tokens, offset)
            self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        return {
            "index": index,
            "text": one.text,
            "logprobs": logprobs,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }


class ChatFormat(_Answer):
    """`/v1/chat/completions`."""

    _object = "chat.completion"
    _object_of_event = "chat.completion.chunk"

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        return self._around({"index": index, "delta": {"content": _MARK}, "logprobs": None, "finish_reason": None})

    def opening(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], None)

    def event(self, index: int, new: CompletionOutput, usage: Usage | None) -> bytes:
        delta = {"content": new.text} if new.text else {}
        return self._event([{"index": index, "delta": delta, **self._rest(new)}], usage)

    def document(self, completions: Sequence[CompletionOutput], usage: Usage) -> bytes:
        choices = []
        for index, one in enumerate(completions):
            message = {"role": "assistant", "content": one.text, "refusal": None}
            choices.append({"index": index, "message": message, **self._rest(one)})
        return self._document(choices, usage)

    def _rest(self, one: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if one.logprobs is not None and self._tokens is not None:
            logprobs = chat_logprobs(one.token_ids, one.logprobs, self._tokens, self._most_logprobs)
        return {"logprobs": logprobs, "finish_reason": one.finish_reason, "stop_reason": one.stop_reason}
