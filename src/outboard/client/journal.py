"""What a client remembers of its requests so that it can move them, when the engine core that has them dies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from outboard.protocol.messages import EngineCoreOutputs, EngineCoreRequest
from outboard.protocol.token_ids import pack_token_ids

__all__ = ["InFlight", "Journal"]

InFlightPolicy = Literal["fail", "resubmit", "resume"]


class InFlight:
    """One request that has not ended.

    Attributes:
        request: as the user gave it.
        sent: whether an engine core has it; else it waits for one.
        tokens: what has been delivered of it, where the policy is to resume.
        resubmits: how often it was sent anew.
    """

    __slots__ = ("request", "resubmits", "sent", "tokens")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.sent = True
        self.tokens: list[int] = []
        self.resubmits = 0

    def to_send(self) -> EngineCoreRequest:
        """The request as it is to be sent now: behind the tokens that it has already."""
        tokens = self.tokens
        if not tokens:
            return self.request
        params = self.request.sampling_params
        left = None if params.max_tokens is None else params.max_tokens - len(tokens)
        params = msgspec.structs.replace(params, max_tokens=left, min_tokens=max(0, params.min_tokens - len(tokens)))
        return msgspec.structs.replace(
            self.request,
            prompt_token_ids=pack_token_ids([*self.request.prompt_token_ids, *tokens]),
            sampling_params=params,
            num_output_tokens=self.request.num_output_tokens + len(tokens),
        )


class Journal:
    """The requests in flight by handle, and how far each has come.

    Args:
        policy: see `FaultConfig.in_flight`.
        max_resubmits: how often one request may be sent anew.
    """

    def __init__(self, policy: InFlightPolicy, max_resubmits: int) -> None:
        self._policy = policy
        self._max_resubmits = max_resubmits
        self._requests: dict[int, InFlight] = {}
        self._silent: set[int] = set()  # those that nothing was delivered of; empty in a steady stream
        self._with_results: set[int] = set()  # what was delivered cannot be told to another engine

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, handle: int, request: EngineCoreRequest) -> None:
        """Enters a request."""
        self._requests[handle] = InFlight(request)
        self._silent.add(handle)

    def end(self, handle: int) -> None:
        """Forgets a request."""
        self._requests.pop(handle, None)
        self._silent.discard(handle)
        self._with_results.discard(handle)

    def note(self, message: EngineCoreOutputs) -> None:
        """Notes what is about to be delivered."""
        if self._silent:
            self._note_first(message)
        if message.extras is not None and message.extras.results:
            self._with_results.update(message.handles[position] for position in message.extras.results)
        if self._policy == "resume":
            self._note_tokens(message)

    def after_death(self, handles: Iterable[int], *, at_fault: bool = True) -> tuple[list[int], list[int]]:
        """Decides what becomes of these requests, whose engine core is gone.

        Args:
            at_fault: whether it died, which a request may have caused; else it was removed.

        Returns:
            the handles of those that wait to be sent anew, and of those that end with an error.
        """
        again: list[int] = []
        lost: list[int] = []
        for handle in handles:
            one = self._requests[handle]
            if self._can_move(handle, one, at_fault):
                one.sent = False
                one.resubmits += at_fault
                again.append(handle)
            else:
                lost.append(handle)
        return again, lost

    def waits(self, handle: int) -> None:
        """This request was entered, but not sent."""
        self._requests[handle].sent = False

    @property
    def num_waiting(self) -> int:
        """How many requests wait for an engine core."""
        return sum(not one.sent for one in self._requests.values())

    def waiting(self) -> list[tuple[int, InFlight]]:
        """The requests that wait for an engine core, with their handles, in order of arrival."""
        return [(handle, one) for handle, one in sorted(self._requests.items()) if not one.sent]

    def _can_move(self, handle: int, one: InFlight, at_fault: bool) -> bool:
        if self._policy == "fail" or handle in self._with_results:
            return False
        if at_fault and one.resubmits >= self._max_resubmits:
            return False
        return handle in self._silent or self._policy == "resume"

    def _note_first(self, message: EngineCoreOutputs) -> None:
        handles = message.handles
        if message.counts is None:
            self._silent.difference_update(handles)
        else:
            self._silent.difference_update(
                handle for handle, count in zip(handles, message.counts, strict=True) if count
            )
        if message.extras is not None:
            self._silent.difference_update(handles[position] for position in message.extras.results)

    def _note_tokens(self, message: EngineCoreOutputs) -> None:
        start = 0
        for handle, count in zip(message.handles, message.counts or [1] * len(message.handles), strict=True):
            end = start + count
            one = self._requests.get(handle)
            if one is not None:
                one.tokens += message.tokens[start:end]
            start = end
