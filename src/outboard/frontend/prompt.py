"""From what the user asks to token ids, with every check that needs no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from outboard.engine.core import Tokenizer
from outboard.errors import InvalidRequestError, PromptTooLongError
from outboard.protocol.messages import EngineInfo
from outboard.protocol.sampling import SamplingParams
from outboard.protocol.token_ids import pack_token_ids

__all__ = ["Prompt", "PromptProcessor"]

Prompt: TypeAlias = "str | Sequence[int] | Sequence[dict[str, Any]]"

# Longer texts are encoded in a thread: 180 us for a short prompt may be spent on the loop, more may not.
_ENCODE_INLINE_CHARS = 4096


class PromptProcessor:
    """Turns prompts into token ids.

    Args:
        tokenizer: the engine's; None: only token ids are taken.
        info: what the engine reported: its limits.
    """

    def __init__(self, tokenizer: Tokenizer | None, info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._info = info

    async def process(self, prompt: Prompt, params: SamplingParams, inputs: Any = None) -> Sequence[int]:
        """The token ids of a prompt: text, token ids, or chat messages.

        Raises:
            PromptTooLongError: more tokens than the model allows, or more characters than could be so few tokens (then
                it is not even encoded).
            InvalidRequestError: empty, of the wrong type, a token id outside the vocabulary, or text for an engine
                without a tokenizer.
        """
        if params.structured_outputs is not None and not self._info.structured_outputs:
            raise InvalidRequestError("structured_outputs: this engine follows no grammar; leave it out")
        if isinstance(prompt, str):
            token_ids: Sequence[int] = await self._encode(prompt) if prompt else ()
        elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], dict):
            token_ids = await self._encode(self._apply_chat_template(prompt))
        else:
            token_ids = self._check_ids(prompt)
        if not token_ids and inputs is None:
            raise InvalidRequestError("the prompt is empty: give at least one character, token id or message")
        limit = self._info.max_model_len
        if limit is not None and len(token_ids) >= limit:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, the model allows {limit} with the completion: shorten it to "
                f"at most {limit - 1}"
            )
        if limit is not None and params.min_tokens > limit - len(token_ids):
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} does not fit behind a prompt of {len(token_ids)} tokens in a model "
                f"length of {limit}"
            )
        return token_ids

    def _check_ids(self, prompt: Any) -> Sequence[int]:
        # Without a vocabulary size the ids must at least fit the wire: int32.
        size = self._info.vocab_size or 1 << 31
        try:
            if isinstance(prompt, (bytes, bytearray)):
                raise TypeError
            token_ids = pack_token_ids(prompt)  # checks each item
        except TypeError:
            raise InvalidRequestError(
                "a prompt is text, a list of token ids or a list of chat messages "
                f'({{"role": ..., "content": ...}}), not {_shorten(prompt)}'
            ) from None
        except OverflowError:
            raise InvalidRequestError(f"a token id is outside the vocabulary: ids are 0 to {size - 1}") from None
        # By numpy, and not where there are none, of which it knows no least.
        numbers = np.frombuffer(token_ids, np.int32) if token_ids else np.zeros(1, np.int32)
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= size:
            raise InvalidRequestError(
                f"token id {low if low < 0 else high} is outside the vocabulary: ids are 0 to {size - 1}"
            )
        return token_ids

    async def _encode(self, text: str) -> Sequence[int]:
        tokenizer = self._need_tokenizer()
        limit = self._info.max_model_len
        if limit is not None and len(text) > limit * tokenizer.max_token_chars:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, more than the {limit} tokens that the model allows can hold "
                f"({tokenizer.max_token_chars} characters each at most): shorten it"
            )
        if len(text) <= _ENCODE_INLINE_CHARS:
            return tokenizer.encode(text)
        return await asyncio.to_thread(tokenizer.encode, text)

    def _apply_chat_template(self, messages: Any) -> str:
        for message in messages:
            if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
                raise InvalidRequestError(f'a chat message is {{"role": ..., "content": ...}}, not {_shorten(message)}')
        try:
            return self._need_tokenizer().apply_chat_template(list(messages))
        except InvalidRequestError:
            raise
        except Exception as error:
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer: give the prompt as token ids")
        return self._tokenizer


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
