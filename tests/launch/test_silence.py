"""How long a peer counts as silent."""

from __future__ import annotations

from outboard.launch.nodes.silence import Silence


def test_a_peer_that_says_nothing_is_lost_after_the_patience() -> None:
    silence = Silence(10.0, 1.0, 100.0)
    assert not any(silence.listened(now) for now in range(101, 110))
    assert silence.seconds == 9.0
    assert silence.listened(110.0)


def test_whatever_is_heard_begins_it_anew() -> None:
    silence = Silence(10.0, 1.0, 100.0)
    for now in range(101, 200):
        if now % 9 == 0:
            silence.heard()
        assert not silence.listened(now)


def test_time_in_which_nobody_listened_does_not_count() -> None:
    silence = Silence(10.0, 1.0, 100.0)
    assert not silence.listened(104.0)  # of four seconds two may have been spent asleep
    assert silence.seconds == 2.0
    assert not silence.listened(10_000.0)  # stopped for hours
    assert not any(silence.listened(10_000.0 + step) for step in range(1, 6))
    assert silence.listened(10_006.0)
