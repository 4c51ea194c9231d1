"""Token ids on their way to int32."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from outboard.protocol.token_ids import pack_token_ids


@pytest.mark.parametrize("ids", [[], [1], [0, -(1 << 31), (1 << 31) - 1], list(range(1000)), [True, False]])
@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_they_stay_what_they_are(ids: list[int], kind: Any) -> None:
    packed = pack_token_ids(kind(ids) if kind is not np.array else np.array(ids, np.int64))
    assert packed.typecode == "i"
    assert packed.tolist() == [int(token) for token in ids]


def test_an_array_is_not_copied() -> None:
    ids = array("i", [1, 2])
    assert pack_token_ids(ids) is ids
    assert pack_token_ids(array("q", [1, 2])) == ids
    assert pack_token_ids(range(1, 3)) == ids


@pytest.mark.parametrize("ids", [[1 << 31], [-(1 << 31) - 1], [1, 1 << 70]])
def test_what_does_not_fit(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack_token_ids(ids)


@pytest.mark.parametrize("ids", [["1"], [1.0], [None], [[1]], None, 7])
def test_what_is_no_token(ids: Any) -> None:
    with pytest.raises(TypeError):
        pack_token_ids(ids)
