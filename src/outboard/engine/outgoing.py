"""What an engine core sends to one client: columns, answers, load. Nothing here waits.

What the port does not take stays, and later outputs are added to it: a slow front end costs memory for tokens, never
for small messages. A large backlog leaves in parts (splitting.py), so that no message keeps a front end busy for long.
Outputs leave inline, after each step: a thread for them would wait for the GIL up to a whole switch interval a message.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from outboard.engine.batch import Columns, OutputBatch, Part
from outboard.engine.splitting import split
from outboard.errors import InvalidRequestError
from outboard.protocol.messages import (
    EngineCoreDead,
    EngineCoreOutputs,
    ErrorReport,
    OutputExtras,
    SchedulerStats,
    UtilityOutput,
)

__all__ = ["Outgoing", "OutputPort", "describe", "error_report"]

# Tokens, and outputs, in one message. So many take a front end 2 to 6 ms to dispatch.
_MAX_TOKENS = 16_384

# After a refusal the port is asked again after 1 ms, then less often.
_FIRST_RETRY = 0.001
_LAST_RETRY = 0.020

# What encoding raises: an unknown type; a value that holds itself; an int of more than 64 bits.
_UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)

Frames = Sequence[Any]


class OutputPort(Protocol):
    """Where outputs leave. Never blocks."""

    def encode(self, message: EngineCoreOutputs | EngineCoreDead) -> Frames:
        """Raises TypeError, ValueError or OverflowError for what cannot be sent."""
        ...

    def writable(self) -> bool:
        """Whether a message would be taken now."""
        ...

    def send(self, frames: Frames, more: bool = False) -> bool:
        """False if it is not taken. Where `more` comes at once, or else `flush`, it may wait for that."""
        ...

    def flush(self) -> bool:
        """Goes on with what was taken and could not leave at once; False if there is need to call this again."""
        ...

    def close(self, linger_ms: int) -> None:
        """The end; what has been sent and has not left may take so long."""
        ...


class Outgoing:
    """Sends columns, each answer in a message of its own, and the load where it has changed.

    Args:
        port: where messages leave.
        columns: those that wait.
        batch, abort_requests: the engine's; for requests whose result cannot be sent.
        rank, epoch: stamped on every message.

    Attributes:
        retry_after: seconds after which to call `flush` again, where it did not send all.
    """

    def __init__(
        self,
        port: OutputPort,
        columns: Columns,
        batch: OutputBatch,
        abort_requests: Callable[[list[str]], None],
        *,
        rank: int,
        epoch: int,
    ) -> None:
        self._port = port
        self._columns = columns
        self._batch = batch
        self._abort_requests = abort_requests
        self._rank = rank
        self._epoch = epoch
        self._sequence = 0
        self._parts: deque[Part] = deque()  # of a large backlog; the columns hold what came after them
        self._answers: deque[UtilityOutput] = deque()
        self._stats: SchedulerStats | None = None  # to be sent
        self._stats_sent = SchedulerStats()
        self._refused = False  # whether the port took no more when last asked
        self.retry_after = _FIRST_RETRY

    @property
    def answers(self) -> int:
        """How many answers wait."""
        return len(self._answers)

    def answer(self, answer: UtilityOutput) -> None:
        """Adds the answer to a utility call; it leaves behind all outputs so far."""
        self._answers.append(answer)

    def report(self, stats: SchedulerStats) -> None:
        """Notes the load, which does not change any more, to be sent if it is another than before."""
        self._stats = stats if stats != self._stats_sent else None

    def report_death(self, report: ErrorReport) -> None:
        """Sends ENGINE_CORE_DEAD, if the port takes it."""
        self._port.send(self._port.encode(EngineCoreDead(self._rank, self._epoch, report)))

    def flush(self, now: float) -> bool:
        """Sends what there is, as far as the port takes it; whether nothing is left.

        Args:
            now: `time.monotonic()`.
        """
        columns, parts = self._columns, self._parts
        if len(columns.tokens) > _MAX_TOKENS or len(columns.handles) > _MAX_TOKENS:
            parts.extend(split(columns, _MAX_TOKENS))
        while parts or columns.handles or self._answers or self._stats is not None:
            # Once refused, ask before encoding again: what is held grows.
            if (self._refused and not self._port.writable()) or not self._send(now):
                return self._refuse()
            self._refused = False
            self._sequence += 1
            if self._stats is not None:
                self._stats_sent = self._stats
                self._stats = None
            if parts:
                parts.popleft()
            elif columns.handles:
                columns.clear()
            elif self._answers:
                self._answers.popleft()
        return self._port.flush() or self._refuse()

    def _send(self, now: float) -> bool:
        """Sends the next message."""
        frames = self._encode(now)
        if self._parts:  # each is large enough to leave alone
            return self._port.send(frames)
        return self._port.send(frames, more=len(self._answers) > (0 if self._columns.handles else 1))

    def _refuse(self) -> bool:
        self.retry_after = min(self.retry_after * 2, _LAST_RETRY) if self._refused else _FIRST_RETRY
        self._refused = True
        return False

    def _encode(self, now: float, repaired: bool = False) -> Frames:
        """The next message: columns if there are any, else an answer, else the load alone."""
        part = self._parts[0] if self._parts else self._columns
        message = EngineCoreOutputs(
            self._rank,
            self._epoch,
            self._sequence,
            now,
            part.handles,
            part.tokens,
            part.counts,
            part.finished,
            part.extras,
            self._stats,
            self._answers[0] if self._answers and not part.handles else None,
        )
        try:
            return self._port.encode(message)
        except _UNSENDABLE as error:
            if repaired:
                raise
            if part.handles:
                self._fail_unsendable_results(part)
            elif self._answers:
                self._answers[0] = UtilityOutput(self._answers[0].call_id, error=error_report(error))
            return self._encode(now, repaired=True)

    def _fail_unsendable_results(self, part: Part) -> None:
        """Ends each request whose result cannot be sent with an error of its own; the others are untouched."""
        if part.extras is None:
            return
        part.extras.errors = {position: _encodable(text) for position, text in part.extras.errors.items()}
        results = part.extras.results
        for position, result in list(results.items()):
            try:
                self._port.encode(EngineCoreOutputs(0, 0, 0, 0.0, extras=OutputExtras(results={0: result})))
            except _UNSENDABLE as error:
                del results[position]
                self._fail(part.handles[position], describe(error))

    def _fail(self, handle: int, reason: str) -> None:
        """Ends a request with an error, also one whose end waits to be sent."""
        request_id = self._columns.open.get(handle)
        if request_id is not None:
            self._abort_requests([request_id])
            self._batch.add(request_id, finish_reason="error", error=reason)
            return
        for part in (*self._parts, self._columns):
            for index, (position, _, _) in enumerate(part.finished or ()):
                if part.handles[position] == handle and part.finished is not None:
                    part.finished[index] = (position, "error", None)
                    part.extras_to_fill().errors[position] = reason


def error_report(error: BaseException) -> ErrorReport:
    """An exception as it travels to the client."""
    cls = type(error)
    return ErrorReport(
        f"{cls.__module__}.{cls.__qualname__}" if cls.__module__ != "builtins" else cls.__qualname__,
        _text_of(error),
        _encodable("".join(traceback.format_exception(error))),
    )


def describe(error: Exception) -> str:
    """An exception in one line, for whoever made the request that it ends."""
    text = _text_of(error)
    return text if isinstance(error, InvalidRequestError) else f"{type(error).__name__}: {text}"


def _text_of(error: BaseException) -> str:
    try:
        return _encodable(str(error))
    except Exception as another:  # a broken __str__ must not hide the error, let alone end the engine core
        return f"(its __str__ raised {type(another).__name__})"


def _encodable(text: str) -> str:
    """Without lone surrogates, which names of files may bring."""
    return text.encode(errors="backslashreplace").decode()
