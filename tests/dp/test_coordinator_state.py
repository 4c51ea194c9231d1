"""What a coordinator publishes of the ranks' load, and when."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboard.dp.coordinator_state import LoadBoard, LoadReport, Publication
from outboard.dp.waves import WaveState


def board(*ranks: int, **options: float) -> LoadBoard:
    made = LoadBoard(3, **options)
    made.set_members(1, dict.fromkeys(ranks, 0))
    made.publish(0.0)
    return made


def load(
    rank: int, sequence: int, waiting: int = 0, running: int = 0, kv: float = 0.0, incarnation: int = 0
) -> LoadReport:
    return LoadReport(rank, incarnation, sequence, waiting, running, kv)


def test_a_publication_survives_the_wire() -> None:
    message = Publication(1, 2, 3, [LoadReport(0, 1, 2, 3, 4, 0.5, {0: 3, 2: 4})], WaveState(1, 2, True, False))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Publication) == message


def test_a_change_after_a_rest_is_published_at_once() -> None:
    loads = board(0, 1)
    assert loads.report(load(1, 1, 2, 3))
    assert loads.next_due <= 1.0
    assert loads.publish(1.0) == Publication(3, 2, 1, [load(1, 1, 2, 3)])


def test_while_there_are_changes_the_interval_is_kept() -> None:
    loads = board(0, busy_interval=100 / 1024)
    times = []
    for tick in range(1, 1001):  # of 1/1024 s, which floats add exactly
        loads.report(load(0, tick, running=tick))
        if loads.publish(tick / 1024) is not None:
            times.append(tick)
    assert times == list(range(100, 1001, 100))


def test_without_a_change_all_is_published_again_after_5_s() -> None:
    loads = board(0)
    loads.report(load(0, 1, running=1))
    loads.publish(1.0)
    assert loads.next_due == 6.0
    loads.report(load(0, 2, running=1, kv=0.001))
    assert loads.next_due == 6.0
    assert loads.publish(5.9) is None
    again = loads.publish(6.0)
    assert again is not None and again.loads == [load(0, 2, running=1, kv=0.001)]


def test_a_change_of_the_kv_cache_counts_from_one_percent_on() -> None:
    loads = board(0)
    loads.report(load(0, 1, kv=0.5))
    loads.publish(1.0)
    for sequence in range(2, 9):  # small ones add up
        loads.report(load(0, sequence, kv=0.5 + sequence * 0.001))
    assert loads.next_due == 6.0
    loads.report(load(0, 12, kv=0.5 + 0.011))
    assert loads.next_due == 1.1


def test_a_change_back_is_still_published_after_what_is_due() -> None:
    loads = board(0)
    loads.report(load(0, 1, running=1))
    loads.report(load(0, 2))
    published = loads.publish(0.1)
    assert published is not None and published.loads == [load(0, 2)]


@pytest.mark.parametrize("late", [load(0, 4, 9), load(0, 5, 9), load(0, 9, 9, incarnation=1), load(7, 1)])
def test_late_repeated_and_strange_reports_are_void(late: LoadReport) -> None:
    loads = board(0)
    assert loads.report(load(0, 5, 1))
    assert not loads.report(late)
    assert loads.loads == {0: load(0, 5, 1)}


def test_membership_changes() -> None:
    loads = board(0, 1)
    loads.report(load(0, 1, 1))
    loads.report(load(1, 1, 1))
    loads.publish(1.0)
    loads.set_members(2, {0: 1, 2: 0})  # 0 was started again, 1 left, 2 joined
    assert loads.publish(1.1) == Publication(3, 3, 2, [])
    assert not loads.report(load(0, 2))
    assert loads.report(load(0, 1, incarnation=1))
    assert loads.report(load(2, 1))
    loads.set_members(1, {0: 0, 1: 0})  # late
    assert loads.members == 2
    published = loads.publish(1.25)
    assert published is not None and [entry.rank for entry in published.loads] == [0, 2]


def test_the_same_membership_again_is_no_change() -> None:
    loads = board(0)
    loads.set_members(1, {0: 0})
    assert loads.next_due == 5.0


def test_a_wave_is_published_as_a_change() -> None:
    loads = board(0)
    wave = WaveState(0, 1, True, False)
    loads.set_wave(wave)
    assert loads.next_due == 0.1
    published = loads.publish(0.1)
    assert published is not None and published.wave == wave
    loads.set_wave(wave)
    assert loads.next_due == 5.1


def test_the_first_publication_is_due_at_once() -> None:
    assert LoadBoard().next_due == -inf
    assert LoadBoard().publish(-1e9) is not None


def test_intervals_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="busy_interval"):
        LoadBoard(busy_interval=1.0, idle_interval=0.5)


@given(st.lists(st.tuples(st.floats(0, 0.3), st.integers(0, 3), st.integers(0, 2))))
def test_front_ends_know_the_truth_in_100_ms_and_hear_no_more_often(changes: list[tuple[float, int, int]]) -> None:
    loads = board(0, 1, 2, 3)
    now, last, heard = 0.0, 0.0, {}
    for sequence, (pause, rank, waiting) in enumerate(changes):
        while loads.next_due <= now + pause:
            due = max(loads.next_due, now)
            published = loads.publish(due)
            assert published is not None
            assert due >= last + 0.1 - 1e-9
            last, heard = due, {entry.rank: entry.waiting for entry in published.loads}
        now += pause
        assert loads.report(load(rank, sequence, waiting))
        truth = {rank: entry.waiting for rank, entry in loads.loads.items()}
        assert heard == truth or loads.next_due <= last + 0.1 or loads.next_due <= now
