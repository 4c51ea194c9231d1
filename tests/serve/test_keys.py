"""API keys in an `Authorization` header."""

from __future__ import annotations

import pytest

from outboard.serve.keys import Keys


def test_without_keys_everybody_may() -> None:
    assert Keys([]).find(b"") is None
    assert Keys([]).find(b"Bearer whatever") is None


@pytest.mark.parametrize(
    ("header", "index"),
    [
        (b"Bearer one", 0),
        (b"bearer two", 1),
        (b"BEARER  two ", 1),
        (b"Bearer three", -1),
        (b"Bearer ", -1),
        (b"Bearer", -1),
        (b"Bearer one two", -1),
        (b"Bearer On\xc3\xa9\xff", -1),
        (b"Basic one", -1),
        (b"one", -1),
        (b"", -1),
    ],
)
def test_a_key_is_found_by_its_index(header: bytes, index: int) -> None:
    assert Keys(["one", "two"]).find(header) == index
