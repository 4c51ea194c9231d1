"""The one table of everything that waits for an engine core: requests and utility calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any, TypeAlias

from outboard.client.journal import Journal
from outboard.dp.load import LoadTable
from outboard.errors import (
    DuplicateRequestError,
    EngineDeadError,
    RemoteError,
    UnsupportedError,
    UtilityError,
    UtilityNotFoundError,
)
from outboard.protocol.messages import EngineCoreOutputs, UtilityOutput

# Errors that the engine core raises on purpose arrive as what they are; all others as RemoteError.
_KNOWN_ERRORS = {
    f"{cls.__module__}.{cls.__qualname__}": cls for cls in (UtilityError, UtilityNotFoundError, UnsupportedError)
}

UTILITY_ERROR = f"{UtilityError.__module__}.{UtilityError.__qualname__}"

__all__ = ["NO_RANK", "UTILITY_ERROR", "CallFuture", "PendingTable"]

NO_RANK = -1

CallFuture: TypeAlias = "asyncio.Future[Any] | concurrent.futures.Future[Any]"


class PendingTable:
    """Requests by handle and by the user's id; utility calls by call id. Belongs to the thread of its client.

    Args:
        journal: what is remembered so that requests can be moved; None: they are not.
        load: is told of every request that a rank gets, and of its end; None: there is one rank.

    Attributes:
        request_ids: handle -> the user's id, of requests that have not ended.
        handles: the user's id -> handle, the same the other way round.
        ranks: handle -> the rank that has the request, or `NO_RANK` while it waits for one.
        utility_results: call id -> the future that waits for the answer.
        call_ranks: call id -> the rank that is to answer.
        changes: how many requests have been entered and forgotten.
    """

    def __init__(self, journal: Journal | None = None, load: LoadTable | None = None) -> None:
        self.journal = journal
        self._load = load
        self.request_ids: dict[int, str] = {}
        self.handles: dict[str, int] = {}
        self.ranks: dict[int, int] = {}
        self.utility_results: dict[int, CallFuture] = {}
        self.call_ranks: dict[int, int] = {}
        self.changes = 0
        self._next_handle = 0
        self._next_call_id = 0

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self.request_ids or self.utility_results)

    def add_request(self, request_id: str, rank: int = 0) -> int:
        """Enters a request that this rank is to have; its handle, which is never used again.

        Raises:
            DuplicateRequestError: a request with this id is in flight.
        """
        if request_id in self.handles:
            raise DuplicateRequestError(
                f"a request with id {request_id!r} is in flight already; await its end, abort it, or choose another id"
            )
        handle = self._next_handle
        self._next_handle += 1
        self.changes += 1
        self.request_ids[handle] = request_id
        self.handles[request_id] = handle
        self.ranks[handle] = rank
        if self._load is not None and rank != NO_RANK:
            self._load.sent(rank)
        return handle

    def move_request(self, handle: int, rank: int) -> None:
        """From now on this rank has the request."""
        before = self.ranks[handle]
        self.ranks[handle] = rank
        if self._load is not None:
            if before != NO_RANK:
                self._load.ended(before)
            if rank != NO_RANK:
                self._load.sent(rank)

    def end_request(self, handle: int) -> str | None:
        """Forgets a request; its id, or None if it is not known (any more)."""
        request_id = self.request_ids.pop(handle, None)
        if request_id is not None:
            self.changes += 1
            del self.handles[request_id]
            rank = self.ranks.pop(handle)
            if self._load is not None and rank != NO_RANK:
                self._load.ended(rank)
            if self.journal is not None:
                self.journal.end(handle)
        return request_id

    def end_finished(self, message: EngineCoreOutputs) -> None:
        """Forgets the requests that end with this message."""
        for position, _, _ in message.finished or ():
            self.end_request(message.handles[position])

    def requests_of(self, rank: int) -> list[int]:
        """Handles of the requests that this rank has, in order of arrival."""
        return [handle for handle, other in self.ranks.items() if other == rank]

    def add_call(self, future: CallFuture, rank: int = 0) -> int:
        """Enters a utility call that this rank is to answer; its call id."""
        call_id = self._next_call_id
        self._next_call_id += 1
        self.utility_results[call_id] = future
        self.call_ranks[call_id] = rank
        return call_id

    def end_call(self, call_id: int) -> None:
        """Forgets a utility call: a later answer is dropped."""
        self.utility_results.pop(call_id, None)
        self.call_ranks.pop(call_id, None)

    def fail_calls(self, cause: EngineDeadError, rank: int | None = None) -> None:
        """Ends every call, or those of one rank, with an error of its own."""
        for call_id, other in list(self.call_ranks.items()):
            if rank is None or other == rank:
                future = self.utility_results.pop(call_id, None)
                del self.call_ranks[call_id]
                if future is not None and not future.done():
                    future.set_exception(cause.copy())

    def fail_all(self, cause: EngineDeadError) -> None:
        """Ends every call with an error of its own, and forgets all requests."""
        for handle in list(self.request_ids):
            self.end_request(handle)
        self.fail_calls(cause)


def _process_utility_output(output: UtilityOutput, utility_results: dict[int, CallFuture]) -> None:
    """Answers the call that waits for this output; one that is gone is no error."""
    future = utility_results.pop(output.call_id, None)
    if future is None or future.done():
        return
    if output.error is None:
        future.set_result(output.result)
    else:
        future.set_exception(_remote_error(output))


def _remote_error(output: UtilityOutput) -> UtilityError:
    assert output.error is not None
    report = output.error
    known = _KNOWN_ERRORS.get(report.type)
    if known is not None:
        return known(report.message)
    return RemoteError(report.type, report.message, report.traceback)
