"""The one table of everything that waits for an engine core: requests and utility calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any, TypeAlias

from outboard.client.journal import Journal
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

__all__ = ["UTILITY_ERROR", "CallFuture", "PendingTable"]

CallFuture: TypeAlias = "asyncio.Future[Any] | concurrent.futures.Future[Any]"


class PendingTable:
    """Requests by handle and by the user's id; utility calls by call id. Belongs to the thread of its client.

    Args:
        journal: what is remembered so that requests can be moved; None: they are not.

    Attributes:
        request_ids: handle -> the user's id, of requests that have not ended.
        handles: the user's id -> handle, the same the other way round.
        utility_results: call id -> the future that waits for the answer.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal = journal
        self.request_ids: dict[int, str] = {}
        self.handles: dict[str, int] = {}
        self.utility_results: dict[int, CallFuture] = {}
        self._next_handle = 0
        self._next_call_id = 0

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self.request_ids or self.utility_results)

    def add_request(self, request_id: str) -> int:
        """Enters a request; its handle, which is never used again.

        Raises:
            DuplicateRequestError: a request with this id is in flight.
        """
        if request_id in self.handles:
            raise DuplicateRequestError(
                f"a request with id {request_id!r} is in flight already; await its end, abort it, or choose another id"
            )
        handle = self._next_handle
        self._next_handle += 1
        self.request_ids[handle] = request_id
        self.handles[request_id] = handle
        return handle

    def end_request(self, handle: int) -> str | None:
        """Forgets a request; its id, or None if it is not known (any more)."""
        request_id = self.request_ids.pop(handle, None)
        if request_id is not None:
            del self.handles[request_id]
            if self.journal is not None:
                self.journal.end(handle)
        return request_id

    def end_finished(self, message: EngineCoreOutputs) -> None:
        """Forgets the requests that end with this message."""
        for position, _, _ in message.finished or ():
            self.end_request(message.handles[position])

    def add_call(self, future: CallFuture) -> int:
        """Enters a utility call; its call id."""
        call_id = self._next_call_id
        self._next_call_id += 1
        self.utility_results[call_id] = future
        return call_id

    def end_call(self, call_id: int) -> None:
        """Forgets a utility call: a later answer is dropped."""
        self.utility_results.pop(call_id, None)

    def fail_calls(self, cause: EngineDeadError) -> None:
        """Ends every call with an error of its own."""
        calls, self.utility_results = self.utility_results, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(cause.copy())

    def fail_all(self, cause: EngineDeadError) -> None:
        """Ends every call with an error of its own, and forgets all requests."""
        self.request_ids.clear()
        self.handles.clear()
        if self.journal is not None:
            self.journal.clear()
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
