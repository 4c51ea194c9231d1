"""Log probabilities as the API has them: by the texts of tokens, not by their ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outboard.engine.core import Tokenizer

__all__ = ["TokenTexts", "chat_logprobs", "completion_logprobs"]

# JSON knows no minus infinity; this is what OpenAI gives in its place.
_LOWEST = -9999.0


class TokenTexts:
    """Texts of single tokens, looked up once each.

    Args:
        tokenizer: None: a token's text is its id.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token_ids: Iterable[int]) -> list[str]:
        """One text a token."""
        ids = list(token_ids)
        new = [token for token in dict.fromkeys(ids) if token not in self._known]
        if new:
            if self._tokenizer is None:
                texts = [f"token_id:{token}" for token in new]
            else:
                texts = self._tokenizer.decode([[token] for token in new], False)
            self._known.update(zip(new, texts, strict=True))
        return [self._known[token] for token in ids]


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, float]], texts: TokenTexts, offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a choice of `/v1/completions`.

    Args:
        token_ids, logprobs, texts: of its tokens, or of those that are new.
        offset: where the text of the first begins.
    """
    tokens = texts.of(token_ids)
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(one.get(token)) for token, one in zip(token_ids, logprobs, strict=False)],
        "top_logprobs": [
            {text: _finite(value) for text, value in zip(texts.of(one), one.values(), strict=True)} for one in logprobs
        ],
        "text_offset": offsets,
    }


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, float]], texts: TokenTexts, most: int
) -> dict[str, Any]:
    """`logprobs` of a choice of `/v1/chat/completions`.

    Args:
        token_ids, logprobs, texts: of its tokens, or of those that are new.
        most: alternatives a token. The engine may add the chosen token to them; it has an entry of its own here.
    """
    content = []
    for token, text, one in zip(token_ids, texts.of(token_ids), logprobs, strict=False):
        ranked = sorted(one.items(), key=lambda item: -_finite(item[1]))[:most]
        top = [_entry(t, p) for t, p in zip(texts.of(t for t, _ in ranked), (p for _, p in ranked), strict=True)]
        content.append({**_entry(text, one.get(token)), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(text: str, value: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(value), "bytes": list(text.encode())}


def _finite(value: float | None) -> float:
    return value if value is not None and value > _LOWEST else _LOWEST
