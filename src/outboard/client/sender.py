"""What a client says to its engine core. Knows neither threads nor event loops: all kinds of client share it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from outboard.client.pending import CallFuture, PendingTable
from outboard.errors import InvalidRequestError, UtilityError
from outboard.protocol.codec import MsgpackEncoder, check_size
from outboard.protocol.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityCall,
)
from outboard.protocol.tensors import Buffer
from outboard.protocol.token_ids import token_id_bytes

__all__ = ["Sender"]

Post = Callable[[Sequence[Buffer], int | None], None]

_UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)


class Sender:
    """Enters requests and calls into the pending table, encodes and posts them.

    Args:
        epoch: of this client and its engine core.
        client_index: stamped on every request.
        pending: what waits.
        encoder: for all messages.
        post: sends frames, or holds them; the second argument names a request for `take_back`.
        take_back: removes a request that has not been sent; False if it has.
        max_message_bytes: the engine core would take a larger frame for junk, and end the connection.
        rank: of the engine core.
    """

    def __init__(
        self,
        epoch: int,
        client_index: int,
        pending: PendingTable,
        encoder: MsgpackEncoder,
        post: Post,
        take_back: Callable[[int], bool],
        max_message_bytes: int,
        rank: int = 0,
    ) -> None:
        self._epoch = epoch
        self._client_index = client_index
        self._pending = pending
        self._encoder = encoder
        self._post = post
        self._take_back = take_back
        self._max_message_bytes = max_message_bytes
        self._rank = rank

    def add_request(self, request: EngineCoreRequest) -> int:
        """Sends a request; its handle. Stamps `client_index` and, where it is 0, `arrival_time`.

        Raises:
            DuplicateRequestError: a request with this id is in flight.
            InvalidRequestError: a token id is no 32-bit int, or something in it cannot be sent.
        """
        request.client_index = self._client_index
        request.arrival_time = request.arrival_time or time.time()
        handle = self._pending.add_request(request.request_id, self._rank)
        try:
            self.send_request(request, handle)
        except InvalidRequestError:
            self._pending.end_request(handle)
            raise
        if self._pending.journal is not None:
            self._pending.journal.add(handle, request)
        return handle

    def send_request(self, request: EngineCoreRequest, handle: int) -> None:
        """Sends a request that has been entered. Raises as `add_request`."""
        try:
            frames = self._encode(
                AddRequest(
                    self._epoch,
                    handle,
                    request.request_id,
                    token_id_bytes(request.prompt_token_ids),
                    request.sampling_params,
                    request.inputs,
                    request.client_index,
                    request.arrival_time,
                    request.num_output_tokens,
                )
            )
        except _UNSENDABLE as error:
            raise InvalidRequestError(f"request {request.request_id!r} cannot be sent: {error}") from error
        self._post([EngineCoreRequestType.ADD.value, *frames], handle)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Aborts requests by the user's ids; unknown ones are no error."""
        handles = self._pending.handles
        self.abort([handles[request_id] for request_id in request_ids if request_id in handles])

    def abort(self, handles: Sequence[int]) -> None:
        """Aborts requests by handle; unknown ones are no error."""
        known = [handle for handle in handles if self._pending.end_request(handle) is not None]
        # One that has not been sent is taken back; the abort of any other follows it.
        sent = [handle for handle in known if not self._take_back(handle)]
        if sent:
            self.send(EngineCoreRequestType.ABORT, AbortRequests(self._epoch, sent))

    def call(self, future: CallFuture, method: str, args: Sequence[Any], kwargs: dict[str, Any] | None) -> int:
        """Calls a utility method; the call id, under which `future` waits.

        Raises:
            UtilityError: an argument cannot be sent; nothing waits then.
        """
        call_id = self._pending.add_call(future, self._rank)
        try:
            self.send(
                EngineCoreRequestType.UTILITY, UtilityCall(self._epoch, call_id, method, list(args), kwargs or {})
            )
        except _UNSENDABLE as error:
            self._pending.end_call(call_id)
            raise UtilityError(f"the arguments of {method!r} cannot be sent: {error}") from error
        return call_id

    def send(self, request_type: EngineCoreRequestType, message: Any) -> None:
        """Sends any message."""
        self._post([request_type.value, *self._encode(message)], None)

    def _encode(self, message: Any) -> list[Buffer]:
        frames = self._encoder.encode(message)
        if len(frames) > 1 or len(frames[0]) > self._max_message_bytes:
            try:
                check_size(frames, self._max_message_bytes)
            except ValueError:
                self._encoder.give_back(frames[0])
                raise
        return frames
