"""What was done, how everything ended, and whether the one fits the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chaos.plan import CallPlan, Plan, RequestPlan
from outboard import (
    ClientClosedError,
    DuplicateRequestError,
    EngineDeadError,
    EngineRestartedError,
    EngineRestartingError,
    EngineState,
    EngineStatus,
    InvalidRequestError,
    RemoteError,
    SlowReaderError,
    UtilityError,
    UtilityNotFoundError,
    UtilityTimeoutError,
)

__all__ = ["Call", "Ledger", "Request", "Violation"]

STOP = "xyz"
# How many requests and calls of one schedule are told of, at most.
_SHOWN = 5
# Styles of reading that give up, by themselves or by somebody else.
_GIVING_UP = (
    "cancel",
    "timeout",
    "break",
    "aclose",
    "abort",
    "submit and abort",
    "abort inside",
    "submit and raise",
    "never read",
)
# Those that do not read to the end.
_PARTIAL = ("cancel", "timeout", "break", "never read", "submit and raise")


@dataclass(frozen=True)
class Violation:
    """Something that must not be. `sort`: "hung", "tokens", "leftover", or another word."""

    sort: str
    text: str


@dataclass
class Completion:
    """One of the completions of a request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    results: list[Any] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None
    ends: int = 0


@dataclass
class Request:
    """One request: what was asked, what came.

    Attributes:
        expected: the tokens that the engine says.
        completions: by index.
        raised: what ended it, where that was an exception.
        gave_up: whether its reader did, or somebody had it aborted.
        sent: whether it may have been sent at all.
        over: whether its reader has ended.
    """

    plan: RequestPlan
    name: str
    expected: list[int]
    completions: dict[int, Completion] = field(default_factory=dict)
    raised: BaseException | None = None
    gave_up: bool = False
    over: bool = False

    def of(self, index: int) -> Completion:
        return self.completions.setdefault(index, Completion())


@dataclass
class Call:
    """One utility call: what was asked, what came."""

    plan: CallPlan
    result: Any = None
    raised: BaseException | None = None
    over: bool = False


class Ledger:
    """Belongs to one schedule.

    Attributes:
        deaths: how many engine cores may have died of what was done.
        struck: how often each kind of fault was really injected.
        closing: whether the end has begun, so that requests may end with it.
        garbage, aborted, flooded: whether results could not be sent, all requests were aborted by a pause, results
            were so many that a reader may have been too slow.
        reading_cancelled, group_gone, loop_closed: ends of their own.
        states: those of the engine core, in order, as the client was told.
        died: the incarnations that did.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.deaths = 0
        self.struck: Counter[str] = Counter()
        self.closing = False
        self.garbage = False
        self.aborted = False
        self.flooded = False
        self.drained = False
        self.reading_cancelled = False
        self.group_gone = False
        self.loop_closed = False
        self.raising_callbacks = False
        self.tracebacks = False
        self.requests: list[Request] = []
        self.calls: list[Call] = []
        self.states: list[tuple[int, EngineState]] = []
        self.died: set[int] = set()
        self.violations: list[Violation] = []

    def on_status(self, status: EngineStatus) -> None:
        self.states.append((status.incarnation, status.state))
        if status.death is not None and status.state in (EngineState.RESTARTING, EngineState.DEAD):
            self.died.add(status.death.incarnation)

    def violate(self, sort: str, text: str) -> None:
        self.violations.append(Violation(sort, text))

    def request(self, plan: RequestPlan, name: str) -> Request:
        expected = _alphabet(plan.count)
        if self.plan.engine == "echo":
            expected = [(7 * i + len(self.requests)) % 251 + 1 for i in range(plan.count)]
        request = Request(plan, name, expected)
        self.requests.append(request)
        return request

    def call(self, plan: CallPlan) -> Call:
        call = Call(plan)
        self.calls.append(call)
        return call

    @property
    def spent(self) -> bool:
        """Whether the engine core may be dead for ever."""
        return self.deaths > self.plan.budget

    @property
    def survivable(self) -> bool:
        """Whether every death so far could be survived by a request that can be moved."""
        faults = self.plan.config.faults
        return self.deaths <= min(self.plan.budget, faults.max_resubmits) and faults.max_queued >= 1000

    # --- judgement ---

    def judge(self) -> list[Violation]:
        """All that did not end as it must; to be asked when everything is over."""
        told: Counter[str] = Counter()
        for request in self.requests:
            for violation in self._judge_request(request):
                told[violation.sort] += 1
                if told[violation.sort] <= _SHOWN:
                    self.violations.append(violation)
        for call in self.calls:
            wrong = self._judge_call(call)
            if wrong:
                self.violate("ending", f"call {call.plan.kind!r}: {wrong}")
        self._judge_deaths()
        return self.violations

    def _judge_deaths(self) -> None:
        if len(self.died) > self.deaths:
            self.violate("ending", f"{len(self.died)} engine cores died, and at most {self.deaths} had reason to")

    def _judge_request(self, request: Request) -> list[Violation]:
        found: list[Violation] = []
        plan, name = request.plan, f"{request.name} ({request.plan.style}, {request.plan.count} tokens)"

        def wrong(sort: str, text: str) -> None:
            found.append(Violation(sort, f"{name}: {text}"))

        if not request.over:
            wrong("hung", "its reader never ended")
            return found
        for index, one in sorted(request.completions.items()):
            expected = _alphabet(len(one.tokens)) if plan.endless else request.expected
            if one.tokens != expected[: len(one.tokens)]:
                wrong("tokens", f"completion {index} got {_difference(one.tokens, expected)}")
            self._judge_results(one, wrong)
            if one.ends > 1:
                wrong("ending", f"completion {index} ended {one.ends} times")
            if one.reason in ("length", "stop") and plan.style != "stop string" and len(one.tokens) < plan.count:
                wrong("tokens", f"completion {index} ended with {one.reason!r} after {len(one.tokens)} tokens")
            if plan.text and self.plan.engine != "echo" and plan.style != "stop string":
                text = "".join(map(chr, one.tokens))
                if one.text != text:
                    wrong("tokens", f"completion {index} has text of {len(one.text)}, tokens of {len(text)} characters")
        problem = self._judge_end(request)
        if problem:
            wrong("ending", problem)
        return found

    @staticmethod
    def _judge_results(one: Completion, wrong: Any) -> None:
        serial = 0
        for result in one.results:
            if isinstance(result, bytes):
                if any(result):
                    wrong("tokens", "a flood's result has another content")
                continue
            if not isinstance(result, np.ndarray) or not np.array_equal(
                result, np.arange(serial, serial + len(result), dtype=np.int64)
            ):
                wrong("tokens", f"array {serial} is {result!r:.100}")
            serial += 1

    def _judge_end(self, request: Request) -> str:
        style, raised = request.plan.style, request.raised
        if raised is not None:
            return self._judge_raised(request, raised)
        if request.gave_up and (style in _PARTIAL or self.plan.side != "llm"):
            return ""
        if not request.completions:
            return "" if style == "never read" else "it ended with nothing at all"
        for index, one in request.completions.items():
            reason = one.reason
            if reason in ("length", "stop"):
                continue
            if reason == "abort" and (request.gave_up or self.aborted or self.drained or self.group_gone):
                continue
            if reason == "error" and (self.garbage or style == "refused there" or self._fits_client(one)):
                continue
            return f"completion {index} ended with {reason!r} {one.error or ''} after {len(one.tokens)} tokens"
        # A duplicate is none where its twin has ended meanwhile.
        return "it should have been refused" if style == "refused" else ""

    def _fits_client(self, one: Completion) -> bool:
        """The clients below `AsyncLLM` tell of a lost request by an output."""
        return self.plan.side != "llm" and bool(self.deaths) and one.error is not None

    def _judge_raised(self, request: Request, raised: BaseException) -> str:
        style = request.plan.style
        what = f"it raised {type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else ''}"
        if isinstance(raised, DuplicateRequestError):
            return "" if style == "duplicate" else what
        if isinstance(raised, InvalidRequestError):
            return "" if style == "refused" else what
        if isinstance(raised, SlowReaderError):
            return "" if self.flooded else what
        if isinstance(raised, EngineRestartingError):
            return "" if self.deaths and self.plan.config.faults.max_queued < 1000 else what
        if isinstance(raised, EngineRestartedError) and self.deaths:
            got = any(one.tokens or one.results for one in request.completions.values())
            policy = self.plan.config.faults.in_flight
            if self.survivable and policy == "resume" and not self.flooded:
                return f"{what}; it should have been resumed"
            moved = self.survivable and policy == "resubmit" and request.plan.output_kind != "final_only"
            if moved and not got and not request.gave_up and style != "several":
                return f"{what}; it had no output, and should have been sent anew"
        if self._is_fitting_death(raised):
            return ""
        return what

    def _is_fitting_death(self, raised: BaseException) -> bool:
        if isinstance(raised, EngineRestartedError):
            return bool(self.plan.budget and self.deaths)
        if isinstance(raised, ClientClosedError):
            return self.closing
        if isinstance(raised, EngineDeadError):
            return self.spent or self.group_gone or self.reading_cancelled
        return self.loop_closed and type(raised).__name__ == "CancelledError"

    def _judge_call(self, call: Call) -> str:
        raised, kind = call.raised, call.plan.kind
        if not call.over:
            self.violate("hung", f"call {kind!r} never ended")
            return ""
        if raised is None:
            return "" if kind in ("quick", "everybody", "blocks", "arrays") else f"it returned {call.result!r:.100}"
        if self._is_fitting_death(raised):
            return ""
        fitting = {
            "raises": RemoteError,
            "unknown": UtilityNotFoundError,
            "unsendable": UtilityError,
            "never": UtilityTimeoutError,
        }
        if kind in fitting and isinstance(raised, fitting[kind]):
            return ""
        if kind == "cancelled" and type(raised).__name__ == "CancelledError":
            return ""
        return f"it raised {type(raised).__name__}: {raised}"


def _alphabet(count: int) -> list[int]:
    """What `mock` says."""
    return [97 + i % 26 for i in range(count)]


def _difference(got: list[int], expected: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(expected))
    return f"{len(got)} tokens, wrong from {at}: {got[max(0, at - 2) : at + 5]} for {expected[max(0, at - 2) : at + 5]}"
