"""A small engine that keeps the contract, and engines that break one point of it each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from outboard import (
    EngineCore,
    EngineCoreRequest,
    EngineInfo,
    InvalidRequestError,
    OutputBatch,
    SchedulerStats,
    Tokenizer,
    utility,
)
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.protocol.sampling import FinishReason

if TYPE_CHECKING:
    from decimal import Decimal

VOCAB = 256


class Good(EngineCore):
    """Counts on from the prompt's last token. Each method that a broken engine changes does one thing."""

    places: ClassVar[int] = 3
    max_model_len: ClassVar[int | None] = 64

    def __init__(self) -> None:
        self.waiting: dict[str, EngineCoreRequest] = {}
        self.running: dict[str, EngineCoreRequest] = {}
        self.said: dict[str, int] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        self.check(request)
        self.waiting[request.request_id] = request
        self.said[request.request_id] = 0

    def check(self, request: EngineCoreRequest) -> None:
        count = len(request.prompt_token_ids)
        if not count or (self.max_model_len is not None and count >= self.max_model_len):
            raise InvalidRequestError(f"a prompt of {count} tokens")
        if not all(0 <= token < VOCAB for token in request.prompt_token_ids):
            raise InvalidRequestError("outside the vocabulary")

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)
        self.said.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self, outputs: OutputBatch) -> None:
        self.admit(outputs)
        for request_id, request in list(self.running.items()):
            self.said[request_id] += 1
            self.produce(request_id, request, outputs)

    def admit(self, outputs: OutputBatch) -> None:
        while self.waiting and len(self.running) < self.places:
            request_id = next(iter(self.waiting))
            self.running[request_id] = self.waiting.pop(request_id)
            outputs.scheduled(request_id)

    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        token = self.token(request)
        reason, stop_reason = self.end(request, token)
        logprobs = None if request.sampling_params.logprobs is None else self.logprobs(token)
        outputs.add(request_id, [token], reason, stop_reason, logprobs)
        if reason is not None:
            self.forget(request_id)

    def token(self, request: EngineCoreRequest) -> int:
        return (request.prompt_token_ids[-1] + self.said[request.request_id]) % VOCAB

    def logprobs(self, token: int) -> list[dict[int, float]]:
        return [{token: -0.5}]

    def end(self, request: EngineCoreRequest, token: int) -> tuple[FinishReason | None, int | None]:
        said, params = self.said[request.request_id], request.sampling_params
        if said >= params.min_tokens and token in (params.stop_token_ids or ()):
            return "stop", token
        room = (self.max_model_len or 100) - len(request.prompt_token_ids)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        return ("length" if said == limit else None), None

    def info(self) -> EngineInfo:
        return EngineInfo(max_model_len=self.max_model_len, vocab_size=VOCAB, max_num_seqs=self.places, model="good")

    def scheduler_stats(self) -> SchedulerStats:
        return SchedulerStats(len(self.waiting), len(self.running), len(self.running) / self.places)

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> Tokenizer | None:
        return ByteTokenizer()


# --- the life of a request ---


class AlwaysBusy(Good):
    def has_work(self) -> bool:
        return True


class NeverBusy(Good):
    def has_work(self) -> bool:
        return False


class LosesWhenAsked(Good):
    def has_work(self) -> bool:
        busy = super().has_work()
        self.asked = getattr(self, "asked", 0) + 1
        if self.asked > 50:
            self.waiting.clear()
        return busy


class NeverEnds(Good):
    def end(self, request: EngineCoreRequest, token: int) -> tuple[FinishReason | None, int | None]:
        return None, None


class EndsWithoutReason(Good):
    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        outputs.add(request_id, [1])
        self.forget(request_id)


class EndsWithNothing(Good):
    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        outputs.add(request_id, finish_reason="stop")
        self.forget(request_id)


class FailsAll(Good):
    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        outputs.add(request_id, finish_reason="error", error="out of order")
        self.forget(request_id)


class EndsTwice(Good):
    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        super().produce(request_id, request, outputs)
        if request_id not in self.running:
            outputs.add(request_id, finish_reason="stop")


class SpeaksAfterAborts(Good):
    aborted: tuple[str, ...] = ()

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        super().abort_requests(request_ids)
        self.aborted += tuple(request_ids)

    def step(self, outputs: OutputBatch) -> None:
        super().step(outputs)
        outputs.extend(self.aborted, [1] * len(self.aborted))


class SchedulesLate(Good):
    def admit(self, outputs: OutputBatch) -> None:
        super().admit(OutputBatch())

    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        super().produce(request_id, request, outputs)
        if self.said.get(request_id) == 2:
            outputs.scheduled(request_id)


class ReusesItsBuffer(Good):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(3)

    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        self.buffer += 1
        said = self.said[request_id]
        outputs.add(request_id, finish_reason="stop" if said == 3 else None, result=self.buffer)
        if said == 3:
            self.forget(request_id)


class UnsendableResult(Good):
    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        outputs.add(request_id, finish_reason="stop", result=object())
        self.forget(request_id)


# --- tokens and sampling parameters ---


class OneTooMany(Good):
    def end(self, request: EngineCoreRequest, token: int) -> tuple[FinishReason | None, int | None]:
        self.said[request.request_id] -= 1
        try:
            return super().end(request, token)
        finally:
            self.said[request.request_id] += 1


class OneTooFew(Good):
    def end(self, request: EngineCoreRequest, token: int) -> tuple[FinishReason | None, int | None]:
        reason, stop_reason = super().end(request, token)
        few = self.said[request.request_id] + 1 == request.sampling_params.max_tokens
        return ("length" if few else reason), stop_reason


class OneLimitForAll(Good):
    """Takes the limit of the request that came first."""

    def end(self, request: EngineCoreRequest, token: int) -> tuple[FinishReason | None, int | None]:
        said, first = self.said[request.request_id], next(iter(self.running.values()))
        return ("length" if said >= (first.sampling_params.max_tokens or 0) else None), None


class IgnoresStops(Good):
    def end(self, request: EngineCoreRequest, token: int) -> tuple[FinishReason | None, int | None]:
        return ("length" if self.said[request.request_id] == request.sampling_params.max_tokens else None), None


class NamesNoStop(Good):
    def end(self, request: EngineCoreRequest, token: int) -> tuple[FinishReason | None, int | None]:
        return super().end(request, token)[0], None


class IgnoresMinTokens(Good):
    def end(self, request: EngineCoreRequest, token: int) -> tuple[FinishReason | None, int | None]:
        if token in (request.sampling_params.stop_token_ids or ()):
            return "stop", token
        return super().end(request, token)


class NumpyTokens(Good):
    def token(self, request: EngineCoreRequest) -> int:
        return np.int64(super().token(request))  # type: ignore[return-value]


class NumpyStopReason(Good):
    def end(self, request: EngineCoreRequest, token: int) -> tuple[FinishReason | None, int | None]:
        reason, stop_reason = super().end(request, token)
        return reason, None if stop_reason is None else np.int32(stop_reason)  # type: ignore[return-value]


class OutsideTheVocabulary(Good):
    def token(self, request: EngineCoreRequest) -> int:
        return super().token(request) + VOCAB


class LogprobsOfAnotherToken(Good):
    def logprobs(self, token: int) -> list[dict[int, float]]:
        return [{token + 1: -0.5}]


class TwoLogprobsAToken(Good):
    def logprobs(self, token: int) -> list[dict[int, float]]:
        return [{token: -0.5}, {token: -0.5}]


class NumpyLogprobs(Good):
    def logprobs(self, token: int) -> list[dict[int, float]]:
        return [{token: np.float32(-0.5)}]  # type: ignore[dict-item]


# --- batches ---


class FailsWhoJoins(Good):
    def admit(self, outputs: OutputBatch) -> None:
        if self.running:
            for request_id in list(self.waiting):
                outputs.add(request_id, finish_reason="error", error="busy")
                self.forget(request_id)
        super().admit(outputs)


class AbortTakesOthersAlong(Good):
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        super().abort_requests(request_ids)
        self.running.clear()


class AbortFailsOthers(Good):
    aborted = False

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        super().abort_requests(request_ids)
        self.aborted = True

    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        if self.aborted:
            outputs.add(request_id, finish_reason="error", error="lost")
            self.forget(request_id)
        else:
            super().produce(request_id, request, outputs)


class NumpyStats(Good):
    def scheduler_stats(self) -> SchedulerStats:
        return SchedulerStats(np.int64(len(self.waiting)), len(self.running))  # type: ignore[arg-type]


class FailsBeyondPlaces(Good):
    def admit(self, outputs: OutputBatch) -> None:
        super().admit(outputs)
        for request_id in list(self.waiting):
            outputs.add(request_id, finish_reason="error", error="full")
            self.forget(request_id)


class RunsTooMany(Good):
    def info(self) -> EngineInfo:
        return EngineInfo(max_num_seqs=2)


class NegativeStats(Good):
    def scheduler_stats(self) -> SchedulerStats:
        return SchedulerStats(len(self.waiting) - 1 if self.running else 0, len(self.running))


class CountsTwice(Good):
    def scheduler_stats(self) -> SchedulerStats:
        return SchedulerStats(len(self.waiting) + len(self.running), len(self.running))


class UsageAsPercentage(Good):
    def scheduler_stats(self) -> SchedulerStats:
        return SchedulerStats(len(self.waiting), len(self.running), 100 * len(self.running) / self.places)


class UsageNeverFalls(Good):
    usage = 0.0

    def scheduler_stats(self) -> SchedulerStats:
        self.usage = max(self.usage, len(self.running) / self.places)
        return SchedulerStats(len(self.waiting), len(self.running), self.usage)


# --- aborts ---


class AbortOfUnknownRaises(Good):
    def forget(self, request_id: str) -> None:
        del self.said[request_id]
        super().forget(request_id)


class AbortOfNothingRaises(Good):
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        request_ids[0]
        super().abort_requests(request_ids)


class AbortForgetsTheWaiting(Good):
    """A waiting request is not freed: it is in the statistics for ever, and is never worked on."""

    ghosts = 0

    def forget(self, request_id: str) -> None:
        self.ghosts += request_id in self.waiting
        super().forget(request_id)

    def scheduler_stats(self) -> SchedulerStats:
        return SchedulerStats(len(self.waiting) + self.ghosts, len(self.running))


class AbortLosesAPlace(Good):
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.places -= sum(request_id in self.running for request_id in request_ids)  # type: ignore[misc]
        super().abort_requests(request_ids)


class AbortReachesTheFirstAlone(Good):
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        super().abort_requests(request_ids[:1])


class AbortIgnoresTheRunning(Good):
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        super().abort_requests([request_id for request_id in request_ids if request_id in self.waiting])


class AbortBreaksTheEngine(Good):
    broken = False

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.broken = self.broken or any(request_id in self.running for request_id in request_ids)
        super().abort_requests(request_ids)

    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        if self.broken:
            outputs.add(request_id, finish_reason="error", error="broken")
            self.forget(request_id)
        else:
            super().produce(request_id, request, outputs)


# --- refusals ---


class ChecksNothing(Good):
    def check(self, request: EngineCoreRequest) -> None:
        pass


class RefusesByAnyError(Good):
    def check(self, request: EngineCoreRequest) -> None:
        try:
            super().check(request)
        except InvalidRequestError as error:
            raise KeyError(str(error)) from None


class FailsWithoutAWord(Good):
    def check(self, request: EngineCoreRequest) -> None:
        pass

    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        try:
            super().check(request)
        except InvalidRequestError:
            outputs.add(request_id, finish_reason="error")
            self.forget(request_id)
        else:
            super().produce(request_id, request, outputs)


class RefusalsStayInside(Good):
    def check(self, request: EngineCoreRequest) -> None:
        self.waiting[request.request_id] = request
        self.said[request.request_id] = 0
        super().check(request)


class RefusalFailsAll(Good):
    doomed = False

    def check(self, request: EngineCoreRequest) -> None:
        self.doomed = self.doomed or not len(request.prompt_token_ids)
        super().check(request)

    def produce(self, request_id: str, request: EngineCoreRequest, outputs: OutputBatch) -> None:
        if self.doomed:
            outputs.add(request_id, finish_reason="error", error="doomed")
            self.forget(request_id)
        else:
            super().produce(request_id, request, outputs)


class ForgetsTheModelsLength(Good):
    max_model_len = None

    def info(self) -> EngineInfo:
        return EngineInfo(max_model_len=64)


class NeedsALargeInput(Good):
    """No language model; reads its input before it has looked at it."""

    def check(self, request: EngineCoreRequest) -> None:
        request.inputs["image"]


# --- the surface ---


class NumpyInfo(Good):
    def info(self) -> EngineInfo:
        return EngineInfo(vocab_size=np.int64(VOCAB))  # type: ignore[arg-type]


class InfoOfNoLength(Good):
    def info(self) -> EngineInfo:
        return EngineInfo(max_model_len=0)


class InfoAsADict(Good):
    def info(self) -> EngineInfo:
        return {"vocab_size": VOCAB}  # type: ignore[return-value]


class InfoWithoutAName(Good):
    def info(self) -> EngineInfo:
        return EngineInfo(model=None)  # type: ignore[arg-type]


class ChangingInfo(Good):
    asked = 0

    def info(self) -> EngineInfo:
        self.asked += 1
        return EngineInfo(extra={"asked": self.asked})


class UnsendableInfo(Good):
    def info(self) -> EngineInfo:
        return EngineInfo(extra={"engine": self})


class UnresolvableUtility(Good):
    @utility
    def price(self, of: Decimal) -> Decimal:
        return of


class CoroutineUtility(Good):
    @utility
    async def later(self) -> int:
        return 1


class FaultyShutdown(Good):
    def shutdown(self) -> None:
        raise OSError("still busy")


class ShutdownAfterAnIdleStepOnly(Good):
    ran = False

    def step(self, outputs: OutputBatch) -> None:
        super().step(outputs)
        self.ran = self.has_work()

    def shutdown(self) -> None:
        if self.ran:
            raise RuntimeError("the last step left work")


class ManyUtilities(Good):
    """Keeps the contract, with utilities of every allowed kind, and with every control."""

    awake = True

    @utility
    def sleep(self, level: int = 1) -> None:
        self.awake = False

    @utility
    def wake_up(self, tags: list[str] | None = None) -> None:
        self.awake = True

    @utility
    def is_sleeping(self) -> bool:
        return not self.awake

    @utility
    def reset_prefix_cache(self) -> bool:
        return True

    @utility
    def plain(self, count: int, *rest: str, flag: bool = False) -> dict[str, int]:
        return {"count": count}

    @utility
    def deferred(self) -> Future[int]:
        return Future()

    @utility
    def bare(self, anything):  # type: ignore[no-untyped-def]
        return anything


class SleepsUnnoticed(ManyUtilities):
    @utility
    def is_sleeping(self) -> bool:
        return False


class NeverWakes(ManyUtilities):
    @utility
    def wake_up(self, tags: list[str] | None = None) -> None:
        pass


class WakesWithNoPlaces(ManyUtilities):
    @utility
    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        self.places = 0  # type: ignore[misc]


class CannotReset(Good):
    @utility
    def reset_prefix_cache(self) -> bool:
        raise NotImplementedError


class ResetsSilently(Good):
    @utility
    def reset_prefix_cache(self) -> bool:
        return None  # type: ignore[return-value]


# --- the tokenizer ---


class LossyTokenizer(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        return super().encode(text.lower())


class MixingTokenizer(ByteTokenizer):
    def decode(self, token_ids: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        return super().decode(token_ids)[::-1]


class NeedsASequenceTokenizer(ByteTokenizer):
    def decode(self, token_ids: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        return super().decode(token_ids) or [""]


class NeedsATokenTokenizer(ByteTokenizer):
    def decode(self, token_ids: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        return super().decode([sequence for sequence in token_ids if sequence])


class ShiftedTokenizer(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        return [token + 200 for token in super().encode(text)]


class NoLengthTokenizer(ByteTokenizer):
    max_token_chars = 0


class WordTokenizer(ByteTokenizer):
    """A token is a word, whatever it says."""

    def encode(self, text: str) -> list[int]:
        return [1] * len(text.split())


class NumpyTokenizer(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        return list(np.array(super().encode(text)))


class StrangeEndTokenizer(ByteTokenizer):
    eos_token_ids = (VOCAB,)


class ModestTokenizer(ByteTokenizer):
    """Token 7 stands for more than it says."""

    def decode(self, token_ids: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        return [text.replace("\x07", "ding") for text in super().decode(token_ids)]


def with_tokenizer(tokenizer_class: type[ByteTokenizer]) -> type[Good]:
    """The good engine with another tokenizer."""

    class WithTokenizer(Good):
        @classmethod
        def tokenizer(cls, options: dict[str, Any]) -> Tokenizer:
            return tokenizer_class()

    return WithTokenizer
