"""The busy loop and one client; see loop_driver.py."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_driver import EPOCH, Asleep, Core, Engine, Port

from outboard import OutputBatch
from outboard.engine import outgoing, utilities
from outboard.engine.events import BadCall, BadRequest, ClientJoined, Stop, Writable
from outboard.engine.loop import BusyLoop
from outboard.errors import InvalidRequestError
from outboard.protocol.messages import AddRequest, SchedulerStats, UtilityCall, UtilityOutput
from outboard.protocol.progress import ProgressPage
from outboard.protocol.sampling import SamplingParams


@pytest.fixture
def core() -> Core:
    return Core()


# --- requests --------------------------------------------------------------------------------------------------------


def test_requests_run_to_their_end(core: Core) -> None:
    core.add(0, [1, 2, 3])
    core.add(1, [4])
    core.settle()
    assert core.sent() == {0: [1, 2, 3, "stop"], 1: [4, "stop"]}
    assert len(core.port.messages) == 3  # one a step


def test_one_step_is_one_message_with_plain_columns(core: Core) -> None:
    core.add(0, [1, 2])
    core.add(1, [3, 4])
    core.loop.turn()
    [message] = core.port.messages
    assert (message.handles, message.tokens, message.counts) == ([0, 1], [1, 3], None)
    assert (message.finished, message.extras) == (None, None)
    assert message.timestamp > 0


def test_the_engine_sees_unique_ids_and_the_user_s_name(core: Core) -> None:
    core.add(0, request_id="same")
    core.add(1, request_id="same")
    core.loop.turn()
    assert len(core.engine.requests) == 2
    assert core.engine.events[:2] == [("add", "same"), ("add", "same")]


def test_a_request_after_an_aborted_one_of_the_same_name(core: Core) -> None:
    core.add(0, [1, 2], request_id="same")
    core.loop.turn()
    core.abort(0)
    core.add(1, [7], request_id="same")
    core.settle()
    assert core.sent() == {0: [1], 1: [7, "stop"]}


def test_an_abort_before_any_step(core: Core) -> None:
    core.add(0)
    core.abort(0)
    core.settle()
    assert core.engine.events == [("add", "r0"), ("abort", 1)]
    assert core.sent() == {}


def test_an_abort_between_steps_ends_the_tokens(core: Core) -> None:
    core.add(0)
    core.add(1)
    core.loop.turn()
    core.abort(0)
    core.settle()
    assert core.sent() == {0: [1], 1: [1, 2, 3, "stop"]}


def test_an_engine_that_goes_on_with_an_aborted_request_is_not_heard(core: Core) -> None:
    core.add(0)
    core.loop.turn()
    [request_id] = core.engine.requests
    core.add(1)
    core.abort(0)
    core.engine.on_step = lambda outputs: outputs.add(request_id, [99], finish_reason="stop")
    core.settle()
    assert core.sent() == {0: [1], 1: [1, 2, 3, "stop"]}


def test_aborts_of_unknown_finished_and_aborted_requests_do_nothing(core: Core) -> None:
    core.add(0, [1])
    core.settle()
    core.abort(0, 77)
    core.add(1)
    core.abort(1, 1)
    core.abort(1)
    core.settle()
    assert core.engine.events == [("add", "r0"), "step", ("add", "r1"), ("abort", 1)]
    assert core.sent() == {0: [1, "stop"]}


def test_an_abort_of_several_is_one_call(core: Core) -> None:
    for handle in range(3):
        core.add(handle)
    core.abort(0, 9, 2)
    core.loop.turn()
    assert core.engine.events[3] == ("abort", 2)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InvalidRequestError("no such adapter"), "no such adapter"),
        (ValueError("odd"), "ValueError: odd"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_a_request_that_the_engine_refuses_fails_alone(core: Core, error: Exception, text: str) -> None:
    core.add(0, [1, 2])
    core.loop.turn()
    core.engine.refuse = error
    core.add(1)
    core.loop.turn()
    core.engine.refuse = None
    core.add(2, [5])
    core.settle()
    assert core.sent() == {0: [1, 2, "stop"], 1: ["error"], 2: [5, "stop"]}
    assert core.errors() == {1: text}


def test_a_bad_request_fails_alone(core: Core) -> None:
    core.add(0, [1])
    core.send(BadRequest(1, "undecodable"))
    core.settle()
    assert core.sent() == {0: [1, "stop"], 1: ["error"]}
    assert core.errors() == {1: "undecodable"}
    assert ("add", "r1") not in core.engine.events


def test_a_prompt_with_a_part_of_a_token_fails_alone(core: Core) -> None:
    """One bad ADD fails that one request (DESIGN.md, section 8)."""
    core.add(0, [1])
    core.send(AddRequest(EPOCH, 1, "r1", b"12345", SamplingParams()))
    core.settle()
    assert core.sent() == {0: [1, "stop"], 1: ["error"]}


def test_a_handle_that_is_in_use_is_not_taken_twice(core: Core) -> None:
    """A client never does that; whatever does must not end the engine core."""
    core.add(0, [1, 2])
    core.add(0, [7])
    core.send(BadRequest(0, "undecodable"))
    core.settle()
    assert core.sent() == {0: [1, 2, "stop"]}
    assert core.engine.events.count(("add", "r0")) == 1


def test_a_message_that_was_dropped_does_nothing(core: Core) -> None:
    core.send(None)
    core.add(0, [1])
    core.send(None)
    core.settle()
    assert core.sent() == {0: [1, "stop"]}


def test_an_error_text_that_utf8_cannot_hold_fails_alone(core: Core) -> None:
    """File names that are no UTF-8 put lone surrogates into messages of exceptions."""
    core.add(0, [1])
    core.loop.turn()
    core.engine.refuse = InvalidRequestError("no such file: \udcff")
    core.add(1)
    core.settle()
    assert core.sent() == {0: [1, "stop"], 1: ["error"]}
    assert core.errors()[1].startswith("no such file: ")


def test_an_exception_of_a_step_passes_through(core: Core) -> None:
    def fail(outputs: OutputBatch) -> None:
        raise RuntimeError("boom")

    core.engine.on_step = fail
    core.add(0)
    with pytest.raises(RuntimeError, match="boom"):
        core.loop.run()


# --- a port that refuses ---------------------------------------------------------------------------------------------


def test_refused_outputs_merge_into_one_message(core: Core) -> None:
    core.add(0, [1, 2, 3, 4])
    core.add(1, [5, 6])
    core.port.open = False
    for _ in range(3):
        core.loop.turn()
    assert core.port.encoded == 1  # once refused, nothing is encoded in order to be refused again
    core.port.open = True
    core.loop.turn()
    [message] = core.port.messages
    assert core.sent() == {0: [1, 2, 3, 4, "stop"], 1: [5, 6, "stop"]}
    assert message.sequence == 0


def test_a_send_that_is_refused_loses_nothing_and_takes_no_number(core: Core) -> None:
    core.add(0)
    core.port.refuse_sends = 2
    core.settle()
    assert core.sent() == {0: [1, 2, 3, "stop"]}


def test_the_last_outputs_leave_with_no_work_left(core: Core) -> None:
    core.add(0, [1])
    core.port.open = False
    for _ in range(12):
        core.loop.turn()
    assert core.port.messages == []
    # The first turn had work, the second found that there is none; the others waited, first briefly, then longer.
    assert len(core.inbox.waits) == 10
    assert all(0.001 <= wait <= 0.020 for wait in core.inbox.waits)
    assert core.inbox.waits == sorted(core.inbox.waits)
    assert core.inbox.waits[-1] == 0.020
    core.port.open = True
    core.settle()
    assert core.sent() == {0: [1, "stop"]}


def test_the_wait_is_short_again_after_a_success(core: Core) -> None:
    for handle in range(2):
        core.inbox.waits.clear()
        core.port.open = False
        core.add(handle, [1])
        for _ in range(10):
            core.loop.turn()
        assert core.inbox.waits[0] <= 0.004
        core.port.open = True
        core.settle()
    assert core.sent() == {0: [1, "stop"], 1: [1, "stop"]}


def test_with_nothing_to_send_the_loop_sleeps(core: Core) -> None:
    with pytest.raises(Asleep):
        core.loop.turn()
    core.add(0, [1])
    core.settle()
    asked = core.port.asked
    with pytest.raises(Asleep):
        core.loop.turn()
    assert core.port.asked == asked
    assert core.inbox.waits == []


@pytest.fixture
def three_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message has more tokens, nor more outputs."""
    monkeypatch.setattr(outgoing, "_MAX_TOKENS", 3)


def test_a_large_backlog_leaves_in_several_messages(core: Core, three_tokens: None) -> None:
    core.add(0, [1, 2, 3, 4])
    core.add(1, [5, 6])
    core.port.open = False
    for _ in range(4):
        core.loop.turn()
    assert core.port.encoded == 1
    core.port.open = True
    core.loop.turn()
    assert core.sent() == {0: [1, 2, 3, 4, "stop"], 1: [5, 6, "stop"]}  # which checks the sequence numbers
    assert len(core.port.messages) > 1
    assert all(max(len(message.tokens), len(message.handles)) <= 3 for message in core.port.messages)


def test_a_refusal_between_parts_of_a_backlog_loses_nothing(core: Core, three_tokens: None) -> None:
    core.add(0, list(range(20)))
    core.port.open = False
    for _ in range(8):
        core.loop.turn()
    core.port.open = True
    send, taken = core.port.send, 2

    def send_some(frames: Sequence[Any], more: bool = False) -> bool:
        nonlocal taken
        taken -= 1
        return taken >= 0 and send(frames, more)

    core.port.send = send_some  # type: ignore[method-assign]
    core.loop.turn()
    assert core.sent() == {0: list(range(6))}
    core.loop.turn()
    core.port.send = send  # type: ignore[method-assign]
    core.settle()
    assert core.sent() == {0: [*range(20), "stop"]}


def test_one_step_may_be_a_large_backlog(core: Core, three_tokens: None) -> None:
    core.add(0, [1])
    core.engine.on_step = lambda outputs: outputs.add(outputs.open_requests[0], list(range(100, 107)))
    core.settle()
    assert core.sent() == {0: [*range(100, 107), 1, "stop"]}
    assert [len(message.tokens) for message in core.port.messages if message.tokens] == [3, 3, 2]


def test_answers_and_the_load_leave_with_a_large_backlog(core: Core, three_tokens: None) -> None:
    core.add(0, list(range(10)))
    core.port.open = False
    for _ in range(10):
        core.loop.turn()
    core.call(0, "set_stats", 5)
    core.call(1, "echo")
    core.loop.turn()
    core.port.open = True
    core.settle()
    *outputs, first, second = core.port.messages
    assert all(message.handles and message.utility_output is None for message in outputs)
    assert core.sent() == {0: [*range(10), "stop"]}
    assert [first.utility_output, second.utility_output] == core.answers()
    assert core.stats() == [SchedulerStats(waiting=5)]


@pytest.mark.parametrize("steps", [1, 6, 12])
def test_an_unsendable_result_in_a_backlog_ends_its_request(core: Core, three_tokens: None, steps: int) -> None:
    """It still runs, or its end waits in the columns, or in a message between."""
    others = list(range(100, 115))
    core.add(0, [1, 2, 3, 4, 5, 6])
    core.add(1, others)
    core.port.open = False
    core.loop.turn()
    request_id = core.loop._batch.open_requests[0]

    def result(outputs: OutputBatch) -> None:
        core.engine.on_step = None
        outputs.add(request_id, result=object())

    core.engine.on_step = result
    for _ in range(steps):
        core.loop.turn()
    assert core.loop._batch.is_open(request_id) == (steps == 1)
    waits = any(reason for _, reason, _ in core.loop._clients[EPOCH].columns.finished or ())
    assert waits == (steps == 6)
    core.port.open = True
    core.settle()
    assert core.sent()[0][-1] == "error"
    assert "object" in core.errors()[0]
    assert core.sent()[1] == [*others, "stop"]


def test_answers_keep_their_place_behind_outputs_while_the_port_refuses(core: Core) -> None:
    core.add(0, [1, 2])
    core.port.open = False
    core.loop.turn()
    core.call(0, "echo", "a")
    core.call(1, "echo", "b")
    core.loop.turn()
    core.port.open = True
    core.settle()
    assert core.sent() == {0: [1, 2, "stop"]}
    assert [answer.call_id for answer in core.answers()] == [0, 1]
    assert core.port.messages[0].handles and core.port.messages[0].utility_output is None


def test_an_abort_during_refusal_keeps_what_there_was(core: Core) -> None:
    core.add(0)
    core.port.open = False
    core.loop.turn()
    core.abort(0)
    core.loop.turn()
    core.port.open = True
    core.settle()
    assert core.sent() == {0: [1]}


# --- utility calls ---------------------------------------------------------------------------------------------------


def test_a_message_that_left_in_part_is_finished_before_the_loop_sleeps(core: Core) -> None:
    core.add(0)
    core.port.unfinished = 8
    with pytest.raises(Asleep):
        for _ in range(10):
            core.loop.turn()
    assert core.port.unfinished == 0
    assert core.sent() == {0: [1, 2, 3, "stop"]}
    assert core.inbox.waits and max(core.inbox.waits) <= 0.02


def test_the_loop_is_woken_when_a_client_takes_more(core: Core) -> None:
    core.port.open = False
    core.add(0, [7])
    core.loop.turn()
    core.loop.turn()
    core.port.open = True
    waits = len(core.inbox.waits)
    core.inbox.put(Writable())
    core.loop.turn()
    assert len(core.inbox.waits) == waits
    assert core.sent()[0][0] == 7


def test_a_stop_waits_until_all_has_left(core: Core) -> None:
    core.port.unfinished = 5
    core.inbox.put(Stop())
    core.loop.run()
    assert core.port.unfinished == 0


def test_a_utility_call_is_answered(core: Core) -> None:
    core.call(5, "echo", 1, "two", key=[3])
    core.settle()
    assert core.answers() == [UtilityOutput(5, [[1, "two"], {"key": [3]}])]


def test_a_utility_call_has_its_place_between_requests(core: Core) -> None:
    core.add(0)
    core.call(0, "echo", "x")
    core.abort(0)
    core.settle()
    assert core.engine.events == [("add", "r0"), ("echo", "x"), ("abort", 1)]


def test_answers_to_quick_calls_leave_together(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilities, "_QUICK", 100.0)
    core.engine.on_look = lambda: len(core.port.messages)
    for call_id in range(3):
        core.call(call_id, "look")  # once it was quick
    core.loop.turn()
    for call_id in range(3, 103):
        core.call(call_id, "look")
    core.loop.turn()
    assert [answer.call_id for answer in core.answers()] == list(range(103))
    # The first of a name waits for none; then up to 32 are held.
    assert core.engine.events == [0, 0, 0, *([3] * 32), *([35] * 32), *([67] * 32), *([99] * 4)]
    assert [not more for more in core.port.more] == [number in (2, 34, 66, 98, 102) for number in range(103)]


def test_no_answer_waits_for_what_may_take_long(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a method that was not quick, or was not called yet; a request; a step."""
    seen: list[int] = []

    def look() -> None:
        seen.append(len(core.answers()))

    core.engine.on_look = look
    core.engine.on_step = lambda outputs: look()
    monkeypatch.setattr(utilities, "_QUICK", 100.0)
    core.call(0, "echo")
    core.call(1, "look")
    core.loop.turn()
    assert seen == [1]
    core.engine.refuse = None
    core.call(2, "echo")
    core.add(0)
    core.call(3, "echo")
    core.loop.turn()
    assert seen == [1, 4]
    assert [event for event in core.engine.events if event] == [
        ("echo",),
        ("echo",),
        ("add", "r0"),
        ("echo",),
        "step",
    ]
    monkeypatch.setattr(utilities, "_QUICK", 0.0)
    core.call(4, "look")
    core.loop.turn()
    core.call(5, "echo")
    core.call(6, "look")
    core.loop.turn()
    assert seen == [1, 4, 4, 5, 6, 7]


def test_answers_of_a_client_that_leaves_are_forgotten(core: Core) -> None:
    other = core.join()
    other.call(0, "look")
    core.call(0, "look")
    other.leave()
    core.loop.turn()
    assert [answer.call_id for answer in core.answers()] == [0]
    assert other.port.lingers == [0]


def test_what_a_utility_raises_reaches_its_caller(core: Core) -> None:
    core.call(0, "boom")
    core.call(1, "echo", no_such="x")
    core.call(2, "boom", 1, 2, 3)
    core.settle()
    first, second, third = core.answers()
    assert first.error is not None
    assert (first.error.type, first.error.message) == ("LookupError", "no such thing")
    assert "in boom" in first.error.traceback
    assert second.error is None
    assert third.error is not None and third.error.type == "TypeError"


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [ValueError("not UTF-8: \udcff"), Rude()], ids=["surrogates", "no text"])
def test_an_exception_with_an_impossible_text_reaches_its_caller(core: Core, error: Exception) -> None:
    core.engine.refuse = error
    core.call(0, "boom")
    core.settle()
    [answer] = core.answers()
    assert answer.error is not None


@pytest.mark.parametrize("method", ["secret", "step", "shutdown", "__init__", "no_such", "requests", ""])
def test_only_marked_methods_can_be_called(core: Core, method: str) -> None:
    core.call(0, method)
    core.settle()
    [answer] = core.answers()
    assert answer.error is not None
    assert answer.error.type == "outboard.errors.UtilityNotFoundError"
    assert f"no utility method {method!r}" in answer.error.message
    for name in ("boom", "echo", "later", "set_stats", "unsendable", "pause_generation"):
        assert name in answer.error.message


def test_a_bad_call_is_answered(core: Core) -> None:
    core.send(BadCall(3, "undecodable"))
    core.settle()
    [answer] = core.answers()
    assert answer.call_id == 3
    assert answer.error is not None
    assert (answer.error.type, answer.error.message) == ("outboard.errors.ProtocolError", "undecodable")


def test_a_result_that_cannot_be_sent_is_an_error_of_that_call(core: Core) -> None:
    core.add(0, [1])
    core.call(0, "unsendable")
    core.call(1, "echo")
    core.settle()
    first, second = core.answers()
    assert first.error is not None
    assert "builtins.object cannot be sent" in first.error.message
    assert second == UtilityOutput(1, [[], {}])
    assert core.sent() == {0: [1, "stop"]}


@pytest.mark.parametrize("value", [2**64, "\udcff", {1: {2: 1j}}], ids=["huge", "surrogate", "complex"])
def test_other_values_that_cannot_be_sent(core: Core, value: Any) -> None:
    core.call(0, "later")
    core.settle()
    core.engine.futures[0].set_result(value)
    core.settle()
    [answer] = core.answers()
    assert answer.error is not None


def test_deferred_results_are_answered_in_the_order_in_which_they_come(core: Core) -> None:
    for call_id in range(3):
        core.call(call_id, "later")
    core.settle()
    assert core.answers() == []
    core.engine.futures[2].set_result("two")
    core.engine.futures[0].set_exception(OSError("disk"))
    core.settle()
    second, first = core.answers()
    assert second == UtilityOutput(2, "two")
    assert first.call_id == 0
    assert first.error is not None and (first.error.type, first.error.message) == ("OSError", "disk")
    core.engine.futures[1].cancel()
    core.settle()
    error = core.answers()[2].error
    assert error is not None and error.type.endswith("CancelledError")


def test_a_future_that_is_done_already_is_answered_in_the_same_turn(core: Core) -> None:
    core.engine.later = None  # type: ignore[assignment,method-assign]
    done: Future[str] = Future()
    done.set_result("at once")
    core.loop._calls.methods["later"] = lambda: done
    core.call(0, "later")
    core.loop.turn()
    assert core.answers() == [UtilityOutput(0, "at once")]


def test_arrays_are_sent_as_results_of_utilities(core: Core) -> None:
    core.call(0, "later")
    core.settle()
    core.engine.futures[0].set_result(np.arange(1000))
    core.settle()
    assert core.answers()[0].result.tolist() == list(range(1000))


# --- results that cannot be sent -------------------------------------------------------------------------------------


@pytest.mark.parametrize("finish_reason", [None, "stop"])
def test_a_result_that_cannot_be_sent_ends_its_request_alone(core: Core, finish_reason: Any) -> None:
    core.add(0, [1, 2])
    core.add(1, [3, 4, 5])
    core.add(2, [5, 6])
    core.loop.turn()
    ids = list(core.engine.requests)

    def results(outputs: OutputBatch) -> None:
        core.engine.on_step = None
        outputs.add(ids[0], result={"fine": 1})
        outputs.add(ids[1], finish_reason=finish_reason, result=object())
        if finish_reason is not None:
            del core.engine.requests[ids[1]]

    core.engine.on_step = results
    core.settle()
    sent = core.sent()
    assert sent[0] == [1, 2, "stop"]
    assert sent[2] == [5, 6, "stop"]
    assert sent[1][-1] == "error"
    assert "builtins.object cannot be sent" in core.errors()[1]
    assert [message.extras.results for message in core.port.messages if message.extras] == [{0: {"fine": 1}}]
    assert not core.engine.requests


def test_the_engine_is_told_to_drop_a_request_whose_result_cannot_be_sent(core: Core) -> None:
    core.add(0, [1, 2, 3, 4])
    core.loop.turn()
    [request_id] = core.engine.requests
    core.engine.on_step = lambda outputs: outputs.add(request_id, result=object())
    core.settle()
    assert ("abort", 1) in core.engine.events
    assert core.sent()[0][-1] == "error"


# --- load ------------------------------------------------------------------------------------------------------------


def test_without_stats_of_its_own_open_requests_count_as_running(core: Core) -> None:
    core.add(0, [1, 2, 3])
    core.add(1, [1])
    core.settle()
    assert (
        core.stats()
        == [SchedulerStats(running=2), SchedulerStats(running=1), SchedulerStats(running=0)][-len(core.stats()) :]
    )
    assert core.stats()[-1] == SchedulerStats()


def test_stats_are_sent_when_they_change_only(core: Core) -> None:
    core.engine.stats = SchedulerStats(waiting=1)
    core.add(0, [1, 2, 3, 4])
    core.settle()
    assert core.stats() == [SchedulerStats(waiting=1)]


def test_stats_are_sent_when_idle_too(core: Core) -> None:
    core.call(0, "set_stats", 5)
    core.settle()
    assert core.stats() == [SchedulerStats(waiting=5)]
    core.engine.stats = SchedulerStats(waiting=6)
    core.abort(77)
    core.settle()
    assert core.port.messages[-1].scheduler_stats == SchedulerStats(waiting=6)
    assert core.port.messages[-1].handles == []


def test_refused_stats_are_sent_later_and_are_the_latest(core: Core) -> None:
    core.port.open = False
    for waiting in (1, 2, 3):
        core.engine.stats = SchedulerStats(waiting=waiting)
        core.abort(77)
        core.loop.turn()
    core.port.open = True
    core.settle()
    assert core.stats() == [SchedulerStats(waiting=3)]


def test_stats_that_are_gone_before_they_were_sent_leave_nothing_to_send(core: Core) -> None:
    core.port.open = False
    core.call(0, "set_stats", 5)
    core.loop.turn()
    core.engine.stats = None
    core.port.open = True
    core.settle()
    assert core.stats() == []
    assert len(core.port.messages) == 1


def test_an_engine_may_change_and_return_the_same_stats_object(core: Core) -> None:
    core.engine.stats = SchedulerStats(waiting=1)
    core.abort(77)
    core.settle()
    core.engine.stats.waiting = 2
    core.abort(77)
    core.settle()
    assert [stats.waiting for stats in core.stats()] == [1, 2]


# --- the end ---------------------------------------------------------------------------------------------------------


def test_stop_aborts_everything_and_says_so(core: Core) -> None:
    core.add(0, [1])
    core.add(1)
    core.add(2)
    core.loop.turn()
    core.inbox.put(Stop())
    core.loop.run()
    assert core.sent() == {0: [1, "stop"], 1: [1, "abort"], 2: [1, "abort"]}
    assert core.engine.events[-1] == ("abort", 2)
    assert not core.engine.requests


def test_stop_with_nothing_to_do(core: Core) -> None:
    core.inbox.put(Stop())
    core.loop.run()
    assert core.engine.events == []
    assert core.port.messages == []


def test_stop_twice(core: Core) -> None:
    core.add(0)
    core.loop.turn()
    core.inbox.put(Stop())
    core.inbox.put(Stop())
    core.loop.run()
    assert core.sent() == {0: [1, "abort"]}


def test_no_step_is_made_after_stop(core: Core) -> None:
    core.add(0)
    core.inbox.put(Stop())
    core.loop.run()
    assert "step" not in core.engine.events
    assert core.sent() == {0: ["abort"]}


def test_what_came_before_stop_is_answered(core: Core) -> None:
    core.call(0, "echo")
    core.inbox.put(Stop())
    core.loop.run()
    assert [answer.call_id for answer in core.answers()] == [0]


def test_a_request_behind_stop_is_not_left_in_the_engine(core: Core) -> None:
    """`shutdown` is called with all requests aborted."""
    core.inbox.put(Stop())
    core.add(0)
    core.loop.run()
    assert not core.engine.requests


def test_outputs_that_are_refused_for_a_moment_leave_before_the_end(core: Core) -> None:
    """STOPPING --all requests aborted, outputs flushed--> STOPPED"""
    core.add(0)
    core.loop.turn()
    core.port.refuse_sends = 1
    core.inbox.put(Stop())
    core.loop.run()
    assert core.sent() == {0: [1, "abort"]}


def test_stop_ends_the_loop_with_a_port_that_never_opens_again(core: Core) -> None:
    core.add(0)
    core.port.open = False
    core.loop.turn()
    core.inbox.put(Stop())
    thread = threading.Thread(target=core.loop.run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_a_sleeping_loop_is_woken_by_its_queue() -> None:
    """With a real queue and a thread: requests, a deferred result and the end all wake it."""
    engine, inbox, port = Engine(), SimpleQueue[Any](), Port()
    thread = threading.Thread(target=BusyLoop(engine, inbox, ProgressPage(shared=False)).run, daemon=True)
    thread.start()
    inbox.put(ClientJoined(0, 0, port))
    asked = threading.Event()
    engine.later = None  # type: ignore[assignment,method-assign]
    answered = threading.Event()
    send = port.send

    def notice(frames: Sequence[Any], more: bool = False) -> bool:
        taken = send(frames)
        if port.messages[-1].utility_output is not None:
            (asked if port.messages[-1].utility_output.call_id == 0 else answered).set()
        return taken

    port.send = notice  # type: ignore[method-assign]
    inbox.put((0, [UtilityCall(0, 1, "later", [], {})]))
    inbox.put((0, [UtilityCall(0, 0, "echo", [], {})]))
    assert asked.wait(10)
    engine.futures[0].set_result("x")
    assert answered.wait(10)
    inbox.put(Stop())
    thread.join(10)
    assert not thread.is_alive()


# --- random scripts --------------------------------------------------------------------------------------------------

scripts = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.lists(st.integers(0, 12), max_size=3)),
        st.tuples(st.just("turn"), st.integers(1, 3)),
        st.tuples(st.just("port"), st.booleans()),
        st.tuples(st.just("refuse sends"), st.integers(1, 2)),
        st.tuples(st.just("refuse request"), st.just(0)),
        st.tuples(st.just("bad request"), st.just(0)),
        st.tuples(st.just("call"), st.sampled_from(["echo", "boom", "unsendable", "no_such"])),
    ),
    max_size=40,
)


@given(scripts, st.sampled_from([1, 4, 16_384]))
def test_each_live_request_gets_exactly_its_tokens_in_order(script: list[tuple[str, Any]], most: int) -> None:
    with patch.object(outgoing, "_MAX_TOKENS", most):
        _check_script(script)


def _check_script(script: list[tuple[str, Any]]) -> None:
    core = Core()
    handle = calls = 0
    expected: dict[int, list[Any]] = {}
    aborted: set[int] = set()
    for name, value in script:
        if name == "add":
            expected[handle] = [*range(handle * 10, handle * 10 + value), "stop"]
            core.add(handle, expected[handle][:-1])
            handle += 1
        elif name == "abort":
            core.abort(*value)
            aborted.update(number for number in value if number < handle)
        elif name == "turn":
            for _ in range(value):
                core.abort()  # wakes it; aborts nothing
                core.loop.turn()
        elif name == "port":
            core.port.open = value
        elif name == "refuse sends":
            core.port.refuse_sends = value
        elif name == "refuse request":
            core.abort()
            core.loop.turn()  # what was added before is in
            core.engine.refuse = InvalidRequestError("no")
            core.add(handle)
            core.loop.turn()
            core.engine.refuse = None
            expected[handle] = ["error"]
            handle += 1
        elif name == "bad request":
            core.send(BadRequest(handle, "bad"))
            expected[handle] = ["error"]
            handle += 1
        else:
            core.call(calls, value)
            calls += 1
    core.port.open = True
    core.settle()
    sent = core.sent()  # which checks that numbers have no gap, and that nothing follows an end
    for number, tokens in expected.items():
        got = sent.get(number, [])
        assert got == (tokens[: len(got)] if number in aborted else tokens)
    assert set(sent) <= set(expected)
    assert [answer.call_id for answer in core.answers()] == list(range(calls))
    assert len(core.loop._batch) == 0
    assert all(stats.running <= handle for stats in core.stats())
