"""Limits over API processes: here two rows of one page."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from outboard.serve.errors import to_api_error
from outboard.serve.limits import Admission, LimitError, LimitsPage


@pytest.fixture
def pages() -> Iterator[tuple[LimitsPage, LimitsPage]]:
    """One page, as two processes map it."""
    page, fd = LimitsPage.create(2, 2)
    yield page, LimitsPage(fd, 2, 2)
    os.close(fd)


def _refused(admission: Admission, key: int | None) -> str:
    with pytest.raises(LimitError) as caught:
        admission.admit(key)
    told = to_api_error(caught.value)
    assert (told.status, told.type, told.retry_after) == (429, "rate_limit_error", 1)
    assert caught.value.retryable
    assert told.code is not None
    return told.code


def test_waiting_requests_are_counted_over_all_processes(pages: tuple[LimitsPage, LimitsPage]) -> None:
    first, second = (Admission(page, row, 2, None) for row, page in enumerate(pages))
    ticket = first.admit(None)
    other = second.admit(None)
    assert pages[0].waiting == pages[1].waiting == 2
    assert _refused(first, None) == _refused(second, None) == "too_many_waiting"
    assert pages[0].waiting == 2  # a refusal leaves nothing
    ticket.started()
    ticket.started()
    assert pages[1].waiting == 1
    second.admit(None)
    other.end()
    ticket.end()
    assert pages[0].waiting == 1


def test_a_key_has_so_many_in_flight_until_they_end(pages: tuple[LimitsPage, LimitsPage]) -> None:
    first, second = (Admission(page, row, 100, 2) for row, page in enumerate(pages))
    tickets = [first.admit(1), second.admit(1)]
    for ticket in tickets:
        ticket.started()  # not waiting any more, but in flight
    assert _refused(first, 1) == _refused(second, 1) == "too_many_for_key"
    assert pages[0].waiting == 0  # the refusal took its place among the waiting back
    second.admit(0).end()  # another key is not concerned
    tickets[0].end()
    tickets[0].end()
    second.admit(1)
    assert _refused(first, 1) == "too_many_for_key"


def test_no_limit_of_a_key(pages: tuple[LimitsPage, LimitsPage]) -> None:
    admission = Admission(pages[0], 0, 100, None)
    tickets = [admission.admit(0) for _ in range(50)]
    for ticket in tickets:
        ticket.end()
    assert not pages[0].counts.any()


def test_what_a_dead_process_counted_is_over(pages: tuple[LimitsPage, LimitsPage]) -> None:
    first, second = (Admission(page, row, 1, 1) for row, page in enumerate(pages))
    first.admit(0)
    assert _refused(second, 1) == "too_many_waiting"
    pages[1].clear(0)
    second.admit(0)


def test_an_end_without_a_first_token_ends_the_waiting(pages: tuple[LimitsPage, LimitsPage]) -> None:
    admission = Admission(pages[0], 0, 1, 1)
    for _ in range(3):
        admission.admit(0).end()
    assert not pages[0].counts.any()
