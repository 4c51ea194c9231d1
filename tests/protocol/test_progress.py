"""The progress page, as its writer and its readers see it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from outboard.protocol.progress import BUSY, FROZEN, IDLE, MAX_SLOTS, Progress, ProgressPage, ProgressReader


@pytest.fixture
def page() -> ProgressPage:
    return ProgressPage()


@pytest.fixture
def reader(page: ProgressPage) -> Iterator[ProgressReader]:
    """One with slot 3."""
    reader = ProgressReader(os.getpid(), page.fd, 3)
    yield reader
    reader.close()


def test_a_new_page(reader: ProgressReader) -> None:
    progress = reader.read()
    assert (progress.steps, progress.activity, progress.taken) == (0, IDLE, 0)
    assert 0 <= time.monotonic_ns() - progress.time < 10e9


def test_each_sign_of_life_has_its_time(page: ProgressPage, reader: ProgressReader) -> None:
    last = reader.read().time
    for give in (page.alive, page.sign, page.stepped, lambda: page.took(0)):
        give()
        now = reader.read().time
        assert last < now <= time.monotonic_ns()
        last = now


@pytest.mark.parametrize("activity", [IDLE, BUSY, FROZEN])
def test_activity(page: ProgressPage, reader: ProgressReader, activity: int) -> None:
    page.alive(activity)
    assert reader.read().activity == activity
    page.sign()
    page.stepped()
    page.took(3)
    assert reader.read().activity == activity
    page.alive()
    assert reader.read().activity == BUSY


def test_steps_and_their_time(page: ProgressPage, reader: ProgressReader) -> None:
    for number in range(1, 4):
        now = page.stepped()
        assert reader.read().steps == number
        assert now == pytest.approx(reader.read().time / 1e9, abs=1e-6)


def test_each_slot_counts_for_itself(page: ProgressPage, reader: ProgressReader) -> None:
    for slot in (0, 2, 3, 3, 4, MAX_SLOTS - 1):
        page.took(slot)
    assert reader.read().taken == 2
    page.clear(2)
    assert reader.read().taken == 2
    page.clear(3)
    assert reader.read().taken == 0
    assert reader.read().steps == 0


def test_a_reader_never_sees_busy_with_the_time_of_before(page: ProgressPage) -> None:
    """The writer may come at any moment of a look: an engine core that wakes up must not look as if it hung."""

    class Numbers:
        """The page's numbers, to which something is written before one of the accesses to them."""

        def __init__(self, numbers: Any, when: int) -> None:
            self.numbers, self.left = numbers, when

        def __getitem__(self, index: int) -> int:
            if self.left == 0:
                page.alive(BUSY)
            self.left -= 1
            return int(self.numbers[index])

    for when in range(5):
        page._numbers[2] = 1  # it has been idle for ages
        page._numbers[3] = IDLE
        reader = ProgressReader(os.getpid(), page.fd, 0)
        numbers, reader._numbers = reader._numbers, Numbers(reader._numbers, when)  # type: ignore[assignment]
        progress = reader.read()
        assert progress.activity == IDLE or progress.time > 1
        reader._numbers = numbers
        reader.close()


def test_the_writer_s_order(page: ProgressPage) -> None:
    """Time before activity, for the same reason."""
    order: list[int] = []

    class Numbers:
        def __setitem__(self, index: int, value: int) -> None:
            order.append(index)

    page._numbers = Numbers()  # type: ignore[assignment]
    page.alive(BUSY)
    assert order == [2, 3]


WRITER = """
from outboard.protocol.progress import ProgressPage
page = ProgressPage()
page.stepped()
page.took(3)
print(page.fd, flush=True)
input()
"""


def test_a_page_of_another_process_outlives_it() -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        reader = ProgressReader(process.pid, int(process.stdout.readline()), 3)
        process.kill()
    progress = reader.read()
    assert (progress.steps, progress.taken) == (1, 1)
    assert isinstance(progress, Progress)
    reader.close()
    reader.close()


def test_what_is_no_page() -> None:
    with pytest.raises(FileNotFoundError):
        ProgressReader(os.getpid(), 123456, 0)
    fd = os.memfd_create("other")
    try:
        for size in (0, 4096, 8192):
            os.ftruncate(fd, size)
            with pytest.raises(ValueError, match="not a progress page"):
                ProgressReader(os.getpid(), fd, 0)
    finally:
        os.close(fd)


def test_a_page_that_is_not_shared() -> None:
    page = ProgressPage(shared=False)
    assert page.fd == -1
    page.alive()
    page.stepped()
    page.took(MAX_SLOTS - 1)


def test_a_page_that_nobody_writes_to_is_gone() -> None:
    fd = ProgressPage().fd
    with pytest.raises(OSError):
        os.fstat(fd)
