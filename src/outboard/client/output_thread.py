"""The thread of a blocking client: reads outputs, retries what could not be sent, notices the engine core's death."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from outboard.client.monitor import EXIT_GRACE, LONGEST, QUIET, death_of
from outboard.client.receiver import Receiver
from outboard.launch.process import EngineProcess
from outboard.protocol.messages import ErrorReport
from outboard.transport.reader import SocketReader
from outboard.transport.sockets import ZmqSocket, wait_readable

__all__ = ["OutputThread"]


class OutputThread:
    """Owns the output socket while it runs; holds no reference to the client.

    Args:
        socket: the client's PULL; closed by the thread when it ends.
        reader: takes messages from it.
        receiver: gets them, under `lock`.
        lock: the client's.
        process: its sentinel is watched.
        rank, incarnation: named in the error.
    """

    def __init__(
        self,
        socket: ZmqSocket,
        reader: SocketReader,
        receiver: Receiver,
        lock: threading.RLock,
        process: EngineProcess,
        rank: int,
        incarnation: int,
    ) -> None:
        self._socket = socket
        self._reader = reader
        self._receiver = receiver
        self._lock = lock
        self._process = process
        self._sentinel = process.sentinel
        self._rank = rank
        self._incarnation = incarnation
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._last_act: Callable[[], None] | None = None
        self._due: tuple[float, Callable[[], None]] | None = None  # the one retry of the outbox
        self._report: ErrorReport | None = None
        self._thread = threading.Thread(target=self._run, name="outboard-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, last_act: Callable[[], None] | None = None) -> None:
        """Has the thread end, without waiting for it; takes no lock.

        Args:
            last_act: called in the thread at its very end.
        """
        self._last_act = last_act
        self._stopping = True
        self._wake()

    def join(self, timeout: float) -> None:
        """Waits for the end of the thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def call_later(self, delay: float, function: Callable[[], None]) -> None:
        """Calls `function` in the thread, under the lock, after `delay` seconds; one at a time."""
        self._due = (time.monotonic() + delay, function)
        self._wake()

    def on_dead(self, report: ErrorReport) -> None:
        """The engine core has said that it is about to end: its exit follows, or is waited for no longer."""
        self._report = report
        self._due = (time.monotonic() + EXIT_GRACE, self._tell)

    def _wake(self) -> None:
        try:
            os.eventfd_write(self._wake_fd, 1)
        except (OSError, ValueError):
            pass  # the thread has ended

    def _run(self) -> None:
        try:
            while not self._stopping and self._receiver.failure is None:
                self._turn()
            waiting = select.poll()  # for nothing but the shutdown, which will come
            waiting.register(self._wake_fd, select.POLLIN)
            while not self._stopping:
                waiting.poll()
                self._take_wakes()
        finally:
            self._socket.close(linger=0)
            wake_fd, self._wake_fd = self._wake_fd, -1
            os.close(wake_fd)
            if self._last_act is not None:
                self._last_act()

    def _turn(self) -> None:
        due = self._due
        timeout = None if due is None else max(0.0, due[0] - time.monotonic())
        ready = wait_readable(self._socket, [self._wake_fd, self._sentinel], timeout)
        self._take_wakes()
        with self._lock:
            while self._reader.drain(1) and not self._stopping:
                pass
            due = self._due
            if due is not None and due[0] <= time.monotonic():
                self._due = None
                due[1]()
        if self._sentinel in ready and self._receiver.failure is None:
            self._on_exit()

    def _take_wakes(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass

    def _on_exit(self) -> None:
        """Takes what the engine core had sent until its socket is quiet, then tells of its end."""
        deadline = time.monotonic() + LONGEST
        before = -1
        while self._receiver.received != before and time.monotonic() < deadline and not self._stopping:
            before = self._receiver.received
            wait_readable(self._socket, [], QUIET)
            with self._lock:
                while self._reader.drain(1):
                    pass
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        self._receiver.fail(death_of(self._process, self._rank, self._incarnation, self._report))
