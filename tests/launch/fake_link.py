"""A link between machines, on one: whoever connects to 127.0.0.2 is passed on to 127.0.0.1, until the link is cut."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Iterable

__all__ = ["FAR", "FakeLink"]

FAR = "127.0.0.2"


class FakeLink:
    """Passes bytes on in a thread of its own. A context manager.

    Args:
        ports: of 127.0.0.1, and the same of 127.0.0.2.
    """

    def __init__(self, ports: Iterable[int]) -> None:
        self._selector = selectors.DefaultSelector()
        self._other: dict[socket.socket, socket.socket] = {}  # of each pair, both ways
        self._lock = threading.Lock()  # of all above
        self._open = threading.Event()
        self._open.set()
        self._ended = False
        self._listeners = [socket.create_server((FAR, port)) for port in ports]
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._open.clear()

    def restore(self) -> None:
        """What has been held passes, and what comes."""
        self._open.set()

    def reset(self) -> int:
        """All connections are reset, as by a firewall that has forgotten them; how many. New ones may be made."""
        with self._lock:
            ends = list(self._other)
            for end in ends:
                self._close(end)
        return len(ends) // 2

    def close(self) -> None:
        self._ended = True
        self._open.set()
        self._thread.join(10)
        self.reset()
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def __enter__(self) -> FakeLink:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._ended:
            if not self._open.wait(0.05):
                continue
            for key, _ in self._selector.select(0.05):
                with self._lock:
                    if self._open.is_set() and isinstance(key.fileobj, socket.socket):
                        self._pass_on(key.fileobj)

    def _pass_on(self, end: socket.socket) -> None:
        if end in self._listeners:
            near, _ = end.accept()
            try:
                far = socket.create_connection(("127.0.0.1", end.getsockname()[1]), 5)
            except OSError:  # nobody listens there now
                near.close()
                return
            for one, other in ((near, far), (far, near)):
                self._other[one] = other
                self._selector.register(one, selectors.EVENT_READ)
        elif end in self._other:  # not reset meanwhile
            try:
                data = end.recv(65536)
                self._other[end].sendall(data)
            except OSError:
                data = b""
            if not data:
                self._close(end)

    def _close(self, end: socket.socket) -> None:
        """Resets both sides of a connection."""
        other = self._other.pop(end, None)
        if other is not None:
            del self._other[other]
            for one in (end, other):
                self._selector.unregister(one)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.close()
