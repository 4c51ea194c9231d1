"""The tokenizer of the `echo` and `mock` engines: a token is a byte of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outboard.engine.core import Tokenizer

__all__ = ["ByteTokenizer"]

_NEVER_IN_UTF8 = 0xFF  # decodes to one U+FFFD wherever it stands, and ends an unfinished character before it


class ByteTokenizer(Tokenizer):
    """Token ids 0 to 255 are bytes; there are no special tokens and no end-of-sequence token."""

    vocab_size: int = 256
    eos_token_ids: Sequence[int] = ()
    max_token_chars: int = 1

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`; a lone surrogate, which has none, becomes `?`."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, token_ids: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        """One text a sequence. What is no valid UTF-8, and an id outside 0 to 255, shows as U+FFFD."""
        try:
            return [bytes(sequence).decode("utf-8", "replace") for sequence in token_ids]
        except ValueError:  # an id that is no byte
            return [_to_bytes(sequence).decode("utf-8", "replace") for sequence in token_ids]

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> str:
        """A line `role: content` for each message, then `assistant:` for the answer to follow."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + "assistant:"


def _to_bytes(sequence: list[int]) -> bytes:
    return bytes(token if 0 <= token <= 255 else _NEVER_IN_UTF8 for token in sequence)
