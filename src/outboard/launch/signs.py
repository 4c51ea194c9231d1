"""What can be seen of an engine core on this host, whoever its parent is: progress page, process, stack."""

from __future__ import annotations

import os
import select
import signal

from outboard.protocol.progress import ProgressReader

__all__ = ["Signs", "process_ended"]

# From this share of a core on, a process that happens to sleep when it is looked at counts as running.
_BUSY = 0.5

# Bytes of a stack that are told.
_MOST_STACK = 64 << 10


def process_ended(pidfd: int) -> bool:
    """Whether the process behind this descriptor has ended, reaped or not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


class Signs:
    """One engine core that is ready.

    Args:
        pid: its process.
        progress_fd, stack_fd: descriptors in that process: of its progress page, and of the file where its stacks go.
        stack_signal: has it dump its stack there.
        slot: the front end's place on the page.

    Attributes:
        page: reads its progress page.

    Raises:
        OSError, ValueError: it has no page that can be opened; it is dying just now, or hides its descriptors.
    """

    def __init__(self, pid: int, progress_fd: int, stack_fd: int, stack_signal: int, slot: int) -> None:
        self._pid = pid
        self._stack_signal = stack_signal
        self._stack_from = 0  # bytes of the file of stacks when one was last asked for
        self.page = ProgressReader(pid, progress_fd, slot)
        self._pidfd = self._stack_fd = -1
        try:
            self._pidfd = os.pidfd_open(pid)
            self._stack_fd = os.open(f"/proc/{pid}/fd/{stack_fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return process_ended(self._pidfd)

    def process(self, cpu: float) -> str:
        """What the system says of it: "running", "sleeping", "blocked", "stopped" or "gone".

        Args:
            cpu: share of a core that it has used of late.
        """
        import psutil  # takes a while to import, and front ends hardly ever need it

        try:
            status = psutil.Process(self._pid).status()
        except psutil.Error:
            return "gone"
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return "stopped"
        if status == psutil.STATUS_DISK_SLEEP:
            return "blocked"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone"
        return "running" if status == psutil.STATUS_RUNNING or cpu > _BUSY else "sleeping"

    def cpu_seconds(self) -> float:
        """CPU time that it has used; 0 where it is gone."""
        import psutil

        try:
            times = psutil.Process(self._pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def ask_for_stack(self) -> bool:
        """Has it dump its Python stack; `stack` finds it a moment later. False, and nothing done, where it is stopped:

        the signal would wait, and hit it at work once it goes on.
        """
        try:
            self._stack_from = os.fstat(self._stack_fd).st_size
            if self.process(0.0) == "stopped":
                return False
            signal.pidfd_send_signal(self._pidfd, self._stack_signal)
        except (OSError, ValueError):
            pass
        return True

    def stack(self) -> str:
        """What it has dumped since it was last asked; "" where that is nothing."""
        try:
            return os.pread(self._stack_fd, _MOST_STACK, self._stack_from).decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        """Releases what it holds. Idempotent."""
        self.page.close()
        for fd in (self._pidfd, self._stack_fd):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._stack_fd = -1
