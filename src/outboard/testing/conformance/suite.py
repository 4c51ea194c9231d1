"""What all checks share: the hooks of an engine's author, the engine of a class, and how a failure speaks.

Written as plain classes with pytest's xunit methods (`setup_method` and so on), so that nothing here imports pytest and
a check can be run by hand.
"""

from __future__ import annotations

import unittest
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import msgspec

from outboard.engine.core import EngineCore
from outboard.protocol.messages import EngineCoreRequest, EngineInfo
from outboard.protocol.sampling import SamplingParams
from outboard.testing.harness import EngineHarness, RequestRecord

__all__ = ["Suite", "contract", "plural"]

# What caches keep after the last request is not in use.
_NO_USAGE = 0.01


def contract(holds: bool, rule: str, seen: str) -> None:
    """Fails the check unless the rule holds; says the rule, then what was seen."""
    if not holds:
        raise AssertionError(f"{rule} Seen: {seen}.")


def plural(count: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


class Suite:
    """Hooks to override where engines differ.

    Attributes:
        is_language_model: whether requests are prompts of token ids and outputs are tokens. If not, override
            `make_request`, and the checks of tokens and sampling parameters are skipped.
        limits: which of these sampling parameters the engine honours; the others are not checked.
        options: what `tokenizer(options)` is given: the options that `make_engine` uses.
        texts: what the tokenizer must give back unchanged, but for spaces at both ends.
        max_steps: within how many steps a handful of requests must end.
        most_requests: the most requests that are added at once. Give `make_engine` a smaller `max_num_seqs`, so that
            some have to wait.
    """

    is_language_model: ClassVar[bool] = True
    limits: ClassVar[frozenset[str]] = frozenset({"max_tokens", "min_tokens", "stop_token_ids"})
    options: ClassVar[Mapping[str, Any]] = {}
    texts: ClassVar[Sequence[str]] = ("The quick brown fox.", "one\ntwo", "Größe, naïve, 你好, 🙂")
    max_steps: ClassVar[int] = 10_000
    most_requests: ClassVar[int] = 64

    _engine: ClassVar[EngineCore | None] = None
    harness: EngineHarness

    # --- hooks ---

    def make_engine(self) -> EngineCore:
        """A new engine. May be slow: it is called once for a class, and once more for the test of `shutdown`."""
        raise NotImplementedError("define make_engine(self) and return an instance of your EngineCore from it")

    def make_request(self, index: int) -> EngineCoreRequest:
        """A small request that the engine can serve; number `index` of a test. Its `request_id` is replaced.

        Default: a prompt of 8 tokens, up to 8 tokens of greedy completion.
        """
        vocab_size = self.info.vocab_size or 256
        tokens = [(vocab_size // 3 + 5 * index + position) % vocab_size for position in range(8)]
        params = SamplingParams(max_tokens=8, temperature=0.0)
        return EngineCoreRequest(request_id="", prompt_token_ids=tokens, sampling_params=params)

    # --- the engine of this class ---

    def setup_method(self) -> None:
        cls = type(self)
        engine = cls.__dict__.get("_engine")  # its own: a class that it inherits from may have one too
        if engine is None:
            engine = cls._engine = self.make_engine()
        self.harness = EngineHarness(engine)

    def teardown_method(self) -> None:
        """Empties the engine for the next test; gives it up where that does not work."""
        harness = self.harness
        try:
            harness.abort(*harness.requests)
            harness.run_until_idle(self.max_steps)
        except Exception:  # the test itself has failed, or the next one shows it with a fresh engine
            type(self)._engine = None

    @classmethod
    def teardown_class(cls) -> None:
        engine, cls._engine = cls.__dict__.get("_engine"), None
        if engine is not None:
            engine.shutdown()

    # --- for the checks ---

    @property
    def info(self) -> EngineInfo:
        """What the engine tells of itself."""
        return self.harness.engine.info()

    @property
    def many(self) -> int:
        """More requests than run at once, as far as `most_requests` allows."""
        return min(2 * (self.info.max_num_seqs or 8) + 1, self.most_requests)

    def add(self, index: int, **params: Any) -> RequestRecord:
        """Adds request `index` of this test, with these sampling parameters changed; it must be taken."""
        record = self.offer(self.make_request(index), **params)
        contract(
            record.error is None,
            "A request of make_request() must be taken by add_request().",
            f"request {index} was refused: {record.error}",
        )
        return record

    def offer(self, request: EngineCoreRequest, **params: Any) -> RequestRecord:
        """Adds a request that the engine may refuse."""
        request.request_id = f"request-{len(self.harness.requests)}"
        if params:
            request.sampling_params = msgspec.structs.replace(request.sampling_params, **params)
        return self.harness[self.harness.add_request(request)]

    def settle(self) -> None:
        """Runs until all is done, and checks that everything has ended and nothing is held."""
        harness = self.harness
        harness.run_until_idle(self.max_steps)
        for request_id, record in harness.requests.items():
            contract(
                record.finished,
                "While a request has not ended, has_work() must be True; each ends by outputs.add(..., finish_reason).",
                f"has_work() is False and {request_id} has no finish reason, after {plural(harness.steps, 'step')}",
            )
        stats = harness.stats()
        contract(
            stats.waiting == 0 and stats.running == 0,
            "When all requests have ended, scheduler_stats() must be back at waiting 0 and running 0.",
            f"{stats}",
        )
        contract(
            stats.kv_cache_usage <= _NO_USAGE,
            "When all requests have ended, nothing of the KV cache is in use.",
            f"kv_cache_usage={stats.kv_cache_usage}",
        )

    def no_strays(self, rule: str) -> None:
        """Checks that nothing was produced for requests that had ended."""
        strays = self.harness.strays
        contract(not strays, rule, f"{plural(len(strays), 'output')} for {', '.join(sorted(set(strays)))}")

    def serves_another(self, after: str) -> None:
        """Checks that an ordinary request still works."""
        record = self.add(0)
        self.settle()
        contract(
            record.finish_reason in ("stop", "length"),
            f"After {after}, the engine must serve an ordinary request.",
            f"it ended with {record.finish_reason!r} ({record.error})",
        )

    def needs_language_model(self) -> None:
        if not self.is_language_model:
            self.skip("the engine is no language model")

    def needs_limit(self, name: str) -> None:
        self.needs_language_model()
        if name not in self.limits:
            self.skip(f"`limits` says that the engine ignores {name}")

    def skip(self, reason: str) -> NoReturn:
        """pytest takes this exception for a skip."""
        raise unittest.SkipTest(reason)
