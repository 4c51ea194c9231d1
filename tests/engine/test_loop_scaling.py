"""The busy loop's part in changes of the number of ranks, without processes."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from loop_driver import RANK, Asleep, Core, Peer

from outboard.engine.events import Stop
from outboard.protocol.messages import (
    EEP_NOTIFICATION_CALL_ID,
    RECONFIGURE_FINISHED,
    SHUTDOWN_COMPLETE,
    LeaveRank,
)
from outboard.protocol.scaling import (
    Drained,
    DrainRank,
    Quiesce,
    Quiet,
    Reconfigure,
    Reconfigured,
    ResumeRank,
)


@pytest.fixture
def core() -> Core:
    return Core()


def say_leave(peer: Peer) -> None:
    peer.send(LeaveRank(peer.epoch))


def notifications(peer: Peer) -> list[list[object]]:
    return [answer.result for answer in peer.answers() if answer.call_id == EEP_NOTIFICATION_CALL_ID]


DRAINED = Drained("secret", RANK, 7)


def test_it_is_drained_once_it_is_told_and_all_have_said_leave_in_whatever_order(core: Core) -> None:
    other = core.join()
    say_leave(core)
    core.inbox.put(DrainRank(7))
    core.settle()
    assert core.told == []
    say_leave(other)
    core.settle()
    assert core.told == [DRAINED]
    say_leave(other)
    core.settle()
    assert core.told == [DRAINED], "once"


def test_a_client_that_is_gone_is_not_waited_for(core: Core) -> None:
    other = core.join()
    core.inbox.put(DrainRank(7))
    say_leave(core)
    other.leave()
    core.settle()
    assert core.told == [DRAINED]


def test_one_that_comes_meanwhile_is_waited_for(core: Core) -> None:
    core.inbox.put(DrainRank(7))
    other = core.join()
    say_leave(core)
    core.settle()
    assert core.told == []
    say_leave(other)
    core.settle()
    assert core.told == [DRAINED]


def test_nobody_is_there(core: Core) -> None:
    core.leave()
    core.inbox.put(DrainRank(7))
    core.settle()
    assert core.told == [DRAINED]


@pytest.mark.parametrize("behind", [False, True], ids=["before LEAVE", "behind LEAVE"])
def test_requests_are_served_to_their_end_before_it_is_drained(core: Core, behind: bool) -> None:
    core.inbox.put(DrainRank(7))
    if behind:
        say_leave(core)
        core.add(0, [5, 6, 7])
    else:
        core.add(0, [5, 6, 7])
        say_leave(core)
    core.engine.on_step = lambda outputs: core.engine.events.append(len(core.told))
    core.settle()
    assert 1 not in core.engine.events, "drained before a step"
    assert core.sent() == {0: [5, 6, 7, "stop"]}
    assert core.told == [DRAINED]


def test_held_requests_are_waited_for(core: Core) -> None:
    core.call(0, "pause_generation")
    core.add(0)
    core.inbox.put(DrainRank(7))
    say_leave(core)
    core.settle()
    assert core.told == []
    core.call(1, "resume_generation")
    core.settle()
    assert core.sent() == {0: [1, 2, 3, "stop"]}
    assert core.told == [DRAINED]


@pytest.mark.parametrize("gone", [False, True], ids=["answered", "its client is gone"])
def test_calls_that_are_answered_later_are_waited_for(core: Core, gone: bool) -> None:
    other = core.join()
    other.call(0, "later")
    core.inbox.put(DrainRank(7))
    for peer in (core, other):
        say_leave(peer)
    core.settle()
    assert core.told == []
    future: Future[int] = core.engine.futures[0]
    if gone:
        other.leave()
    else:
        future.set_result(5)
    core.settle()
    assert core.told == [DRAINED]


def test_outputs_that_have_not_left_are_waited_for(core: Core) -> None:
    core.port.open = False
    core.add(0)
    core.inbox.put(DrainRank(7))
    say_leave(core)
    for _ in range(20):
        core.loop.turn()
    assert core.told == []
    core.port.open = True
    core.settle()
    assert core.sent() == {0: [1, 2, 3, "stop"]}
    assert core.told == [DRAINED]


def end(core: Core) -> None:
    for _ in range(10):
        try:
            core.loop.turn()
        except Asleep:
            break


def test_a_rank_that_leaves_tells_all_clients_as_its_last_word_once(core: Core) -> None:
    other = core.join()
    core.add(0)
    core.inbox.put(DrainRank(7))
    for peer in (core, other):
        say_leave(peer)
    core.settle()
    for _ in range(2):  # a second SIGTERM
        core.inbox.put(Stop())
    end(core)
    for peer in (core, other):
        assert notifications(peer) == [[SHUTDOWN_COMPLETE, RANK]]
        last = peer.port.messages[-1]
        assert last.utility_output is not None and last.utility_output.result == [SHUTDOWN_COMPLETE, RANK]


def test_any_other_rank_that_is_stopped_says_nothing(core: Core) -> None:
    core.inbox.put(Stop())
    end(core)
    assert core.port.messages[1:] == []
    assert notifications(core) == []


def test_ranks_that_do_not_step_together_only_say_that_they_have_heard(core: Core) -> None:
    other = core.join()
    core.add(0, [1] * 30)
    core.inbox.put(Quiesce(1))
    core.inbox.put(Reconfigure(2, 4))
    core.inbox.put(ResumeRank(3))
    core.loop.turn()
    core.loop.turn()
    assert core.told == [Quiet("secret", RANK, 1), Reconfigured("secret", RANK, 2)]
    core.settle()
    assert core.sent() == {0: [1] * 30 + ["stop"]}
    for peer in (core, other):
        assert notifications(peer) == [[RECONFIGURE_FINISHED, RANK]]


@pytest.mark.parametrize("message", [DrainRank(1), Quiesce(1), Reconfigure(2, 4), ResumeRank(3)], ids=type)
def test_a_rank_that_is_stopping_takes_them_too(core: Core, message: object) -> None:
    core.inbox.put(Stop())
    core.inbox.put(message)
    core.loop.run()
