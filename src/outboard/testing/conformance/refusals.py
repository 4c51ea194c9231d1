"""Requests that are empty, odd or too long: served or refused, one by one, with the engine unharmed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outboard.errors import InvalidRequestError
from outboard.protocol.messages import EngineCoreRequest
from outboard.protocol.sampling import SamplingParams
from outboard.testing.conformance.suite import Suite, contract, plural
from outboard.testing.harness import RequestRecord

__all__ = ["RefusalChecks"]

# Above this a prompt of the model's full length takes too long for a test.
_LONGEST = 4096


class RefusalChecks(Suite):
    """A request that cannot be served fails alone, by `InvalidRequestError` or an output that ends with "error"."""

    def test_an_empty_request(self) -> None:
        self._offer("with neither prompt nor inputs", ())

    def test_odd_inputs(self) -> None:
        if self.is_language_model:
            self.skip("inputs are for engines that are no language models")
        odd: list[Any] = [{}, [], "nonsense", 0, {"nonsense": None}]
        for inputs in odd:
            self._offer(f"with inputs={inputs!r}", (), inputs)

    def test_ids_outside_the_vocabulary(self) -> None:
        self.needs_language_model()
        for token in (-1, self.info.vocab_size or 0, 2**31 - 1):
            self._offer(f"with token id {token}", [token])

    def test_a_prompt_as_long_as_the_model_allows_is_refused(self) -> None:
        self.needs_language_model()
        length = self.info.max_model_len
        if length is None:
            self.skip("info() tells no max_model_len")
        token = self.make_request(0).prompt_token_ids[0]
        for count in (length, length + 1):
            record = self._offer(f"of {count} tokens", [token] * count)
            contract(
                record.finish_reason == "error",
                f"A prompt of {count} tokens leaves no room in info().max_model_len={length}: it is refused.",
                f"it ended with {record.finish_reason!r} after {plural(len(record.tokens), 'token')}",
            )

    def test_a_completion_ends_at_the_model_s_length(self) -> None:
        self.needs_language_model()
        length = self.info.max_model_len
        if length is None or length > _LONGEST:
            self.skip(f"info().max_model_len={length} is not short enough for a test")
        token = self.make_request(0).prompt_token_ids[0]
        room = min(3, length - 1)
        record = self._offer("near the model's length", [token] * (length - room), max_tokens=None)
        contract(
            len(record.tokens) <= room,
            f"Prompt and completion together have at most info().max_model_len={length} tokens.",
            f"{length - room} and {len(record.tokens)}",
        )

    def test_refusals_beside_others(self) -> None:
        running = self.add(0)
        self.harness.step()
        self.offer(EngineCoreRequest(request_id=""))
        waiting = self.add(1)
        self.settle()
        for record in (running, waiting):
            contract(
                record.finish_reason in ("stop", "length"),
                "A request that is refused fails alone.",
                f"one beside it ended with {record.finish_reason!r} ({record.error})",
            )

    def _offer(self, what: str, prompt: Sequence[int], inputs: Any = None, max_tokens: int | None = 4) -> RequestRecord:
        request = EngineCoreRequest(
            request_id="",
            prompt_token_ids=prompt,
            inputs=inputs,
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        )
        record = self.offer(request)
        contract(
            record.exception is None or isinstance(record.exception, InvalidRequestError),
            f"A request {what} that cannot be served is refused by InvalidRequestError, with a text for its user.",
            f"{type(record.exception).__name__}: {record.exception}",
        )
        try:
            self.settle()
        except AssertionError:
            raise
        except Exception as error:
            contract(
                False,
                f"A request {what} must not end the engine: refuse it in add_request(), or end it with "
                'finish_reason="error".',
                f"step() raised {type(error).__name__}: {error}",
            )
        contract(
            record.finish_reason != "error" or bool(record.error),
            'A request that ends with "error" says why (error=...).',
            f"a request {what} ended with error={record.error!r}",
        )
        self.serves_another(f"a request {what}")
        return record
