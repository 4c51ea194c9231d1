"""Requests that wait for an engine core: while it is started again, and those that its last incarnation left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from outboard.client.delivery import Delivery, FailedOutputs
from outboard.client.journal import InFlight
from outboard.client.link import Link
from outboard.client.pending import NO_RANK, PendingTable
from outboard.client.sender import Sender
from outboard.config import EngineConfig
from outboard.errors import (
    EngineDeadError,
    EngineRestartingError,
    InvalidRequestError,
    OutboardError,
)
from outboard.protocol.codec import MsgpackEncoder
from outboard.protocol.messages import EngineCoreOutputs, EngineCoreRequest, OutputExtras

__all__ = ["Moves"]


class Moves:
    """Holds requests, sends them once they can be sent, and ends those that cannot be.

    Args:
        pending: what waits; where it has no journal, nothing is held or moved.
        delivery: who is told.
        client_index, config: of the client.

    Attributes:
        waiting_room: a sender that enters and checks requests, and posts them to nobody.
    """

    def __init__(self, pending: PendingTable, delivery: Delivery, client_index: int, config: EngineConfig) -> None:
        self._pending = pending
        self._delivery = delivery
        self._max_queued = config.faults.max_queued
        self.waiting_room = Sender(
            0,
            client_index,
            pending,
            MsgpackEncoder(config.transport.inline_bytes),
            lambda frames, key: None,
            lambda handle: True,
            config.transport.max_message_bytes,
            NO_RANK,
        )

    def hold(self, request: EngineCoreRequest) -> int:
        """Has a request wait; its handle.

        Raises:
            EngineRestartingError: too many wait already.
            DuplicateRequestError, InvalidRequestError: as `Sender.add_request`.
        """
        journal = self._pending.journal
        if journal is None or journal.num_waiting >= self._max_queued:
            raise EngineRestartingError(
                f"the engine core is being started again, and {self._max_queued} requests wait for it already; try "
                "again, or raise FaultConfig(max_queued=...)"
            )
        handle = self.waiting_room.add_request(request)
        journal.waits(handle)
        return handle

    def after_death(self, rank: int, cause: EngineDeadError, *, at_fault: bool = True) -> None:
        """Ends what cannot be moved of what waited for a dead engine core: all calls, and requests by policy.

        Args:
            at_fault: whether the requests may have caused it; else moving them does not count.
        """
        self._pending.fail_calls(cause, rank)
        journal = self._pending.journal
        lost = self._pending.requests_of(rank)
        if journal is not None:
            again, lost = journal.after_death(lost, at_fault=at_fault)
            for handle in again:
                self._pending.move_request(handle, NO_RANK)
        if lost:
            self._end(rank, lost, cause)

    def send_waiting(self, route: Callable[[EngineCoreRequest], Link | None]) -> None:
        """Sends what waits, in order of arrival: new requests, and those that move.

        Args:
            route: which engine core gets a request; None: it waits on.
        """
        journal = self._pending.journal
        for handle, one in journal.waiting() if journal is not None else ():
            if handle not in self._pending.request_ids:
                continue  # whoever was just told of another has aborted it
            link = route(one.request)
            if link is not None:
                self._send(link, handle, one)

    def end_unreachable(self, rank: int, cause: EngineDeadError) -> None:
        """Ends the requests that wait for this rank and no other: it will not come back."""
        journal = self._pending.journal
        waiting = journal.waiting() if journal is not None else []
        lost = [handle for handle, one in waiting if one.request.data_parallel_rank == rank]
        if lost:
            self._end(rank, lost, cause)

    def _send(self, link: Link, handle: int, one: InFlight) -> None:
        limit = one.request.sampling_params.max_tokens
        if limit is not None and len(one.tokens) >= limit:
            # All of it had come, only its end had not.
            self._deliver(link, handle, finished=[(0, "length", None)])
            return
        request = one.to_send()
        one.sent = True
        self._pending.move_request(handle, link.status.rank)
        try:
            link.sender.send_request(request, handle)
        except InvalidRequestError as error:
            self._end(link.status.rank, [handle], error)
            return
        if one.tokens:
            self._deliver(link, handle, extras=OutputExtras(resumed={0: len(one.tokens)}))

    def _end(self, rank: int, handles: list[int], cause: OutboardError) -> None:
        ids = [self._pending.end_request(handle) for handle in handles]
        self._delivery.deliver(FailedOutputs.of(rank, handles, ids, cause))

    def _deliver(self, link: Link, handle: int, **fields: Any) -> None:
        """Delivers a message of our own about one request."""
        message = EngineCoreOutputs(
            link.status.rank,
            link.epoch,
            0,
            time.monotonic(),
            [handle],
            counts=[0],
            request_ids=[self._pending.request_ids.get(handle)],
            **fields,
        )
        self._pending.end_finished(message)
        self._delivery.deliver(message)
