"""All that happens to a message between the socket and those who wait for it. No IO, no thread, no event loop."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from outboard.client.pending import UTILITY_ERROR, PendingTable, _process_utility_output
from outboard.errors import ClientClosedError, EngineDeadError, ProtocolError
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.messages import (
    EEP_NOTIFICATION_CALL_ID,
    EngineCoreDead,
    EngineCoreOutputs,
    ErrorReport,
    SchedulerStats,
    UtilityOutput,
)
from outboard.protocol.shm import SlotReader
from outboard.protocol.tensors import Buffer

__all__ = ["Receiver"]

logger = logging.getLogger("outboard.client")


class _CallHead(msgspec.Struct, array_like=True):
    """What is told of an answer that is otherwise undecodable."""

    call_id: int


class _Head(msgspec.Struct, array_like=True, tag=0):
    """What is told of an `EngineCoreOutputs` that is otherwise undecodable: the same fields, the middle unread."""

    engine_index: int
    epoch: int
    sequence: int
    timestamp: msgspec.Raw
    handles: msgspec.Raw
    tokens: msgspec.Raw
    counts: msgspec.Raw
    finished: msgspec.Raw
    extras: msgspec.Raw
    scheduler_stats: msgspec.Raw
    utility_output: _CallHead | None


class Receiver(ABC):
    """Checks, decodes and hands on the messages of one engine core; a failure is sticky.

    A message goes, in this order, through the epoch and sequence checks, to the utility call that it answers, and to
    `_deliver`, which the kinds of client define.

    Args:
        pending: what waits.
        epoch: of this client and its engine core.
        engine: rank, incarnation and pid of the engine core, for errors.
        on_dead: called with the report of an ENGINE_CORE_DEAD message: the engine core is about to end.
        give_up: called at the end, unless that is a shutdown: the engine core is of no more use.
        reader: for arrays that the engine core puts into shared memory.

    Attributes:
        failure: the error that ended everything; None while all is well.
        scheduler_stats: the latest load that the engine core reported.
        received: messages taken from the socket, good or bad.
        dropped: how many messages were dropped, by reason.
    """

    def __init__(
        self,
        pending: PendingTable,
        epoch: int,
        engine: tuple[int, int, int],
        on_dead: Callable[[ErrorReport], None],
        give_up: Callable[[], None],
        reader: SlotReader | None = None,
    ) -> None:
        self._pending = pending
        self._epoch = epoch
        self._engine = engine
        self._on_dead = on_dead
        self._give_up = give_up
        self._decoder: MsgpackDecoder[EngineCoreOutputs | EngineCoreDead] = MsgpackDecoder(
            EngineCoreOutputs | EngineCoreDead, reader
        )
        self._heads: MsgpackDecoder[_Head] = MsgpackDecoder(_Head)
        self._expected = 0
        self.failure: EngineDeadError | None = None
        self.scheduler_stats = SchedulerStats()
        self.received = 0
        self.dropped: Counter[str] = Counter()

    def on_message(self, body: Buffer, aux: Sequence[Buffer]) -> None:
        """Takes one message from the socket."""
        self.received += 1
        if self.failure is not None:
            return
        try:
            message = self._decoder.decode(body, aux)
        except ProtocolError as error:
            self._on_undecodable(body, error)
            return
        if message.epoch != self._epoch:
            self._drop("other epoch", f"its epoch is {message.epoch:x}, this client's {self._epoch:x}")
        elif isinstance(message, EngineCoreDead):
            self._on_dead(message.report)
        elif message.sequence < self._expected:
            self._drop("repeated", f"number {message.sequence} came again")
        elif message.sequence > self._expected:
            self.fail(
                EngineDeadError(
                    f"messages {self._expected} to {message.sequence - 1} of the engine core were lost; "
                    "its outputs would have gaps, so it is given up",
                    rank=message.engine_index,
                )
            )
        elif self._well_formed(message):
            self._expected += 1
            self._accept(message)
        else:
            self.fail(EngineDeadError("the engine core sent columns that do not fit together"))

    def _on_undecodable(self, body: Buffer, error: ProtocolError) -> None:
        """Drops junk; what is our engine core's next message must not be lost, or somebody would wait for ever."""
        try:
            head = self._heads.decode(body)
        except ProtocolError:
            self._drop("undecodable", str(error))
            return
        if head.epoch != self._epoch or head.sequence != self._expected:
            self._drop("undecodable", str(error))
            return
        self._expected += 1
        if head.utility_output is None:
            self.fail(EngineDeadError(f"the engine core sent outputs that cannot be decoded: {error}"))
        else:
            report = ErrorReport(UTILITY_ERROR, f"the answer cannot be decoded: {error}", "")
            answer = UtilityOutput(head.utility_output.call_id, error=report)
            _process_utility_output(answer, self._pending.utility_results)

    @staticmethod
    def _well_formed(message: EngineCoreOutputs) -> bool:
        handles = len(message.handles)
        if message.counts is None:
            fits = len(message.tokens) == handles
        else:
            fits = len(message.counts) == handles and sum(message.counts) == len(message.tokens)
            fits = fits and min(message.counts, default=0) >= 0
        if message.finished:
            fits = fits and all(0 <= position < handles for position, _, _ in message.finished)
        return fits

    def _accept(self, message: EngineCoreOutputs) -> None:
        if message.utility_output is not None:
            self._on_utility_output(message.utility_output)
        if message.scheduler_stats is not None:
            self.scheduler_stats = message.scheduler_stats
        elif not message.handles:
            return
        if self._needs_ids:
            get = self._pending.request_ids.get
            message.request_ids = [get(handle) for handle in message.handles]
        if message.finished:
            self._pending.end_finished(message)
        self._deliver(message)

    @property
    def _needs_ids(self) -> bool:
        """Whether whoever gets the message will ask for the user's request ids."""
        return True

    @abstractmethod
    def _deliver(self, message: EngineCoreOutputs) -> None:
        """Hands on a message with outputs or scheduler stats."""

    @abstractmethod
    def _deliver_end(self, cause: EngineDeadError) -> None:
        """Tells whoever waits for messages that there will be no more."""

    def _on_notification(self, payload: tuple[str, int]) -> bool:
        """Takes a notification of elastic scaling; False if there is nobody to take it."""
        return False

    def _on_utility_output(self, output: UtilityOutput) -> None:
        if output.call_id != EEP_NOTIFICATION_CALL_ID:
            _process_utility_output(output, self._pending.utility_results)
        elif output.result is not None:
            if not _is_notification(output.result):
                self._drop("malformed notification", repr(output.result))
            elif not self._on_notification((output.result[0], output.result[1])):
                self._drop("unexpected notification", repr(output.result))

    def _drop(self, reason: str, detail: str) -> None:
        if not self.dropped[reason]:
            logger.warning("dropped a message on the output socket (%s): %s; more are only counted", reason, detail)
        self.dropped[reason] += 1

    def fail(self, cause: EngineDeadError) -> None:
        """Ends everything that waits, now and for ever after. Only the first cause counts."""
        if self.failure is not None:
            return
        if cause.pid is None:
            cause.rank, cause.incarnation, cause.pid = self._engine
        self.failure = cause
        if not isinstance(cause, ClientClosedError):
            self._give_up()
        if self._can_tell():
            self._pending.fail_all(cause)
            self._deliver_end(cause)

    def _can_tell(self) -> bool:
        """Whether anybody may be waiting."""
        return True


def _is_notification(payload: Any) -> bool:
    return (
        isinstance(payload, (list, tuple))
        and len(payload) == 2
        and isinstance(payload[0], str)
        and isinstance(payload[1], int)
    )
