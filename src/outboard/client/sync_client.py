"""What the clients without asyncio have in common: calls that block."""

from __future__ import annotations

import concurrent.futures
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from outboard.client.base import EngineCoreClient
from outboard.errors import UtilityTimeoutError
from outboard.protocol.messages import EngineCoreOutputs, EngineCoreRequest

__all__ = ["SyncClient"]


class Outbound(Protocol):
    """Where requests and calls go."""

    def add_request(self, request: EngineCoreRequest) -> int: ...
    def abort_requests(self, request_ids: Sequence[str]) -> None: ...
    def call(
        self, future: concurrent.futures.Future[Any], method: str, args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> int: ...


class SyncClient(EngineCoreClient):
    """A client whose calls block. Its methods may be called from several threads."""

    def __init__(self) -> None:
        # Guards the pending table, the sender and the receiver. Reentrant: a future's callback may call again.
        self._lock = threading.RLock()

    @property
    @abstractmethod
    def _outbound(self) -> Outbound:
        """Where requests and calls go."""

    def add_request(self, request: EngineCoreRequest) -> int:
        """Sends a request to the engine core; its handle, which is never used again.

        Stamps `client_index` and, where it is 0, `arrival_time`.

        Raises:
            DuplicateRequestError: a request with this id is in flight.
            InvalidRequestError: a token id is no 32-bit int, or something in it cannot be sent.
            EngineDeadError: the engine core is gone.
        """
        with self._lock:
            self.validate_alive()
            return self._outbound.add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests: no output of theirs is delivered any more. Unknown and finished ids are no error."""
        with self._lock:
            self._outbound.abort_requests(request_ids)

    @abstractmethod
    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        """The next message with outputs or scheduler stats.

        Args:
            timeout: seconds to wait; None: no limit.

        Raises:
            TimeoutError: nothing came in time.
            EngineDeadError: the engine core is gone, and all that it had sent has been returned.
        """

    def call_utility(
        self,
        method: str,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
        rank: int | None = None,
    ) -> Any:
        """Calls an `@utility` method of the engine core; its result.

        Args:
            method: its name.
            *args: positional arguments: msgpack values, dataclasses, structs, numpy arrays.
            kwargs: keyword arguments.
            timeout: seconds until `UtilityTimeoutError`; None: no limit.
            rank: which engine core; None: the only one.

        Raises:
            UtilityNotFoundError: no such method; names those there are.
            UnsupportedError: the engine cannot do it.
            RemoteError: it raised; has the remote type, message and traceback.
            UtilityTimeoutError: no answer in time.
            UtilityError: an argument cannot be sent.
            EngineDeadError: the engine core is gone, or went before it answered.
        """
        self._check_rank(rank)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            self.validate_alive()
            call_id = self._outbound.call(future, method, args, kwargs)
        try:
            return self._typed(method, self._wait_for(future, timeout))
        except concurrent.futures.TimeoutError:
            if future.done():  # the method's own
                raise
            raise UtilityTimeoutError(f"utility call {method!r} was not answered within {timeout:g} s") from None
        finally:
            with self._lock:
                self._pending.end_call(call_id)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a `@utility` method on every worker of the engine; one result a worker, at least one.

        Args, raises: as `call_utility`.
        """
        results: list[Any] = self.call_utility("collective_rpc", method, timeout, list(args), kwargs, timeout=timeout)
        return [self._typed(method, result) for result in results]

    @abstractmethod
    def _wait_for(self, future: concurrent.futures.Future[Any], timeout: float | None) -> Any:
        """The result of a future. Raises `concurrent.futures.TimeoutError` after `timeout` seconds."""
