"""Tokens, and the sampling parameters that say where a completion ends. For language models."""

from __future__ import annotations

from outboard.testing.conformance.suite import Suite, contract, plural
from outboard.testing.harness import RequestRecord

__all__ = ["SamplingChecks"]


def _check_length(record: RequestRecord, max_tokens: int) -> None:
    count = len(record.tokens)
    contract(
        count <= max_tokens,
        f"A request with max_tokens={max_tokens} gets no more tokens.",
        f"{count}, then {record.finish_reason!r}",
    )
    if record.finish_reason == "length":
        contract(
            count == max_tokens,
            f'A request with max_tokens={max_tokens} that ends with "length" has exactly so many tokens.',
            f"{count}",
        )
    else:
        contract(
            record.finish_reason == "stop",
            'A completion ends at max_tokens with "length", or earlier with "stop".',
            f"{record.finish_reason!r} after {plural(count, 'token')}, error {record.error!r}",
        )


class SamplingChecks(Suite):
    """`max_tokens`, `min_tokens`, `stop_token_ids`, `logprobs`, and what a token is."""

    def test_max_tokens_is_the_limit(self) -> None:
        self.needs_limit("max_tokens")
        for max_tokens in (1, 2, 5):
            record = self.add(max_tokens, max_tokens=max_tokens)
            self.settle()
            _check_length(record, max_tokens)

    def test_max_tokens_is_each_request_s_own(self) -> None:
        self.needs_limit("max_tokens")
        records = {max_tokens: self.add(max_tokens, max_tokens=max_tokens) for max_tokens in (7, 1, 4, 2)}
        self.settle()
        for max_tokens, record in records.items():
            _check_length(record, max_tokens)

    def test_a_stop_token_ends_the_completion(self) -> None:
        self.needs_limit("stop_token_ids")
        stops = self._usual_tokens()
        record = self.add(0, stop_token_ids=stops)
        self.settle()
        inside = [token for token in record.tokens[:-1] if token in stops]
        contract(not inside, "A token of stop_token_ids ends the completion.", f"tokens {inside} before its end")
        if record.tokens[-1:] and record.tokens[-1] in stops:
            contract(
                record.finish_reason == "stop" and record.stop_reason == record.tokens[-1],
                'A completion that a token of stop_token_ids ends has that token, finish_reason "stop" and the token '
                "as stop_reason.",
                f"tokens {record.tokens}, {record.finish_reason!r}, stop_reason {record.stop_reason!r}",
            )

    def test_no_stop_counts_before_min_tokens(self) -> None:
        self.needs_limit("min_tokens")
        params = {"stop_token_ids": self._usual_tokens()} if "stop_token_ids" in self.limits else {}
        record = self.add(0, min_tokens=4, **params)
        self.settle()
        contract(
            len(record.tokens) >= 4,
            "A completion with min_tokens=4 has at least 4 tokens: before, nothing that stops it counts.",
            f"{plural(len(record.tokens), 'token')}, then {record.finish_reason!r}",
        )

    def test_ids_are_plain_ints(self) -> None:
        self.needs_language_model()
        params = {"stop_token_ids": self._usual_tokens()} if "stop_token_ids" in self.limits else {}
        records = [self.add(0), self.add(0, **params)]
        self.settle()
        for record in records:
            kinds = {type(token) for token in record.tokens} - {int}
            contract(
                not kinds,
                "Token ids are plain ints; make them so with int(...) or array.tolist().",
                f"{', '.join(kind.__module__ + '.' + kind.__name__ for kind in kinds)} among {record.tokens!r}",
            )
            contract(
                type(record.stop_reason) in (int, str, type(None)),
                "stop_reason is None, a plain int or a str.",
                f"a {type(record.stop_reason).__module__}.{type(record.stop_reason).__name__}",
            )

    def test_ids_are_in_the_vocabulary(self) -> None:
        self.needs_language_model()
        size = self.info.vocab_size
        if size is None:
            self.skip("info() tells no vocab_size")
        record = self.add(0)
        self.settle()
        outside = [token for token in record.tokens if not 0 <= token < size]
        contract(not outside, f"Token ids are 0 to {size - 1}, as info().vocab_size={size} says.", f"{outside}")

    def test_logprobs_have_one_entry_a_token(self) -> None:
        self.needs_language_model()
        record = self.offer(self.make_request(0), logprobs=0)
        self.settle()
        if not record.logprobs:
            self.skip("the engine gives no log probabilities")
        contract(
            len(record.logprobs) == len(record.tokens),
            "logprobs has one dict a token.",
            f"{len(record.logprobs)} for {plural(len(record.tokens), 'token')}",
        )
        for token, entry in zip(record.tokens, record.logprobs, strict=True):
            contract(
                token in entry and all(type(key) is int and type(value) is float for key, value in entry.items()),
                "An entry of logprobs is a dict of plain int to plain float, the chosen token among them.",
                f"{entry!r} for token {token}",
            )

    def _usual_tokens(self) -> list[int]:
        """What request 0 of a test produces with nothing to stop it."""
        record = self.add(0)
        self.settle()
        return sorted({int(token) for token in record.tokens})
