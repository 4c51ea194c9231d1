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
        notifications.follow(progress(state, old, new))
    return notifications


def test_all_that_is_expected() -> None:
    notifications = committing()
    assert notifications.missing == [0, 1, 2]
    for kind, rank in UP:
        notifications.take(kind, rank)
    assert notifications.missing == []
    assert notifications.judge() is None


def test_on_the_way_down_those_that_leave_say_so() -> None:
    notifications = committing(3, 1)
    notifications.take("RECONFIGURE_FINISHED", 0)
    notifications.take("SHUTDOWN_COMPLETE", 2)
    assert notifications.missing == [1]


def test_one_that_comes_before_its_explanation() -> None:
    notifications = Notifications()
    notifications.take("RECONFIGURE_FINISHED", 0)
    notifications.follow(progress(ScaleState.COMMITTING))
    assert notifications.missing == [1, 2]
    assert notifications.judge() is None


def test_one_that_nothing_explains_names_its_rank() -> None:
    notifications = committing(3, 1)
    notifications.take("RECONFIGURE_FINISHED", 2)
    error = notifications.judge()
    assert isinstance(error, NotificationError)
    assert (error.rank, str(error)) == (
        2,
        "rank 2 sent RECONFIGURE_FINISHED, which belongs to no change of size under way",
    )
    assert notifications.judge() is None


def test_one_that_comes_twice() -> None:
    notifications = committing()
    notifications.take("RECONFIGURE_FINISHED", 1)
    with pytest.raises(NotificationError, match="rank 1 sent RECONFIGURE_FINISHED twice") as caught:
        notifications.take("RECONFIGURE_FINISHED", 1)
    assert caught.value.rank == 1


def test_an_unknown_one() -> None:
    with pytest.raises(NotificationError, match=r"rank 2 .* unknown type 'WHATEVER'"):
        committing().take("WHATEVER", 2)


def test_while_it_is_taken_back_anything_may_come() -> None:
    notifications = committing()
    notifications.take("RECONFIGURE_FINISHED", 0)
    notifications.follow(progress(ScaleState.ROLLING_BACK))
    notifications.take("RECONFIGURE_FINISHED", 0)
    notifications.follow(progress(ScaleState.ROLLED_BACK))
    assert notifications.missing == []
    for state in (ScaleState.PREPARING, ScaleState.READY, ScaleState.COMMITTING):
        notifications.follow(progress(state))
    assert notifications.missing == [0, 1, 2]


def test_the_next_change_expects_its_own() -> None:
    notifications = committing()
    for kind, rank in UP:
        notifications.take(kind, rank)
    notifications.follow(progress(ScaleState.DONE))
    for state in (ScaleState.PREPARING, ScaleState.READY, ScaleState.COMMITTING):
        notifications.follow(progress(state, 3, 1))
    assert notifications.missing == [0, 1, 2]


def test_a_client_of_one_rank_expects_nothing_of_others() -> None:
    notifications = Notifications(only_rank=1)
    notifications.follow(progress(ScaleState.COMMITTING))
    assert notifications.missing == [1]
