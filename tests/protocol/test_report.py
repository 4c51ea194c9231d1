"""The report page: what was written comes back, and nothing that may be found there breaks a reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outboard.launch import warden_output
from outboard.protocol import report as layout
from outboard.protocol.messages import ErrorReport
from outboard.protocol.report import ReportPage


@pytest.fixture
def page() -> Iterator[ReportPage]:
    page = ReportPage.create()
    yield page
    page.close()


def write_tail(page: ReportPage, data: bytes, length: int | None = None) -> None:
    length = len(data) if length is None else length
    os.pwrite(page.fd, length.to_bytes(8, "little", signed=True) + data, layout.TAIL_OFFSET)


def test_the_warden_has_the_same_layout() -> None:
    for name in ("NUMBER", "TAIL_OFFSET", "TAIL_SIZE"):
        assert getattr(warden_output, name) == getattr(layout, name)


def test_a_new_page_is_empty(page: ReportPage) -> None:
    assert page.read_report() is None
    assert page.read_stderr_tail() == ""
    assert page.read_engine_pid() is None
    assert page.read_exit_code() is None


def test_a_report_comes_back_through_another_descriptor(page: ReportPage) -> None:
    report = ErrorReport("m.E", "text \u20ac", "Traceback\n")
    other = ReportPage.from_fd(os.dup(page.fd))
    assert not os.get_inheritable(other.fd)
    other.write_report(ErrorReport("m.First", "x" * 5000, ""))
    other.write_report(report)
    other.close()
    assert page.read_report() == report


def test_a_long_traceback_loses_its_middle(page: ReportPage) -> None:
    page.write_report(ErrorReport("m.E", "\u20ac" * 20_000, "first" + "\u20ac" * 100_000 + "last"))
    report = page.read_report()
    assert report is not None
    assert report.traceback.startswith("first\u20ac")
    assert report.traceback.endswith("\u20aclast")
    assert "left out" in report.traceback
    assert 50_000 < len(report.traceback.encode()) < layout.REPORT_SIZE
    assert len(report.message.encode()) <= layout.MAX_MESSAGE


def test_lone_surrogates_are_no_obstacle(page: ReportPage) -> None:
    page.write_report(ErrorReport("m.E", "no such file: \udcff", ""))
    assert page.read_report() == ErrorReport("m.E", "no such file: \\udcff", "")


@pytest.mark.parametrize("length", [-1, 3, 65_536, 65_537, 1 << 62])
def test_a_length_that_cannot_be(page: ReportPage, length: int) -> None:
    page.write_report(ErrorReport("m.E", "x", "y"))
    os.pwrite(page.fd, length.to_bytes(8, "little", signed=True), layout.REPORT_OFFSET)
    write_tail(page, b"abc", length if length != 3 else -5)
    assert page.read_report() is None
    assert isinstance(page.read_stderr_tail(), str)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(garbage=st.binary(max_size=200))
def test_garbage_is_tolerated(page: ReportPage, garbage: bytes) -> None:
    length = len(garbage).to_bytes(8, "little")
    # An array of three strings, so that some of it gets far enough to be a report of invalid UTF-8.
    os.pwrite(page.fd, length + (b"\x93\xa2" + garbage)[: len(garbage)], layout.REPORT_OFFSET)
    write_tail(page, garbage)
    assert page.read_report() is None or isinstance(page.read_report(), ErrorReport)
    assert isinstance(page.read_stderr_tail(50), str)


def test_the_tail_starts_at_a_line(page: ReportPage) -> None:
    write_tail(page, b"first\nsecond\nthird\n")
    assert page.read_stderr_tail() == "first\nsecond\nthird\n"
    assert page.read_stderr_tail(15) == "second\nthird\n"
    assert page.read_stderr_tail(8) == "third\n"
    assert page.read_stderr_tail(4) == "ird\n"


def test_a_full_tail_has_lost_the_start_of_its_first_line(page: ReportPage) -> None:
    write_tail(page, b"cut\n" + b"x" * (layout.TAIL_SIZE - 4))
    assert page.read_stderr_tail(1 << 20) == "x" * (layout.TAIL_SIZE - 4)


def test_undecodable_stderr(page: ReportPage) -> None:
    write_tail(page, b"\xff\xfe\n")
    assert page.read_stderr_tail() == "\ufffd\ufffd\n"


def test_close(page: ReportPage) -> None:
    page.write_report(ErrorReport("m.E", "x", "y"))
    page.close()
    page.close()
    assert page.fd == -1
    assert page.read_report() is None
    assert page.read_stderr_tail() == ""
    assert page.read_exit_code() is None


def test_the_size_is_fixed_and_not_inherited(page: ReportPage) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(page.fd, 0)
    assert not os.get_inheritable(page.fd)


def test_what_is_no_report_page_is_refused(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with pytest.raises(ValueError, match="not a report page"):
        ReportPage.from_fd(reader)
    os.close(reader)
    os.close(writer)
    with pytest.raises(OSError):
        ReportPage.from_fd(reader)
