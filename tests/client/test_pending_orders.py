"""The pending table under every order of what can happen to requests and calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outboard.client.pending import CallFuture, PendingTable, _process_utility_output
from outboard.errors import DuplicateRequestError, EngineDeadError, UtilityError
from outboard.protocol.messages import EngineCoreOutputs, ErrorReport, UtilityOutput

NAMES = ["a", "b", "c"]
# Handles and call ids that exist, existed, or never will.
NUMBERS = st.integers(-2, 12)


class AnyOrder(RuleBasedStateMachine):
    """Two clients' worth of callers, an engine that answers late, twice or wrongly, and its death."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.table = PendingTable()
        self.requests: dict[int, str] = {}  # what must be in the table
        self.calls: dict[int, CallFuture] = {}
        self.next_handle = 0
        self.next_call = 0
        self.futures: list[CallFuture] = []
        self.outcomes: dict[int, Any] = {}  # position in `futures` -> how it must have ended

    # --- requests ---

    @rule(name=st.sampled_from(NAMES))
    def add_request(self, name: str) -> None:
        if name in self.requests.values():
            with pytest.raises(DuplicateRequestError, match=name):
                self.table.add_request(name)
        else:
            handle = self.table.add_request(name)
            assert handle == self.next_handle
            self.next_handle += 1
            self.requests[handle] = name

    @rule(handle=NUMBERS)
    def end_request(self, handle: int) -> None:
        assert self.table.end_request(handle) == self.requests.pop(handle, None)

    @rule(handles=st.lists(NUMBERS, min_size=1, max_size=4), positions=st.lists(st.integers(0, 3), max_size=4))
    def outputs(self, handles: list[int], positions: list[int]) -> None:
        ends = [position % len(handles) for position in positions]
        message = EngineCoreOutputs(
            0, 0, 0, 0.0, handles, [1] * len(handles), finished=[(position, "stop", None) for position in ends] or None
        )
        self.table.end_finished(message)
        for position in ends:
            self.requests.pop(handles[position], None)

    # --- calls ---

    @rule(asynchronous=st.booleans())
    def add_call(self, asynchronous: bool) -> None:
        future: CallFuture = self.loop.create_future() if asynchronous else concurrent.futures.Future()
        assert self.table.add_call(future) == self.next_call == len(self.futures)
        self.next_call += 1
        self.calls[len(self.futures)] = future
        self.futures.append(future)

    @rule(call=NUMBERS, fails=st.booleans())
    def answer(self, call: int, fails: bool) -> None:
        error = ErrorReport("builtins.KeyError", f"of {call}", "") if fails else None
        _process_utility_output(UtilityOutput(call, None if fails else f"to {call}", error), self.table.utility_results)
        future = self.calls.pop(call, None)
        if future is not None:
            self.outcomes.setdefault(call, (UtilityError, f"of {call}") if fails else f"to {call}")

    @rule(call=NUMBERS)
    def caller_is_cancelled(self, call: int) -> None:
        """Its future ends at once, what it cleans up may come after the answer."""
        if call in self.calls:
            self.calls[call].cancel()
            self.outcomes.setdefault(call, "cancelled")

    @rule(call=NUMBERS)
    def caller_goes(self, call: int) -> None:
        """As at the end of every call, by whichever way."""
        if call in self.calls:
            self.calls[call].cancel()
            self.outcomes.setdefault(call, "cancelled")
        self.table.end_call(call)
        self.calls.pop(call, None)

    @rule()
    def engine_dies(self) -> None:
        self.table.fail_all(EngineDeadError("gone"))
        self.requests.clear()
        for call in self.calls:
            self.outcomes.setdefault(call, (EngineDeadError, "gone"))
        self.calls.clear()

    # --- what always holds ---

    @invariant()
    def the_table_is_what_is_open(self) -> None:
        assert self.table.request_ids == self.requests
        assert self.table.handles == {name: handle for handle, name in self.requests.items()}
        assert self.table.utility_results == self.calls

    @invariant()
    def every_future_has_ended_as_it_was_first_told(self) -> None:
        errors = []
        for call, future in enumerate(self.futures):
            outcome = self.outcomes.get(call)
            assert future.done() == (outcome is not None)
            if outcome is None:
                continue
            if outcome == "cancelled":
                assert future.cancelled()
            elif isinstance(outcome, str):
                assert future.result() == outcome
            else:
                error = future.exception()
                assert isinstance(error, outcome[0])
                assert outcome[1] in str(error)
                errors.append(error)
        assert len({id(error) for error in errors}) == len(errors)  # one each

    def teardown(self) -> None:
        self.engine_dies()
        self.the_table_is_what_is_open()
        self.every_future_has_ended_as_it_was_first_told()
        assert not (self.table.request_ids or self.table.handles or self.table.utility_results)
        assert all(future.done() for future in self.futures)
        self.loop.close()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
