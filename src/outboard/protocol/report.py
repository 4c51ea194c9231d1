"""The report page: what an engine core leaves behind for whoever asks why it ended.

A memfd of fixed size that the front end makes and that outlives both of its writers:

    offset      written by    what
    0           warden        engine pid, 1 once it has ended, exit code
    4 KiB       engine core   length, its `ErrorReport` as msgpack
    128 KiB     warden        length, the last 64 KiB of its stderr

Numbers are 8 bytes, little-endian, signed. A writer may have been killed half-way, so readers take nothing for granted.
They use `pread`, not a mapping: a page that someone truncates then ends in a short read, not in SIGBUS.
`launch/warden.py` imports nothing of this package and has its own copy of the offsets; a test compares the two.
"""

from __future__ import annotations

import fcntl
import os
from typing import Self

import msgspec

from outboard.protocol.messages import ErrorReport

__all__ = ["ReportPage", "above_stdio"]

NUMBER = 8
REPORT_OFFSET = 4 << 10
REPORT_SIZE = 64 << 10
TAIL_OFFSET = 128 << 10
TAIL_SIZE = 64 << 10
PAGE_SIZE = 256 << 10

MAX_TYPE = 256
MAX_MESSAGE = 8 << 10
ENVELOPE = 64  # more than msgpack's headers around three strings take


class ReportPage:
    """One engine core's report page. Reading after `close` gives nothing; closing twice is no error."""

    def __init__(self, fd: int) -> None:
        self._fds = [fd]  # `pop` hands the descriptor to exactly one closer, with no lock

    @classmethod
    def create(cls) -> Self:
        """A new, empty page. Its descriptor is not inherited unless it is passed on purpose."""
        fd = above_stdio(os.memfd_create("outboard-report", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(fd, PAGE_SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(fd)

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        """The page behind an inherited descriptor, which now belongs to the page and is not inherited further.

        Raises:
            OSError: no such descriptor.
            ValueError: it is not a report page.
        """
        if os.fstat(fd).st_size != PAGE_SIZE:
            raise ValueError(f"descriptor {fd} is not a report page")
        os.set_inheritable(fd, False)
        return cls(fd)

    @property
    def fd(self) -> int:
        """The descriptor; -1 after `close`."""
        try:
            return self._fds[0]
        except IndexError:
            return -1

    def close(self) -> None:
        """Release the descriptor."""
        try:
            fd = self._fds.pop()
        except IndexError:
            return
        os.close(fd)

    # --- the engine core's part ---

    def write_report(self, report: ErrorReport) -> None:
        """Keep this report, in place of an earlier one. Too long a traceback loses its middle."""
        kind = _shortened(report.type, MAX_TYPE)
        message = _shortened(report.message, MAX_MESSAGE)
        room = REPORT_SIZE - ENVELOPE - len(kind.encode()) - len(message.encode())
        body = msgspec.msgpack.encode(ErrorReport(kind, message, _shortened(report.traceback, room)))
        # The length comes last: a report of which only a part was written does not exist.
        os.pwrite(self.fd, _number(0), REPORT_OFFSET)
        os.pwrite(self.fd, body, REPORT_OFFSET + NUMBER)
        os.pwrite(self.fd, _number(len(body)), REPORT_OFFSET)

    def read_report(self) -> ErrorReport | None:
        """What the engine core has written; None if it wrote nothing, or nothing that can be read."""
        length = self._read_number(REPORT_OFFSET)
        if not 0 < length <= REPORT_SIZE:
            return None
        try:
            return msgspec.msgpack.decode(self._read(length, REPORT_OFFSET + NUMBER), type=ErrorReport)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    # --- the warden's part ---

    def read_engine_pid(self) -> int | None:
        """Process id of the engine core, which is its group's too; None as long as there is none."""
        pid = self._read_number(0)
        return pid if pid > 0 else None

    def read_exit_code(self) -> int | None:
        """Exit code that the warden saw (0 or more, or minus a signal); None before that, or if it was killed first."""
        return self._read_number(2 * NUMBER) if self._read_number(NUMBER) == 1 else None

    def read_stderr_tail(self, max_bytes: int = 8192) -> str:
        """The last that the engine core wrote to stderr, at most `max_bytes` of it, from the start of a line on."""
        length = self._read_number(TAIL_OFFSET)
        if not 0 < length <= TAIL_SIZE:
            return ""
        size = min(length, max_bytes)
        data = self._read(size, TAIL_OFFSET + NUMBER + length - size)
        if size < length or length == TAIL_SIZE:
            # Something came before. A line longer than all that was asked for is shown from its middle.
            data = data[data.find(b"\n", 0, -1) + 1 :]
        return data.decode(errors="replace")

    def _read(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self.fd, size, offset)
        except OSError:
            return b""

    def _read_number(self, offset: int) -> int:
        return int.from_bytes(self._read(NUMBER, offset), "little", signed=True)


def above_stdio(fd: int) -> int:
    """This descriptor, or in its place a copy above 2.

    In a front end that was started with stdin, stdout or stderr closed, new descriptors take their numbers; in a child
    such a descriptor would be overwritten by the real ones.
    """
    if fd > 2:
        return fd
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return copy


def _number(value: int) -> bytes:
    return value.to_bytes(NUMBER, "little", signed=True)


def _shortened(text: str, limit: int) -> str:
    """The text in at most `limit` bytes of UTF-8, its middle left out if need be. Lone surrogates are escaped."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= limit:
        return data.decode()
    marker = f"\n[... {len(data) - limit} bytes and more left out ...]\n"
    half = (limit - len(marker)) // 2
    return data[:half].decode(errors="ignore") + marker + data[-half:].decode(errors="ignore")
