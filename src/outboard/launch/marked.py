"""Finds the descendants of an engine core by the mark in their environment, where no warden is left to know them.

A process keeps the environment it was started with for all to see in /proc, its children inherit it, and neither a
session of its own nor a double fork changes that. It hides from the mark only by starting a program with another
environment, or by writing over its own (as some do to change their title).
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import ExitStack
from pathlib import Path

from outboard.protocol.environment import ENGINE_MARK

__all__ = ["kill_marked"]

_PROC = Path("/proc")
_ENTRY = f"{ENGINE_MARK}=".encode()


def kill_marked(mark: str, bound: float = 1.0) -> int:
    """Kills every process that carries the mark, and says how many there were.

    It looks until it finds none that it has not killed: a process that was killed forks no more. It does not wait for
    them to go. Whoever forks faster than /proc can be read is given up after `bound` seconds.
    """
    deadline = time.monotonic() + bound
    killed: dict[int, int] = {}  # pidfd by pid; held, so that a number that is used again can be told from the old one
    count = 0
    with ExitStack() as stack:
        while time.monotonic() < deadline:
            before = count
            for pid in _processes():
                if not _carries(pid, mark) or (pid in killed and not _ended(killed[pid])):
                    continue
                try:
                    pidfd = os.pidfd_open(pid)
                    stack.callback(os.close, pidfd)
                    if _carries(pid, mark):  # asked again: by now the number cannot go to another process unseen
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                        killed[pid] = pidfd
                        count += 1
                except OSError:  # gone, or not ours to kill
                    continue
            if count == before:
                break
    return count


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_PROC) if name.isdigit()]  # noqa: PTH208 - only the names
    except OSError:
        return []


def _carries(pid: int, mark: str) -> bool:
    """Whether a living process carries the mark; False too where it may not be asked."""
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    marks = [entry.removeprefix(_ENTRY) for entry in environment.split(b"\0") if entry.startswith(_ENTRY)]
    return any(mark.encode() in value.split() for value in marks)


def _ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
