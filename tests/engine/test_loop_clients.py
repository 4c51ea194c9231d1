"""The busy loop and several clients; see loop_driver.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_driver import EPOCH, RANK, Asleep, Core, Peer

from outboard import EngineCore, EngineCoreRequest, OutputBatch
from outboard.engine import outgoing
from outboard.engine.events import ClientLeft, Stop
from outboard.engine.loop import BusyLoop
from outboard.protocol.messages import ErrorReport, SchedulerStats, UtilityOutput
from outboard.protocol.progress import ProgressPage


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def other(core: Core) -> Peer:
    """A second client, with another epoch and slot 1."""
    return core.join()


def everything(core: Core) -> list[str]:
    """What the engine was asked to do, steps left out."""
    return [event for event in core.engine.events if event != "step"]


# --- whose is what ---------------------------------------------------------------------------------------------------


def test_each_client_gets_its_own(core: Core, other: Peer) -> None:
    core.add(0, [1, 2, 3])
    other.add(0, [4, 5])
    core.add(1, [6])
    other.add(7, [8, 9, 10, 11])
    core.settle()
    assert core.sent() == {0: [1, 2, 3, "stop"], 1: [6, "stop"]}
    assert other.sent() == {0: [4, 5, "stop"], 7: [8, 9, 10, 11, "stop"]}


def test_one_step_is_one_message_each_with_plain_columns(core: Core, other: Peer) -> None:
    for handle in range(3):
        core.add(handle, [handle, 50])
        other.add(handle, [10 + handle, 60])
    core.loop.turn()
    for peer, tokens in ((core, [0, 1, 2]), (other, [10, 11, 12])):
        [message] = peer.port.messages
        assert (message.handles, message.tokens, message.counts) == ([0, 1, 2], tokens, None)
        assert message.sequence == 0


def test_a_client_without_news_gets_no_message(core: Core, other: Peer) -> None:
    core.engine.stats = SchedulerStats()
    core.add(0, [1, 2, 3])
    core.settle()
    assert len(core.port.messages) == 3
    assert other.port.messages == []
    other.add(0, [1])
    core.settle()
    assert [message.sequence for message in other.port.messages] == [0]


def test_equal_handles_and_names_are_two_requests(core: Core, other: Peer) -> None:
    core.add(5, [1, 2, 3], request_id="same")
    other.add(5, [7, 8, 9], request_id="same")
    core.loop.turn()
    assert len(core.engine.requests) == 2
    core.abort(5)
    core.settle()
    assert core.sent() == {5: [1]}
    assert other.sent() == {5: [7, 8, 9, "stop"]}


def test_an_abort_reaches_nobody_else_s_requests(core: Core, other: Peer) -> None:
    core.add(0)
    other.abort(0)
    core.settle()
    assert everything(core) == [("add", "r0")]
    assert core.sent() == {0: [1, 2, 3, "stop"]}


def test_refusals_reach_their_client(core: Core, other: Peer) -> None:
    core.engine.refuse = ValueError("no")
    other.add(0)
    core.settle()
    core.engine.refuse = None
    core.add(0, [1])
    core.settle()
    assert (core.errors(), other.errors()) == ({}, {0: "ValueError: no"})
    assert core.sent() == {0: [1, "stop"]}


def test_answers_go_to_the_caller(core: Core, other: Peer) -> None:
    core.call(0, "echo", "mine")
    other.call(0, "echo", "theirs")
    core.settle()
    assert core.answers() == [UtilityOutput(0, [["mine"], {}])]
    assert other.answers() == [UtilityOutput(0, [["theirs"], {}])]


def test_deferred_results_go_to_the_caller(core: Core, other: Peer) -> None:
    core.call(0, "later")
    other.call(0, "later")
    core.settle()
    core.engine.futures[1].set_result("theirs")
    core.engine.futures[0].set_result("mine")
    core.settle()
    assert core.answers() == [UtilityOutput(0, "mine")]
    assert other.answers() == [UtilityOutput(0, "theirs")]


def test_the_load_goes_to_all(core: Core, other: Peer) -> None:
    core.call(0, "set_stats", 5)
    core.settle()
    assert core.stats() == other.stats() == [SchedulerStats(waiting=5)]


def test_the_load_goes_to_a_client_that_comes_later(core: Core) -> None:
    core.call(0, "set_stats", 5)
    core.settle()
    late = core.join()
    core.settle()
    assert late.stats() == [SchedulerStats(waiting=5)]
    assert core.stats() == [SchedulerStats(waiting=5)]


def test_a_load_that_the_engine_changes_in_place_is_told(core: Core, other: Peer) -> None:
    core.engine.stats = SchedulerStats(waiting=1)
    core.abort(77)
    core.settle()
    core.engine.stats.waiting = 2
    other.abort(77)
    core.settle()
    assert core.stats() == other.stats() == [SchedulerStats(waiting=1), SchedulerStats(waiting=2)]


def test_a_result_that_cannot_be_sent_disturbs_no_other_client(core: Core, other: Peer) -> None:
    core.add(0, [1, 2, 3, 4])
    other.add(0, [5, 6, 7, 8])
    core.loop.turn()
    mine = next(iter(core.engine.requests))

    def result(outputs: OutputBatch) -> None:
        core.engine.on_step = None
        outputs.add(mine, result=object())

    core.engine.on_step = result
    core.settle()
    assert core.sent()[0][-1] == "error"
    assert other.sent() == {0: [5, 6, 7, 8, "stop"]}


# --- a port that refuses ---------------------------------------------------------------------------------------------


def test_a_client_that_takes_nothing_delays_no_other(core: Core, other: Peer) -> None:
    core.port.open = False
    core.add(0, [1, 2, 3])
    other.add(0, [4, 5, 6])
    for number in range(3):
        core.loop.turn()
        assert len(other.port.messages) == number + 1
    assert other.sent() == {0: [4, 5, 6, "stop"]}
    assert core.port.messages == []
    core.port.open = True
    core.loop.turn()
    assert core.sent() == {0: [1, 2, 3, "stop"]}
    assert len([message for message in core.port.messages if message.handles]) == 1


def test_the_shortest_wait_counts(core: Core, other: Peer) -> None:
    """One client that has been slow for long must not make the loop slow for one that has just become it."""
    core.port.open = False
    core.add(0, [1])
    for _ in range(12):
        core.loop.turn()
    assert core.inbox.waits[-1] == 0.020
    other.port.open = False
    other.add(0, [1])
    core.loop.turn()
    core.loop.turn()
    core.loop.turn()
    assert core.inbox.waits[-1] <= 0.004


def test_answers_leave_past_a_client_that_takes_nothing(core: Core, other: Peer) -> None:
    core.port.open = False
    core.call(0, "echo")
    other.call(0, "echo")
    core.loop.turn()
    assert len(other.answers()) == 1


# --- coming and going ------------------------------------------------------------------------------------------------


def test_with_no_client_the_loop_waits(core: Core) -> None:
    core.add(0, list(range(50)))
    core.loop.turn()
    core.leave()
    core.settle()
    with pytest.raises(Asleep):
        core.loop.turn()
    assert core.inbox.waits == []
    again = core.join()
    again.add(0, [1])
    core.settle()
    assert again.sent() == {0: [1, "stop"]}


def test_a_loop_that_never_had_a_client_waits() -> None:
    inbox = Core().inbox
    engine = Core().engine
    with pytest.raises(Asleep):
        BusyLoop(engine, inbox, ProgressPage(shared=False)).turn()


def test_the_requests_of_a_client_that_leaves_are_aborted(core: Core, other: Peer) -> None:
    for handle in range(3):
        core.add(handle, [1, 2, 3, 4])
        other.add(handle, [5, 6, 7, 8])
    core.loop.turn()
    core.leave()
    core.settle()
    assert core.sent() == {handle: [1] for handle in range(3)}
    assert other.sent() == {handle: [5, 6, 7, 8, "stop"] for handle in range(3)}
    assert core.engine.events.count(("abort", 3)) == 1
    assert not core.engine.requests
    assert core.port.lingers == [0]
    assert other.port.lingers == []


def test_a_client_that_leaves_with_a_blocked_port_leaves_nothing_to_wait_for(core: Core) -> None:
    core.port.open = False
    core.add(0, [1])
    core.call(0, "echo")
    for _ in range(3):
        core.loop.turn()
    core.inbox.waits.clear()
    core.leave()
    core.settle()
    assert core.inbox.waits == []


def test_what_a_client_that_has_left_sends_is_nothing(core: Core, other: Peer) -> None:
    core.leave()
    core.add(0)
    core.call(0, "echo")
    core.abort(0)
    core.settle()
    assert core.engine.events == []
    assert core.port.messages == []


def test_leaving_twice_or_without_having_come_is_no_error(core: Core, other: Peer) -> None:
    core.leave()
    core.leave()
    core.inbox.put(ClientLeft(12345))
    other.add(0, [1])
    core.settle()
    assert other.sent() == {0: [1, "stop"]}
    assert core.port.lingers == [0]


def test_a_deferred_result_of_a_client_that_has_left_is_dropped(core: Core, other: Peer) -> None:
    core.call(0, "later")
    other.call(0, "later")
    core.settle()
    core.leave()
    core.settle()
    for future in core.engine.futures:
        future.set_result("late")
    core.settle()
    assert core.answers() == []
    assert other.answers() == [UtilityOutput(0, "late")]


def test_a_client_that_comes_again_starts_anew(core: Core) -> None:
    """The same client index with another epoch: nothing of the old one may reach the new port."""
    core.port.open = False
    core.add(0, [1, 2, 3, 4])
    core.call(0, "later")
    core.call(1, "echo")
    core.loop.turn()
    core.leave()
    again = core.join(epoch=EPOCH + 1, slot=0)
    again.add(0, [7, 8])
    core.loop.turn()
    core.engine.futures[0].set_result("late")
    core.settle()
    assert again.sent() == {0: [7, 8, "stop"]}  # which checks that sequence numbers start at 0
    assert again.answers() == []
    assert core.port.messages == []


# --- controls --------------------------------------------------------------------------------------------------------


def test_held_requests_of_two_clients_with_equal_handles(core: Core, other: Peer) -> None:
    core.call(0, "pause_generation", "keep")
    core.add(0, [1, 2])
    other.add(0, [3, 4])
    core.settle()
    assert core.engine.events == []
    other.call(0, "resume_generation")
    core.settle()
    assert core.sent() == {0: [1, 2, "stop"]}
    assert other.sent() == {0: [3, 4, "stop"]}


def test_an_abort_takes_back_the_held_request_of_its_own_client(core: Core, other: Peer) -> None:
    core.call(0, "pause_generation", "keep")
    core.add(0, [1, 2])
    other.add(0, [3, 4])
    other.abort(0)
    core.call(1, "resume_generation")
    core.settle()
    assert everything(core) == [("add", "r0")]
    assert core.sent() == {0: [1, 2, "stop"]}
    assert other.sent() == {}


def test_held_requests_of_a_client_that_leaves_are_forgotten(core: Core, other: Peer) -> None:
    core.call(0, "pause_generation", "wait")
    core.add(0, [1, 2])
    other.add(0, [3, 4])
    core.leave()
    other.call(0, "resume_generation")
    core.settle()
    assert everything(core) == [("add", "r0")]
    assert other.sent() == {0: [3, 4, "stop"]}


def test_waiting_for_all_to_end_includes_those_of_a_client_that_leaves(core: Core, other: Peer) -> None:
    core.add(0, list(range(100)))
    core.loop.turn()
    other.call(0, "pause_generation", "wait")
    core.loop.turn()
    assert other.answers() == []
    core.leave()
    core.settle()
    assert other.answers() == [UtilityOutput(0)]


def test_pausing_aborts_what_all_clients_asked_for(core: Core, other: Peer) -> None:
    core.add(0)
    other.add(0)
    core.loop.turn()
    other.call(0, "pause_generation", "abort")
    core.settle()
    assert core.sent() == other.sent() == {0: [1, "abort"]}


# --- the end ---------------------------------------------------------------------------------------------------------


def test_stop_aborts_for_all(core: Core, other: Peer) -> None:
    core.add(0)
    other.add(0)
    core.loop.turn()
    other.port.refuse_sends = 1
    core.inbox.put(Stop())
    core.loop.run()
    assert core.sent() == other.sent() == {0: [1, "abort"]}
    assert not core.engine.requests


def test_death_is_told_to_all(core: Core, other: Peer) -> None:
    blocked = core.join(epoch=3, slot=2)
    blocked.port.open = False
    core.settle()
    report = ErrorReport("ValueError", "boom", "trace")
    core.loop.report_death(report)
    for peer in (core, other):
        [dead] = peer.port.dead
        assert (dead.engine_index, dead.epoch, dead.report) == (RANK, peer.epoch, report)
    assert blocked.port.dead == []


def test_close_closes_every_port(core: Core, other: Peer) -> None:
    core.settle()
    core.loop.close(1000)
    assert core.port.lingers == other.port.lingers == [1000]


# --- random interleavings --------------------------------------------------------------------------------------------


class Chunks(EngineCore):
    """Echoes prompts, two requests a step or more, by `extend` and `add` by turns."""

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}
        self.seen: set[str] = set()
        self.steps = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        assert request.request_id not in self.seen
        self.seen.add(request.request_id)
        self.requests[request.request_id] = list(request.prompt_token_ids)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self, outputs: OutputBatch) -> None:
        self.steps += 1
        ids = list(self.requests)[:: 1 + self.steps % 2] if len(self.requests) > 2 else list(self.requests)
        if self.steps % 5 == 4:
            for request_id in ids:
                outputs.add(request_id, [self.requests[request_id].pop(0)])
        else:
            outputs.extend(ids, [self.requests[request_id].pop(0) for request_id in ids])
        for request_id in [request_id for request_id, tokens in self.requests.items() if not tokens]:
            del self.requests[request_id]
            outputs.add(request_id, finish_reason="stop")


peers = st.integers(0, 3)
scripts = st.lists(
    st.one_of(
        st.tuples(st.just("add"), peers, st.integers(1, 6)),
        st.tuples(st.just("abort"), peers, st.integers(0, 5)),
        st.tuples(st.just("turn"), st.just(0), st.integers(1, 3)),
        st.tuples(st.just("port"), peers, st.booleans()),
        st.tuples(st.just("rejoin"), peers, st.just(0)),
        st.tuples(st.just("call"), peers, st.just(0)),
    ),
    max_size=60,
)


@given(scripts, st.sampled_from([1, 4, 16_384]))
def test_each_client_gets_exactly_its_tokens_in_order(script: list[tuple[str, int, Any]], most: int) -> None:
    with patch.object(outgoing, "_MAX_TOKENS", most):
        _check_script(script)


def _check_script(script: list[tuple[str, int, Any]]) -> None:
    core = Core()
    engine = Chunks()
    core.loop = BusyLoop(engine, core.inbox, ProgressPage(shared=False), rank=RANK)
    all_peers = [core.join(epoch, epoch) for epoch in range(4)]
    living = list(all_peers)
    expected: dict[int, list[list[Any]]] = {peer.epoch: [] for peer in all_peers}  # by handle
    aborted: set[tuple[int, int]] = set()
    calls = dict.fromkeys(expected, 0)
    token = 0
    for name, number, value in script:
        peer = living[number]
        mine = expected[peer.epoch]
        if name == "add":
            mine.append([*range(token, token + value), "stop"])
            peer.add(len(mine) - 1, mine[-1][:-1])
            token += value
        elif name == "abort":
            peer.abort(value)
            if value < len(mine):
                aborted.add((peer.epoch, value))
        elif name == "turn":
            for _ in range(value):
                peer.abort()  # wakes it; aborts nothing
                core.loop.turn()
        elif name == "port":
            peer.port.open = value
        elif name == "call":
            peer.call(calls[peer.epoch], "is_paused")
            calls[peer.epoch] += 1
        else:
            peer.leave()
            living[number] = core.join(len(all_peers), number)
            all_peers.append(living[number])
            expected[living[number].epoch] = []
            calls[living[number].epoch] = 0
    for peer in living:
        peer.port.open = True
    core.settle()
    assert not engine.requests
    for peer in all_peers:
        sent = peer.sent()  # which checks that numbers have no gap, and that nothing follows an end
        for handle, tokens in enumerate(expected[peer.epoch]):
            got = sent.pop(handle, [])
            cut_short = peer not in living or (peer.epoch, handle) in aborted
            assert got == (tokens[: len(got)] if cut_short else tokens)
        assert not sent
        answers = [answer.call_id for answer in peer.answers()]
        assert answers == list(range(len(answers) if peer not in living else calls[peer.epoch]))
        assert peer.port.lingers == ([] if peer in living else [0])
