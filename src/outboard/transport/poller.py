"""Reads many sockets in one thread, through their file descriptors.

That takes one system call a wake-up, however many sockets there are; zmq_poll looks at each of them twice. `ZMQ_FD` is
edge-triggered: it becomes readable when something changes, not while messages are there. So a socket is read until
ZMQ_EVENTS says that nothing is left, and where that is cut short, it is read again before the next wait.
"""

from __future__ import annotations

import select
from collections.abc import Callable

__all__ = ["SocketPoller"]


class SocketPoller:
    """Calls the reader of each socket that may have messages. Belongs to one thread; `close` releases it.

    `arm` and `remove` may also be called from others.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], bool]] = {}
        self._unfinished: dict[int, None] = {}

    def add(self, fd: int, read: Callable[[], bool]) -> None:
        """From now on `read` is called when something comes; whether it left something is what it returns."""
        self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = read
        self._unfinished[fd] = None  # the edge of what came before is gone

    def add_writable(self, fd: int, call: Callable[[], None]) -> None:
        """From now on `call` is called, once for each `arm`, when a plain socket takes more, or its peer is gone."""

        def tell() -> bool:
            call()
            return False

        self._readers[fd] = tell
        self._epoll.register(fd, select.EPOLLONESHOT)

    def arm(self, fd: int) -> None:
        """See `add_writable`."""
        self._epoll.modify(fd, select.EPOLLOUT | select.EPOLLONESHOT)

    def remove(self, fd: int) -> None:
        """Forgets a socket; must precede its close. May be called by a reader."""
        try:
            self._epoll.unregister(fd)
        except OSError:
            pass  # somebody else has closed it
        del self._readers[fd]
        self._unfinished.pop(fd, None)

    def turn(self) -> None:
        """Waits until something comes; lets each socket that may have something be read once."""
        ready, self._unfinished = self._unfinished, {}
        for fd, _ in self._epoll.poll(0 if ready else None):
            ready[fd] = None
        for fd in ready:
            read = self._readers.get(fd)  # another reader may have removed it
            if read is not None and read():
                self._unfinished[fd] = None

    def close(self) -> None:
        self._epoll.close()
