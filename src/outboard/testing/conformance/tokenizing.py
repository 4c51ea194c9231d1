"""The tokenizer, where there is one: the front end trusts what it says."""

from __future__ import annotations

from typing import ClassVar

from outboard.engine.core import Tokenizer
from outboard.testing.conformance.suite import Suite, contract

__all__ = ["TokenizerChecks"]

_SHOWN = 5


class TokenizerChecks(Suite):
    """`tokenizer(options)`: it runs in the front end, with no engine beside it."""

    _made: ClassVar[tuple[Tokenizer | None] | None] = None

    def test_the_tokenizer_gives_texts_back(self) -> None:
        tokenizer = self._tokenizer()
        for text in self.texts:
            back = tokenizer.decode([tokenizer.encode(text)])[0]
            contract(
                back.strip() == text.strip(),
                "decode([encode(text)]) gives the text back (override `texts` where it cannot).",
                f"{back!r} for {text!r}",
            )

    def test_the_tokenizer_decodes_batches(self) -> None:
        tokenizer = self._tokenizer()
        sequences = [list(tokenizer.encode(text)) for text in self.texts]
        alone = [tokenizer.decode([sequence])[0] for sequence in sequences]
        together = tokenizer.decode(sequences)
        contract(
            together == alone,
            "decode() of several sequences gives, in order, what decode() of each alone gives.",
            f"{together!r}, alone {alone!r}",
        )
        contract(tokenizer.decode([]) == [], "decode([]) is [].", repr(tokenizer.decode([])))
        contract(tokenizer.decode([[]]) == [""], 'decode([[]]) is [""].', repr(tokenizer.decode([[]])))

    def test_the_tokenizer_gives_plain_ids(self) -> None:
        tokenizer, size = self._tokenizer(), self.info.vocab_size
        for text in self.texts:
            ids = tokenizer.encode(text)
            contract(
                isinstance(ids, list) and all(type(token) is int for token in ids),
                "encode() returns a list of plain ints.",
                f"{type(ids).__name__} of {', '.join(sorted({type(token).__name__ for token in ids}))}",
            )
            outside = [token for token in ids if token < 0 or (size is not None and token >= size)]
            contract(not outside, f"encode() gives ids within info().vocab_size={size}.", f"{outside} for {text!r}")

    def test_the_end_of_sequence_is_in_the_vocabulary(self) -> None:
        tokenizer, size = self._tokenizer(), self.info.vocab_size
        for token in tokenizer.eos_token_ids:
            contract(
                type(token) is int and token >= 0 and (size is None or token < size),
                f"eos_token_ids are plain ints within info().vocab_size={size}.",
                f"{token!r}",
            )

    def test_no_token_is_longer_than_it_says(self) -> None:
        tokenizer = self._tokenizer()
        longest = tokenizer.max_token_chars
        contract(type(longest) is int and longest >= 1, "max_token_chars is an int of at least 1.", f"{longest!r}")
        for text in self.texts:
            count = len(tokenizer.encode(text))
            contract(
                len(text) <= count * longest,
                f"No token is more than max_token_chars={longest} characters: longer prompts are refused unread.",
                f"{len(text)} characters in {count} tokens",
            )
        vocabulary = [[token] for token in range(self.info.vocab_size or 0)]
        pieces = tokenizer.decode(vocabulary, skip_special_tokens=False)
        longer = [token for token, piece in enumerate(pieces) if len(piece) > longest]
        contract(
            not longer,
            f"No token decodes to more than max_token_chars={longest} characters.",
            f"tokens {longer[:_SHOWN]} do, such as {pieces[longer[0]]!r}" if longer else "",
        )

    def _tokenizer(self) -> Tokenizer:
        """One for all tests of a class, made in the first: some take seconds."""
        made: tuple[Tokenizer | None] | None = type(self).__dict__.get("_made")
        if made is None:
            made = type(self)._made = (type(self.harness.engine).tokenizer(dict(self.options)),)
        (tokenizer,) = made
        if tokenizer is None:
            self.skip("the engine has no tokenizer")
        return tokenizer
