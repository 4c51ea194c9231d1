"""The tokenizer of OpenVINO GenAI, alone: it loads no weights."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outboard.engine.core import Tokenizer
from outboard.engines.signal_stack import same_signal_stack
from outboard.errors import ConfigError, PromptTooLongError

__all__ = ["OpenVINOTokenizer", "eos_token_ids", "import_genai"]

_PROBE_TOKENS = 1 << 18


def import_genai() -> Any:
    """The `openvino_genai` module.

    Raises:
        ConfigError: it is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module("openvino_genai")
    except ImportError as error:
        raise ConfigError(
            f"the openvino engine needs OpenVINO GenAI: pip install 'outboard[openvino]' ({error})"
        ) from error


def eos_token_ids(tokenizer: Any, path: Path) -> list[int]:
    """The tokens that end a completion, the tokenizer's own first; a model folder may name more of them."""
    found = [int(tokenizer.get_eos_token_id())]
    config = path / "generation_config.json"
    if config.is_file():
        named = json.loads(config.read_text("utf-8")).get("eos_token_id")
        found += named if isinstance(named, list) else [named]
    return list(dict.fromkeys(token for token in found if isinstance(token, int) and token >= 0))


class OpenVINOTokenizer(Tokenizer):
    """Turns text into the model's tokens and back.

    The library's detokenizer leaves out bytes that are no whole character. So tokens are turned into text by a table of
    their bytes, where the library confirms that table for every token; else, as with SentencePiece, by the library.

    Attributes:
        vocab_size: token ids are 0 to `vocab_size - 1`.
        max_tokens: the library cuts off what is longer than so many tokens; None: nothing.
    """

    def __init__(self, path: Path) -> None:
        with same_signal_stack():
            self._tokenizer = import_genai().Tokenizer(str(path))
        vocabulary: dict[bytes, int] = self._tokenizer.get_vocab()
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.eos_token_ids: Sequence[int] = eos_token_ids(self._tokenizer, path)
        self.max_token_chars: int = max(map(len, vocabulary))
        self._tables = self._byte_tables(vocabulary)
        self._bos: str = self._tokenizer.get_bos_token()
        count = len(self._ids(" a" * _PROBE_TOKENS))
        self.max_tokens = count if count < _PROBE_TOKENS else None

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, with those around them that the model wants, but no second begin-of-sequence token.

        Raises:
            PromptTooLongError: the library would cut the text off.
        """
        ids = self._ids(text, add_special_tokens=not (self._bos and text.startswith(self._bos)))
        if self.max_tokens is not None and len(ids) >= self.max_tokens:
            raise PromptTooLongError(
                f"the prompt has {self.max_tokens} tokens or more, and this model's tokenizer takes less than that"
            )
        return ids

    def decode(self, token_ids: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        """One text a sequence. Bytes that are no whole character show as U+FFFD, ids outside the vocabulary as nothing.

        Where the library decodes, unfinished characters are left out instead.
        """
        if self._tables is None:
            decoded: list[str] = self._tokenizer.decode(token_ids, skip_special_tokens) if token_ids else []
            return decoded
        table = self._tables[skip_special_tokens]
        join, piece = b"".join, table.__getitem__
        try:
            return [join(map(piece, sequence)).decode("utf-8", "replace") for sequence in token_ids]
        except KeyError:
            return [
                join(table.get(token, b"") for token in sequence).decode("utf-8", "replace") for sequence in token_ids
            ]

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> str:
        """The prompt for the next answer in a chat."""
        prompt: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return prompt

    def _ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded = self._tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens)
        ids: list[int] = encoded.input_ids.data.ravel().tolist()
        return ids

    def _byte_tables(self, vocabulary: dict[bytes, int]) -> tuple[dict[int, bytes], dict[int, bytes]] | None:
        """Each token's bytes, with special tokens and without; None if the library decodes a token otherwise."""
        alone = [[token] for token in range(self.vocab_size)]
        texts = self._tokenizer.decode(alone, False)
        plain_texts = self._tokenizer.decode(alone, True)
        table = {token: text.encode() for token, text in enumerate(texts)}  # for ids that the vocabulary leaves out
        table |= {token: piece for piece, token in vocabulary.items()}
        if any(table[token].decode("utf-8", "ignore") != text for token, text in enumerate(texts)):
            return None
        special = {token for token, text in enumerate(texts) if text and not plain_texts[token]}
        return table, {token: b"" if token in special else piece for token, piece in table.items()}
