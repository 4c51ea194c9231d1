"""The parts of the wave protocol, one at a time."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from outboard.dp.client_waves import ClientWaves
from outboard.dp.rank_waves import Next, RankWaves
from outboard.dp.wave_coordinator import WaveCoordinator
from outboard.dp.waves import (
    FirstRequest,
    Phase,
    RankReport,
    SetControl,
    StartWave,
    Vote,
    WaveState,
    combine,
    is_paused,
    make_control,
)
from outboard.errors import ProtocolError


def report(
    rank: int, wave: int = 0, phase: Phase = Phase.IDLE, *, group: int = 0, first: int = 0, control: int = 0
) -> RankReport:
    return RankReport(group, first, 2, rank, wave, phase, control)


def answered(rank: RankWaves) -> RankWaves:
    """A coordinator has told it that there is no pause."""
    assert rank.set_control(SetControl(rank.group, 0), False) == rank.report()
    return rank


def test_messages_survive_the_wire() -> None:
    messages = [
        report(1, 3, Phase.OPENING, control=make_control(2**29, 2**29, True)),
        StartWave(1, 2),
        SetControl(1, 2),
        FirstRequest(1, 2),
        WaveState(1, 2, True, False),
    ]
    for message in messages:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
    assert make_control(2**30 - 1, 2**30 - 1, True) < 2**63


def test_later_coordinators_have_greater_controls() -> None:
    controls = [
        make_control(0, 1, True),
        make_control(0, 2, False),
        make_control(1, 1, False),
        make_control(1, 2, True),
    ]
    assert controls == sorted(set(controls))
    assert [is_paused(control) for control in controls] == [True, False, False, True]
    assert not is_paused(0) and controls[0] > 0


def test_a_reduction_is_the_maximum() -> None:
    assert combine([Vote(False, 3), Vote(True, 0)]) == Vote(True, 3)
    assert combine([Vote(False, 0)]) == Vote(False, 0)


def test_a_wave_of_one_rank() -> None:
    rank = answered(RankWaves(1, 2, group=4, sync_interval=2))
    assert rank.next is Next.REST
    assert rank.update(False) is None
    assert rank.update(True) == report(1, 0, Phase.OPENING, group=4)
    assert rank.update(True) is None
    assert rank.next is Next.REDUCE  # before any step
    assert rank.reduced(Vote(True, 0), True) is None
    for _ in range(2):
        assert rank.next is Next.STEP
        rank.stepped()
    assert rank.next is Next.REDUCE
    assert rank.steps == 2
    assert rank.reduced(Vote(False, 0), False) == report(1, 1, group=4)
    assert rank.next is Next.REST


def test_a_rank_that_others_woke_takes_dummy_steps() -> None:
    rank = RankWaves(0, 2, sync_interval=1)
    assert rank.start(StartWave(0, 0)) == report(0, 0, Phase.OPENING)
    assert rank.vote(False) == Vote(False, 0)
    assert rank.reduced(Vote(True, 0), False) is None
    assert rank.next is Next.STEP


def test_work_that_came_too_late_for_the_last_vote_opens_the_next_wave() -> None:
    rank = answered(RankWaves(0, 2))
    rank.update(True)
    assert rank.reduced(Vote(False, 0), True) == report(0, 1, Phase.OPENING)


def test_a_start_of_the_next_wave_is_kept_until_this_one_is_over() -> None:
    rank = answered(RankWaves(0, 2))
    rank.update(True)
    assert rank.start(StartWave(0, 1)) is None
    assert rank.reduced(Vote(False, 0), False) == report(0, 1, Phase.OPENING)


@pytest.mark.parametrize(("wave", "awake"), [(1, False), (2, True)])
def test_a_start_of_a_wave_that_cannot_be_is_an_error(wave: int, awake: bool) -> None:
    rank = answered(RankWaves(0, 2))
    rank.update(awake)
    with pytest.raises(ProtocolError, match=f"is to start wave {wave}"):
        rank.start(StartWave(0, wave))


def test_messages_of_another_group_are_void() -> None:
    rank = RankWaves(0, 2, group=1)
    assert rank.start(StartWave(0, 0)) is None
    assert rank.set_control(SetControl(0, 7), True) is None
    assert (rank.phase, rank.control) == (Phase.IDLE, 0)
    coordinator = WaveCoordinator()
    coordinator.report(report(0, 0, Phase.OPENING, group=1))
    assert coordinator.report(report(1, 5, group=0)) == []
    assert coordinator.first_request(FirstRequest(0, 0)) == []


def test_work_wakes_a_rank_once_a_coordinator_has_said_whether_there_is_a_pause() -> None:
    rank = RankWaves(0, 1)
    assert rank.update(True) is None
    assert rank.next is Next.REST
    assert rank.set_control(SetControl(1, 0), True) is None  # of another group
    assert rank.set_control(SetControl(0, 0), True) == RankReport(0, 0, 1, 0, 0, Phase.OPENING, 0)
    told = RankWaves(0, 1)
    assert told.start(StartWave(0, 0)) == RankReport(0, 0, 1, 0, 0, Phase.OPENING, 0)


def test_a_paused_rank_wakes_only_when_told() -> None:
    pause, resume = make_control(0, 1, True), make_control(0, 2, False)
    rank = RankWaves(0, 2)
    assert rank.set_control(SetControl(0, pause), True) == report(0, control=pause)
    assert rank.update(True) is None
    assert rank.start(StartWave(0, 0)) == report(0, 0, Phase.OPENING, control=pause)
    assert rank.reduced(Vote(True, pause), True) == report(0, 1, control=pause)
    assert rank.set_control(SetControl(0, resume), True) == report(0, 1, Phase.OPENING, control=resume)


def test_a_pause_that_only_another_rank_knows_stops_this_one_too() -> None:
    pause = make_control(0, 1, True)
    rank = answered(RankWaves(0, 2))
    rank.update(True)
    assert rank.reduced(Vote(True, pause), True) == report(0, 1, control=pause)


def test_a_sync_interval_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="sync_interval"):
        RankWaves(0, 2, sync_interval=0)


# --- coordinator ---


def known(coordinator: WaveCoordinator) -> WaveCoordinator:
    for rank in range(2):
        assert coordinator.report(report(rank)) == [(rank, SetControl(0, 0))]
        assert coordinator.report(report(rank)) == []  # once
    return coordinator


def test_a_rank_that_woke_wakes_the_others_once() -> None:
    coordinator = known(WaveCoordinator())
    assert coordinator.report(report(0, 0, Phase.OPENING)) == [(1, StartWave(0, 0))]
    assert coordinator.report(report(0, 0, Phase.OPENING)) == []
    assert coordinator.state == WaveState(0, 0, True, False)
    assert coordinator.report(report(1, 0, Phase.OPENING)) == []
    assert coordinator.report(report(1, 1)) == []
    assert coordinator.state == WaveState(0, 1, False, False)


def test_a_notice_wakes_all_and_is_not_taken_for_a_rank_awake() -> None:
    coordinator = known(WaveCoordinator())
    assert coordinator.first_request(FirstRequest(0, 0)) == [(0, StartWave(0, 0)), (1, StartWave(0, 0))]
    assert coordinator.first_request(FirstRequest(0, 0)) == []
    assert coordinator.state == WaveState(0, 0, False, False)


@pytest.mark.parametrize("notice", [FirstRequest(0, 1), FirstRequest(1, 0), FirstRequest(-1, 0)])
def test_notices_of_other_waves_and_groups_are_void(notice: FirstRequest) -> None:
    assert known(WaveCoordinator()).first_request(notice) == []


def test_a_rank_that_connects_late_is_woken_then() -> None:
    coordinator = WaveCoordinator()
    assert coordinator.report(report(0)) == [(0, SetControl(0, 0))]
    assert coordinator.report(report(0, 0, Phase.OPENING)) == []
    assert coordinator.report(report(1)) == [(1, SetControl(0, 0)), (1, StartWave(0, 0))]


def test_a_new_coordinator_says_nothing_to_front_ends_until_all_ranks_have_reported() -> None:
    coordinator = WaveCoordinator(1)
    assert coordinator.state is None
    coordinator.report(report(0, 3))
    assert coordinator.state is None
    coordinator.report(report(1, 3, Phase.OPENING))
    assert coordinator.state == WaveState(0, 3, True, False)


def test_a_new_coordinator_wakes_whoever_rests_until_it_has_heard_of_all() -> None:
    """The other rank may wait in an opening reduction, deaf, and have told the old coordinator only."""
    coordinator = WaveCoordinator(1)
    assert coordinator.report(report(0, 3)) == [(0, SetControl(0, 0)), (0, StartWave(0, 3))]
    assert coordinator.report(report(0, 3, Phase.OPENING)) == []
    assert coordinator.report(report(0, 4)) == [(0, StartWave(0, 4))]
    assert coordinator.report(report(1, 4, Phase.OPENING)) == [(1, SetControl(0, 0))]
    assert coordinator.report(report(0, 5)) == []


def test_a_group_launched_under_a_coordinator_is_left_to_rest_by_it() -> None:
    coordinator = WaveCoordinator(1)
    assert coordinator.report(report(0, first=1)) == [(0, SetControl(0, 0))]
    assert coordinator.report(report(1, first=1)) == [(1, SetControl(0, 0))]


def test_a_pause_is_complete_when_every_rank_rests_and_has_said_that_it_knows() -> None:
    coordinator = known(WaveCoordinator())
    pause = make_control(0, 1, True)
    assert coordinator.pause() == [(0, SetControl(0, pause)), (1, SetControl(0, pause))]
    assert not coordinator.pause_complete
    coordinator.report(report(0, control=pause))
    assert not coordinator.pause_complete
    coordinator.report(report(1, control=pause))
    assert coordinator.pause_complete
    assert coordinator.state == WaveState(0, 0, False, True)
    assert coordinator.first_request(FirstRequest(0, 0)) == []
    assert coordinator.resume() == [(rank, SetControl(0, make_control(0, 2, False))) for rank in range(2)]
    assert not coordinator.pause_complete


def test_a_rank_that_waits_is_joined_in_a_pause_too() -> None:
    coordinator = known(WaveCoordinator())
    coordinator.pause()
    assert (1, StartWave(0, 0)) in coordinator.report(report(0, 0, Phase.OPENING))


def test_a_pause_outlives_the_group_and_the_coordinator() -> None:
    coordinator = known(WaveCoordinator())
    coordinator.pause()
    pause = make_control(0, 1, True)
    assert coordinator.report(report(0, group=1)) == [(0, SetControl(1, pause))]
    after = WaveCoordinator(1)
    after.report(report(0, 3, Phase.OPENING, control=0))
    assert (0, SetControl(0, pause)) in after.report(report(1, 3, Phase.OPENING, control=pause))
    assert after.paused


# --- front end ---


def state(wave: int, running: bool = False, *, group: int = 0, paused: bool = False) -> WaveState:
    return WaveState(group, wave, running, paused)


def test_a_front_end_that_knows_nothing_gives_no_notice() -> None:
    waves = ClientWaves()
    assert waves.request_sent(0.0) is None
    assert waves.next_due == inf


def test_the_first_request_to_a_resting_group_is_noticed_once_and_again() -> None:
    waves = ClientWaves(repeat_after=0.5)
    waves.published((0, 1), state(3))
    assert waves.request_sent(1.0) == FirstRequest(0, 3)
    assert waves.request_sent(1.1) is None
    assert waves.next_due == 1.5
    assert waves.due(1.4) is None
    assert waves.due(1.6) == FirstRequest(0, 3)
    assert waves.next_due == 2.1


@pytest.mark.parametrize(
    "news", [state(3, True), state(4), state(0, group=1), state(3, paused=True)], ids=["seen", "over", "group", "pause"]
)
def test_a_notice_ends(news: WaveState) -> None:
    waves = ClientWaves()
    waves.published((0, 1), state(3))
    waves.request_sent(0.0)
    waves.published((0, 2), news)
    assert waves.next_due == inf


@pytest.mark.parametrize("version", [(0, 1), (0, 0)], ids=["repeated", "late"])
def test_a_late_or_repeated_publication_is_void(version: tuple[int, int]) -> None:
    waves = ClientWaves()
    waves.published((0, 1), state(3))
    waves.request_sent(0.0)
    waves.published(version, state(3, True))
    assert not waves.engines_running
    assert waves.next_due < inf


def test_a_publication_that_does_not_show_the_wave_yet_leaves_the_notice() -> None:
    waves = ClientWaves()
    waves.published((0, 1), state(3))
    waves.request_sent(0.0)
    waves.published((1, 1), state(3))
    assert waves.next_due < inf


def test_no_notice_to_a_group_that_runs_or_is_paused() -> None:
    waves = ClientWaves()
    waves.published((0, 1), state(3, True))
    assert waves.request_sent(0.0) is None
    waves.published((0, 2), state(3, paused=True))
    assert waves.request_sent(0.0) is None
    waves.published((0, 3), state(2, group=-1))
    assert (waves.group, waves.current_wave) == (0, 3)
