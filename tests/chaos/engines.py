"""The engine that the chaos runs against: `FaultyEngine`, and what else can be done to one while it runs."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outboard import OutputBatch, utility
from outboard.testing import FaultyEngine
from outboard.testing.faults import HangKind, Way, die, hang
from outboard.testing.faulty import Phase

__all__ = ["ChaosEngine", "no_memory"]


def no_memory(fd: int, offset: int, size: int) -> None:
    """In place of `os.posix_fallocate`, where a file system is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class ChaosEngine(FaultyEngine):
    """Does what its utilities tell it to.

    Args:
        script: a file with a list of [what, how] in JSON; each start takes the first entry and does it: ["die", way] or
            ["sleep", seconds].
        late: how many steps behind its last token a request ends.
        others: as `FaultyEngine` has them.
    """

    def __init__(
        self,
        script: str = "",
        late: int = 0,
        die_in: Phase = "never",
        way: Way = "exception",
        hang_in: Phase = "never",
        hang_seconds: float = 3600.0,
        slow_start: float = 0.0,
        step_ms: float = 0.0,
        tokens_per_step: int = 1,
        max_num_seqs: int = 4096,
    ) -> None:
        _follow(script)
        super().__init__(
            die_in,
            way,
            hang_in,
            hang_seconds=hang_seconds,
            slow_start=slow_start,
            step_ms=step_ms,
            tokens_per_step=tokens_per_step,
            max_num_seqs=max_num_seqs,
        )
        self._late = late
        self._steps_taken = 0
        self._to_end: dict[str, int] = {}  # the step in which a request ends
        self._death: Way | None = None
        self._hang: tuple[HangKind, float] | None = None
        self._arrays = (0, 0)
        self._sent: dict[str, int] = {}  # arrays so far, by request

    def step(self, outputs: OutputBatch) -> None:
        if self._hang is not None:
            (kind, seconds), self._hang = self._hang, None
            hang(kind, seconds)
        if self._death is not None:
            die(self._death)
        (count, size), self._arrays = self._arrays, (0, 0)
        for request_id in outputs.open_requests if count else ():
            for _ in range(count):
                serial = self._sent.get(request_id, 0)
                self._sent[request_id] = serial + 1
                outputs.add(request_id, result=numbered(serial, size))
        self._steps_taken += 1
        for request_id, step in list(self._to_end.items()):
            if step <= self._steps_taken:
                del self._to_end[request_id]
                outputs.add(request_id, finish_reason="length")
        if super().has_work():
            super().step(_LateEnds(outputs, self._end_later) if self._late else outputs)  # type: ignore[arg-type]
        else:
            time.sleep(0.001)

    def has_work(self) -> bool:
        return bool(self._to_end) or super().has_work()

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._to_end.pop(request_id, None)
        super().abort_requests(request_ids)

    def _end_later(self, request_id: str) -> None:
        self._to_end[request_id] = self._steps_taken + self._late

    @utility
    def die_next(self, way: Way) -> None:
        """Dies in the next step."""
        self._death = way

    @utility
    def hang_next(self, kind: HangKind, seconds: float) -> None:
        """Hangs in the next step."""
        self._hang = (kind, seconds)

    @utility
    def send_arrays(self, count: int, size: int) -> None:
        """In the next step every request gets `count` arrays of `size` bytes, numbered."""
        self._arrays = (count, size)

    @utility
    def mirror(self, value: Any) -> Any:
        """Returns what it is given."""
        return value

    @utility
    def boom(self) -> None:
        """Raises."""
        raise LookupError("no such thing")

    @utility
    def lose_memory(self) -> None:
        """There is no more shared memory from now on."""
        os.posix_fallocate = no_memory


class _LateEnds:
    """An `OutputBatch` in which the end of a request does not come with its last token."""

    def __init__(self, outputs: OutputBatch, end_later: Callable[[str], None]) -> None:
        self._outputs = outputs
        self._end_later = end_later

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outputs, name)

    def add(self, request_id: str, token_ids: Sequence[int] = (), finish_reason: Any = None, **fields: Any) -> None:
        if finish_reason == "length":
            self._end_later(request_id)
            finish_reason = None
        self._outputs.add(request_id, token_ids, finish_reason, **fields)


def numbered(serial: int, size: int) -> np.ndarray[Any, Any]:
    """An array of about `size` bytes that can be told from all others."""
    return np.arange(serial, serial + max(1, size // 8), dtype=np.int64)


def _follow(script: str) -> None:
    path = Path(script)
    if not script or not path.exists():
        return
    (what, how), *left = json.loads(path.read_text()) or [["sleep", 0.0]]
    path.write_text(json.dumps(left))
    if what == "die":
        die(how)
    hang("sleep", how)
