"""Tests that would disturb each other, or share what is slow to start, run in one process of several."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("groups")
def test_the_marks_of_groups_take_effect(request: pytest.FixtureRequest) -> None:
    """pytest-xdist puts a group's name behind the ids of its tests, or else it does not know of the group."""
    grouping = request.config.getoption("loadgroup", False)
    assert request.node.nodeid.endswith("@groups") == grouping
