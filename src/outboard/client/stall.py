"""Notices that an engine core hangs: by its progress page, while something waits for it."""

from __future__ import annotations

import os
import select
import signal
import time

from outboard.protocol.control import EngineStatus, StallReport
from outboard.protocol.progress import BUSY, ProgressReader

__all__ = ["StallWatch", "process_ended"]


def process_ended(pidfd: int) -> bool:
    """Whether the process behind this descriptor has ended, reaped or not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


class StallWatch:
    """Judges one engine core, each time it is asked to. A blocked event loop of ours is no sign of anything.

    Two things are a hang: the busy loop is in a step, or a utility call, and has given no sign of life for too long;
    or it is in none, and messages that were sent to it are not taken.

    Args:
        status: of the engine core when it was ready.
        slot: this front end's place on its progress page.
        timeout: `FaultConfig.stall_timeout`, seconds.

    Raises:
        OSError, ValueError: it has no progress page that can be opened.
    """

    def __init__(self, status: EngineStatus, slot: int, timeout: float) -> None:
        assert status.pid is not None  # it is ready
        self._pid = status.pid
        self._stack_signal = status.stack_signal
        self._timeout = timeout
        self._page = ProgressReader(status.pid, status.progress_fd, slot)
        self._pidfd = self._stack_fd = -1
        try:
            self._pidfd = os.pidfd_open(status.pid)
            self._stack_fd = os.open(f"/proc/{status.pid}/fd/{status.stack_fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise
        self._untaken: tuple[int, float] | None = None  # messages taken when some were first seen waiting, and when
        self._cpu: tuple[float, float] | None = None  # (when, CPU seconds) as suspicion arose

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return process_ended(self._pidfd)

    def age(self, sent: int) -> float:
        """For how long it has made no progress that it should have made, seconds; 0 where all is well.

        Args:
            sent: messages that have been sent to it.
        """
        page = self._page.read()
        now = time.monotonic()
        if page.activity == BUSY:
            self._untaken = None  # it takes them between two steps
            age = now - page.time / 1e9
        elif page.taken < sent:
            if self._untaken is None or self._untaken[0] != page.taken:
                self._untaken = (page.taken, now)
            age = now - self._untaken[1]
        else:
            self._untaken = None
            age = 0.0
        if age < self._timeout / 2:
            self._cpu = None
        elif self._cpu is None:
            self._cpu = (now, self._cpu_seconds())
        return age

    def progress(self) -> tuple[int, float]:
        """Steps that it has taken, and seconds since its last sign of life."""
        page = self._page.read()
        return page.steps, max(0.0, time.monotonic() - page.time / 1e9)

    def ask_for_stack(self) -> None:
        """Has the process dump its Python stack; `report` finds it a moment later, unless it is stopped."""
        self._stack_from = os.fstat(self._stack_fd).st_size
        if self._process()[0] == "stopped":
            return  # the signal would wait, and hit it at work once it goes on
        try:
            signal.pidfd_send_signal(self._pidfd, self._stack_signal)
        except (OSError, ValueError):
            pass

    def report(self, sent: int) -> StallReport:
        """All that can be told of it."""
        stack = b""
        try:
            size = os.fstat(self._stack_fd).st_size
            stack = os.pread(self._stack_fd, min(size - self._stack_from, 64 << 10), self._stack_from)
        except OSError:
            pass
        process, cpu = self._process()
        return StallReport(self.age(sent), self._page.read().steps, process, cpu, stack.decode(errors="replace"))

    def close(self) -> None:
        """Releases what it holds. Idempotent."""
        self._page.close()
        for fd in (self._pidfd, self._stack_fd):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._stack_fd = -1

    def _process(self) -> tuple[str, float]:
        """What the system says of the process, and the share of a core that it used since suspicion arose."""
        import psutil  # takes a while to import, and is hardly ever needed

        try:
            status = psutil.Process(self._pid).status()
        except psutil.Error:
            return "gone", 0.0
        cpu = 0.0
        if self._cpu is not None:
            since, before = self._cpu
            cpu = (self._cpu_seconds() - before) / max(time.monotonic() - since, 1e-3)
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return "stopped", cpu
        if status == psutil.STATUS_DISK_SLEEP:
            return "blocked", cpu
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone", cpu
        return ("running" if status == psutil.STATUS_RUNNING or cpu > 0.5 else "sleeping"), cpu

    def _cpu_seconds(self) -> float:
        import psutil

        try:
            times = psutil.Process(self._pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)
