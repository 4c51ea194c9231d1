"""All that happens to the messages of one engine core before they are delivered. No IO, no thread, no event loop."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from outboard.client.handle_column import HandleColumn, ReceivedOutputs
from outboard.client.pending import UTILITY_ERROR, PendingTable, _process_utility_output
from outboard.errors import ProtocolError
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

__all__ = ["Counters", "Listener", "Receiver"]

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


class Listener(Protocol):
    """Who gets what a receiver has checked."""

    @property
    def needs_ids(self) -> bool:
        """Whether whoever gets the messages will ask for the user's request ids."""
        ...

    def deliver(self, message: EngineCoreOutputs) -> None:
        """A message with outputs or scheduler stats."""

    def on_engine_dead(self, rank: int, report: ErrorReport) -> None:
        """The engine core has said that it is about to end."""

    def on_broken(self, rank: int, reason: str) -> None:
        """What the engine core sends makes no sense any more: it is to be given up."""

    def on_notification(self, payload: tuple[str, int]) -> bool:
        """A notification of elastic scaling; False if there is nobody to take it."""
        ...


class Counters:
    """What a client has received, over all engine cores and incarnations.

    Attributes:
        received: messages taken from sockets, good or bad.
        dropped: how many messages were dropped, by reason.
    """

    def __init__(self) -> None:
        self.received = 0
        self.dropped: Counter[str] = Counter()

    def drop(self, reason: str, detail: str) -> None:
        """Counts a message that is dropped; the first of each kind is logged."""
        if not self.dropped[reason]:
            logger.warning("dropped a message (%s): %s; more are only counted", reason, detail)
        self.dropped[reason] += 1


class Receiver:
    """Checks and decodes the messages of one engine core; after `end` it takes no more.

    A message goes, in this order, through the epoch and sequence checks, to the utility call that it answers, and to
    the listener.

    Args:
        pending: what waits.
        rank: of the engine core.
        epoch: of this client and this incarnation of it.
        listener: who gets the messages.
        counters: shared by all receivers of the client.

    Attributes:
        scheduler_stats: the latest load that the engine core reported.
        ended: whether no more is taken.
    """

    def __init__(
        self,
        pending: PendingTable,
        rank: int,
        epoch: int,
        listener: Listener,
        counters: Counters,
    ) -> None:
        self._pending = pending
        self._journal = pending.journal
        self._rank = rank
        self._epoch = epoch
        self._listener = listener
        self._counters = counters
        self._handles = HandleColumn(pending)
        self._decoder: MsgpackDecoder[ReceivedOutputs | EngineCoreDead]
        self.set_reader(None)
        self._heads: MsgpackDecoder[_Head] = MsgpackDecoder(_Head)
        self._expected = 0
        self.scheduler_stats = SchedulerStats()
        self.ended = False

    def set_reader(self, reader: SlotReader | None) -> None:
        """For arrays that the engine core puts into shared memory; before its first message."""
        self._decoder = MsgpackDecoder(ReceivedOutputs | EngineCoreDead, reader)

    def end(self) -> None:
        """The epoch is over: whatever still comes is ignored."""
        self.ended = True

    def give_up(self, reason: str) -> None:
        """No more is taken, since what comes makes no sense, or nothing will come."""
        self.ended = True
        self._listener.on_broken(self._rank, reason)

    def on_message(self, body: Buffer, aux: Sequence[Buffer]) -> int:
        """Takes one message from the socket; how many tokens it held. An output without any counts as one."""
        self._counters.received += 1
        if self.ended:
            return 0
        try:
            message = self._decoder.decode(body, aux)
        except ProtocolError as error:
            self._on_undecodable(body, error)
            return 0
        if message.epoch != self._epoch:
            self._counters.drop("other epoch", f"its epoch is {message.epoch:x}, this client's {self._epoch:x}")
        elif isinstance(message, EngineCoreDead):
            self._listener.on_engine_dead(self._rank, message.report)
        elif message.sequence < self._expected:
            self._counters.drop("repeated", f"number {message.sequence} came again")
        elif message.sequence > self._expected:
            self.give_up(
                f"messages {self._expected} to {message.sequence - 1} of the engine core were lost; "
                "its outputs would have gaps, so it is given up"
            )
        elif self._handles.fill_in(message) and self._well_formed(message):
            self._expected += 1
            self._accept(message)
            return max(len(message.handles), len(message.tokens))
        else:
            self.give_up("the engine core sent columns that do not fit together")
        return 0

    def _on_undecodable(self, body: Buffer, error: ProtocolError) -> None:
        """Drops junk; what is our engine core's next message must not be lost, or somebody would wait for ever."""
        try:
            head = self._heads.decode(body)
        except ProtocolError:
            self._counters.drop("undecodable", str(error))
            return
        if head.epoch != self._epoch or head.sequence != self._expected:
            self._counters.drop("undecodable", str(error))
            return
        self._expected += 1
        if head.utility_output is None:
            self.give_up(f"the engine core sent outputs that cannot be decoded: {error}")
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
        if message.extras is not None:
            for name in message.extras.__struct_fields__:
                fits = fits and all(0 <= position < handles for position in getattr(message.extras, name))
        return fits

    def _accept(self, message: EngineCoreOutputs) -> None:
        if message.utility_output is not None:
            self._on_utility_output(message.utility_output)
        if message.scheduler_stats is not None:
            self.scheduler_stats = message.scheduler_stats
        elif not message.handles:
            return
        if self._listener.needs_ids:
            message.request_ids = self._handles.request_ids()
        if self._journal is not None:
            self._journal.note(message)
        if message.finished:
            self._pending.end_finished(message)
        self._listener.deliver(message)

    def _on_utility_output(self, output: UtilityOutput) -> None:
        if output.call_id != EEP_NOTIFICATION_CALL_ID:
            _process_utility_output(output, self._pending.utility_results)
        elif output.result is not None:
            if not _is_notification(output.result):
                self._counters.drop("malformed notification", repr(output.result))
            elif not self._listener.on_notification((output.result[0], output.result[1])):
                self._counters.drop("unexpected notification", repr(output.result))


def _is_notification(payload: Any) -> bool:
    return (
        isinstance(payload, (list, tuple))
        and len(payload) == 2
        and isinstance(payload[0], str)
        and isinstance(payload[1], int)
    )
