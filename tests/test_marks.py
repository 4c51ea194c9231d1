"""The marks by which tests are grouped and not measured take effect, which pytest-xdist and pytest-cov do not tell."""

from __future__ import annotations

import sys

import pytest


@pytest.mark.xdist_group("marks")
def test_tests_of_a_group_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist puts a group's name behind the ids of its tests, or else it does not know of the group."""
    grouping = request.config.getoption("loadgroup", False)
    assert request.node.nodeid.endswith("@marks") == grouping


@pytest.mark.no_cover
def test_without_coverage_nothing_is_traced() -> None:
    assert sys.gettrace() is None
