"""Notifications of a change of size: expected, early, missing, and those that make no sense."""

from __future__ import annotations

import pytest

from outboard import NotificationError, ScaleProgress, ScaleState
from outboard.client.notifications import Notifications

UP = [("RECONFIGURE_FINISHED", rank) for rank in range(3)]


def progress(state: ScaleState, old: int = 1, new: int = 3) -> ScaleProgress:
    return ScaleProgress(0, 1, old, new, state)


def committing(old: int = 1, new: int = 3) -> Notifications:
    notifications = Notifications()
    for state in (ScaleState.PREPARING, ScaleState.READY, ScaleState.COMMITTING):
        notifications.follow(progress(state, old, new), 0.0)
    return notifications


def test_all_that_is_expected() -> None:
    notifications = committing()
    assert notifications.missing(0, 1) == [0, 1, 2]
    for kind, rank in UP:
        notifications.take(kind, rank, 0.0)
    assert notifications.missing(0, 1) == []
    assert notifications.judge() is None


def test_on_the_way_down_those_that_leave_say_so() -> None:
    notifications = committing(3, 1)
    notifications.take("RECONFIGURE_FINISHED", 0, 0.0)
    notifications.take("SHUTDOWN_COMPLETE", 2, 0.0)
    assert notifications.missing(0, 1) == [1]


def test_one_that_comes_before_its_explanation() -> None:
    notifications = Notifications()
    notifications.take("RECONFIGURE_FINISHED", 0, 0.0)
    notifications.follow(progress(ScaleState.COMMITTING), 0.0)
    assert notifications.missing(0, 1) == [1, 2]
    assert notifications.judge() is None


def test_one_that_nothing_explains_names_its_rank() -> None:
    notifications = committing(3, 1)
    notifications.take("RECONFIGURE_FINISHED", 2, 0.0)
    error = notifications.judge()
    assert isinstance(error, NotificationError)
    assert (error.rank, str(error)) == (
        2,
        "rank 2 sent RECONFIGURE_FINISHED, which belongs to no change of size under way",
    )
    assert notifications.judge() is None


def test_one_that_comes_twice() -> None:
    notifications = committing()
    notifications.take("RECONFIGURE_FINISHED", 1, 1.0)
    notifications.take("RECONFIGURE_FINISHED", 1, 2.0)
    assert notifications.unexplained
    assert notifications.judge(1.5) is None  # its explanation may come yet
    error = notifications.judge(2.0)
    assert (error.rank, str(error)) == (1, "rank 1 sent RECONFIGURE_FINISHED twice")  # type: ignore[union-attr]
    assert not notifications.unexplained


def test_an_unknown_one() -> None:
    with pytest.raises(NotificationError, match=r"rank 2 .* unknown type 'WHATEVER'"):
        committing().take("WHATEVER", 2, 0.0)


def test_while_it_is_taken_back_anything_may_come() -> None:
    notifications = committing()
    notifications.take("RECONFIGURE_FINISHED", 0, 0.0)
    notifications.take("RECONFIGURE_FINISHED", 0, 0.0)  # of the old size; faster than the news
    notifications.follow(progress(ScaleState.ROLLING_BACK), 0.0)
    assert not notifications.unexplained
    notifications.take("RECONFIGURE_FINISHED", 0, 0.0)
    notifications.follow(progress(ScaleState.ROLLED_BACK), 0.0)
    assert notifications.missing(0, 1) == []
    for state in (ScaleState.PREPARING, ScaleState.READY, ScaleState.COMMITTING):
        notifications.follow(progress(state), 0.0)
    assert notifications.missing(0, 1) == [1, 2]  # what rank 0 said may have been meant for this one


def test_the_next_change_expects_its_own() -> None:
    notifications = committing()
    for kind, rank in UP:
        notifications.take(kind, rank, 0.0)
    notifications.follow(progress(ScaleState.DONE), 0.0)
    for state in (ScaleState.PREPARING, ScaleState.READY, ScaleState.COMMITTING):
        notifications.follow(progress(state, 3, 1), 0.0)
    assert notifications.missing(0, 1) == [0, 1, 2]


def test_a_client_of_one_rank_expects_nothing_of_others() -> None:
    notifications = Notifications(lambda rank: rank == 1)
    notifications.follow(progress(ScaleState.COMMITTING), 0.0)
    assert notifications.missing(0, 1) == [1]


def test_a_rank_that_died_is_not_waited_for_and_may_have_said_it() -> None:
    notifications = committing()
    notifications.excuse(2)
    assert notifications.missing(0, 1) == [0, 1]
    notifications.take("RECONFIGURE_FINISHED", 2, 0.0)
    assert not notifications.unexplained


def test_each_belongs_to_the_oldest_change_that_wants_it() -> None:
    notifications = committing(3, 2)
    notifications.follow(progress(ScaleState.DONE, 3, 2), 0.0)
    notifications.follow(ScaleProgress(4, 9, 2, 1, ScaleState.COMMITTING), 0.1)
    for kind, rank in [*UP[:2], ("SHUTDOWN_COMPLETE", 2)]:
        notifications.take(kind, rank, 0.2)
    assert (notifications.missing(0, 1), notifications.missing(4, 9)) == ([], [0, 1])
    notifications.take("RECONFIGURE_FINISHED", 0, 0.3)
    notifications.take("SHUTDOWN_COMPLETE", 1, 0.3)
    assert (notifications.missing(4, 9), notifications.unexplained) == ([], False)


def test_a_change_that_is_long_over_explains_nothing() -> None:
    notifications = Notifications(apart=5.0)
    for at, state in enumerate((ScaleState.COMMITTING, ScaleState.ROLLING_BACK, ScaleState.ROLLED_BACK)):
        notifications.follow(progress(state), float(at))
    notifications.take("RECONFIGURE_FINISHED", 1, 6.0)
    assert not notifications.unexplained
    notifications.follow(progress(ScaleState.PREPARING), 7.1)
    notifications.take("RECONFIGURE_FINISHED", 1, 7.2)
    assert notifications.unexplained


def test_one_of_the_next_change_is_not_lost_to_the_one_that_was_taken_back() -> None:
    notifications = committing()
    notifications.follow(progress(ScaleState.ROLLED_BACK), 1.0)
    for kind, rank in UP:  # before the news of the next
        notifications.take(kind, rank, 2.0)
    notifications.follow(ScaleProgress(4, 9, 1, 3, ScaleState.COMMITTING), 3.0)
    assert notifications.missing(4, 9) == []
    notifications.follow(ScaleProgress(4, 9, 1, 3, ScaleState.DONE), 9.0)
    for kind, rank in UP:  # or those were late ones, and these are meant
        notifications.take(kind, rank, 9.0)
    assert not notifications.unexplained


def test_what_makes_no_sense_is_not_kept_without_end() -> None:
    notifications = Notifications()
    for _ in range(1024):
        notifications.take("SHUTDOWN_COMPLETE", 5, 0.0)
    with pytest.raises(NotificationError, match="rank 5 sent SHUTDOWN_COMPLETE"):
        notifications.take("SHUTDOWN_COMPLETE", 5, 0.0)


def test_a_front_end_that_came_in_the_middle_takes_what_comes() -> None:
    notifications = Notifications()
    notifications.follow(progress(ScaleState.DONE), 0.0)
    for kind, rank in UP:
        notifications.take(kind, rank, 0.0)
    assert not notifications.unexplained
