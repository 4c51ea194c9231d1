"""Who came and who was turned away, from what ZeroMQ tells, which leaves out whose a success was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboard.transport.tally import Tally

LIMIT = 10.0


def test_a_peer_comes_and_goes() -> None:
    tally = Tally(LIMIT)
    tally.accepted(5, 0.0)
    tally.succeeded(0.0)
    assert (tally.came, tally.gone, tally.refused(0.0)) == (1, False, 0)
    tally.ended(5, 1.0)
    assert (tally.came, tally.gone, tally.refused(1.0)) == (1, True, 0)


@pytest.mark.parametrize("told", [True, False], ids=["a failed handshake", "no handshake"])
def test_a_stranger_is_turned_away(told: bool) -> None:
    tally = Tally(LIMIT)
    tally.accepted(5, 0.0)
    assert tally.refused(0.0) == 0
    if told:
        tally.failed(wrong_key=True)
    tally.ended(5, 0.1)
    assert (tally.came, tally.gone, tally.refused(0.1), tally.wrong_key) == (0, False, 1, int(told))


def test_a_descriptor_is_used_again() -> None:
    tally = Tally(LIMIT)
    for count in range(1, 4):
        tally.accepted(5, 0.0)
        tally.ended(5, 0.0)
        assert tally.refused(0.0) == count
    tally.accepted(5, 0.0)
    tally.succeeded(0.0)
    tally.ended(5, 0.0)
    assert (tally.gone, tally.refused(0.0)) == (True, 3)


def test_one_of_two_succeeds_and_one_of_two_ends() -> None:
    tally = Tally(LIMIT)
    tally.accepted(5, 0.0)
    tally.accepted(6, 0.0)
    tally.succeeded(0.1)
    tally.ended(5, 0.2)  # the peer, or a request of HTTP
    assert (tally.gone, tally.refused(0.2)) == (False, 0)
    assert (tally.gone, tally.refused(LIMIT + 1)) == (False, 1)  # what is open for so long is the peer
    tally.ended(6, LIMIT + 2)
    assert tally.gone


def test_it_is_clear_at_once_where_the_other_fails() -> None:
    tally = Tally(LIMIT)
    tally.accepted(5, 0.0)
    tally.accepted(6, 0.0)
    tally.succeeded(0.1)
    tally.failed(wrong_key=False)
    tally.ended(6, 0.2)
    assert (tally.gone, tally.refused(0.2)) == (False, 1)
    tally.ended(5, 0.3)
    assert (tally.gone, tally.refused(0.3)) == (True, 1)


Connection = tuple[str, float, float, float]  # what it is, when it comes, how long until it is clear what, and ends
connections = st.lists(
    st.tuples(
        st.sampled_from(["peer", "told", "untold"]),
        st.floats(0, 20),
        st.floats(0, LIMIT),
        st.one_of(st.floats(0, 50), st.just(1e9)),
    ),
    max_size=12,
)


@given(connections)
def test_it_never_counts_too_many_and_in_the_end_all(connections: list[Connection]) -> None:
    events: list[tuple[float, int, str]] = []
    for fd, (kind, start, clear, end) in enumerate(connections):
        events.append((start, fd, "accepted"))
        if kind == "peer":
            events.append((start + clear, fd, "succeeded"))
            events.append((start + clear + end, fd, "ended"))
        else:
            events.append((start + clear, fd, kind))
    tally = Tally(LIMIT)
    refused, ended_peers = 0, 0
    order = {"accepted": 0, "succeeded": 1, "told": 1, "untold": 1, "ended": 2}
    for now, fd, event in sorted(events, key=lambda one: (one[0], order[one[2]])):
        if now > 1e6:
            break
        if event == "accepted":
            tally.accepted(fd, now)
        elif event == "succeeded":
            tally.succeeded(now)
        else:
            if event == "told":
                tally.failed(wrong_key=False)
            refused += event != "ended"
            ended_peers += event == "ended"
            tally.ended(fd, now)
        assert tally.refused(now) <= refused
        assert not tally.gone or ended_peers
    assert tally.refused(1e6) == refused
    assert tally.gone == (ended_peers > 0)
