"""Limits over all API processes: counts in a page of memory that they share."""

from __future__ import annotations

import mmap
import os

import numpy as np

from outboard.errors import OutboardError

__all__ = ["Admission", "LimitError", "LimitsPage"]

_COUNTS = 1  # those before the counts of keys
_WAITING = 0


class LimitError(OutboardError):
    """A limit of the server's is reached; the same request may succeed later.

    Attributes:
        code: of the error body: "too_many_waiting" or "too_many_for_key".
    """

    retryable = True

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class LimitsPage:
    """A row of counts for each API process. Each process writes its own row alone, so there is no lock.

    Args:
        fd: of the page's memory; it is not closed here.
        rows: API processes.
        keys: API keys.
    """

    def __init__(self, fd: int, rows: int, keys: int) -> None:
        size = self.size(rows, keys)
        self._memory = mmap.mmap(fd, size)
        self.counts = np.frombuffer(self._memory, np.int64).reshape(rows, _COUNTS + keys)

    @staticmethod
    def size(rows: int, keys: int) -> int:
        """Bytes that a page takes."""
        return rows * (_COUNTS + keys) * 8

    @classmethod
    def create(cls, rows: int, keys: int) -> tuple[LimitsPage, int]:
        """A new page, and the descriptor of its memory."""
        fd = os.memfd_create("outboard-limits", os.MFD_CLOEXEC)
        os.ftruncate(fd, cls.size(rows, keys))
        return cls(fd, rows, keys), fd

    def clear(self, row: int) -> None:
        """This API process is gone: what it counted is over."""
        self.counts[row] = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for their first token, over all API processes."""
        return int(self.counts[:, _WAITING].sum())


class Admission:
    """Counts the requests of one API process, and refuses those over a limit. Belongs to its loop.

    Args:
        page: shared by all.
        row: this process's.
        max_waiting, max_concurrent_per_key: as in `ServeConfig`.
    """

    # A request is counted first and taken back if that was too much: two processes that do so at once may both refuse,
    # but never both admit beyond the limit.

    def __init__(self, page: LimitsPage, row: int, max_waiting: int, max_concurrent_per_key: int | None) -> None:
        self._counts = page.counts
        self._own = page.counts[row]
        self._max_waiting = max_waiting
        self._max_per_key = max_concurrent_per_key

    def admit(self, key: int | None) -> Ticket:
        """Lets a request in, or raises `LimitError`.

        Args:
            key: index of the API key that it showed.
        """
        if not self._enter(_WAITING, self._max_waiting):
            raise LimitError(
                f"{self._max_waiting} requests wait already, and no more may: try again later", "too_many_waiting"
            )
        column = None
        if key is not None:
            column = _COUNTS + key
            if not self._enter(column, self._max_per_key):
                self._own[_WAITING] -= 1
                raise LimitError(
                    f"this API key has {self._max_per_key} requests in flight already, and may have no more: try again "
                    "when one has ended",
                    "too_many_for_key",
                )
        return Ticket(self._own, column)

    def _enter(self, column: int, limit: int | None) -> bool:
        self._own[column] += 1
        if limit is None or self._counts[:, column].sum() <= limit:
            return True
        self._own[column] -= 1
        return False


class Ticket:
    """One admitted request."""

    __slots__ = ("_column", "_row", "_waits")

    def __init__(self, row: np.ndarray[tuple[int], np.dtype[np.int64]], column: int | None) -> None:
        self._row = row
        self._column = column
        self._waits = True

    def started(self) -> None:
        """It has its first token: it waits no more. Idempotent."""
        if self._waits:
            self._waits = False
            self._row[_WAITING] -= 1

    def end(self) -> None:
        """It has ended. Idempotent."""
        self.started()
        if self._column is not None:
            self._row[self._column] -= 1
            self._column = None
