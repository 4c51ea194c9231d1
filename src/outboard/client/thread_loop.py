"""An event loop in a thread of its own, for the clients without asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["ThreadLoop"]


class ThreadLoop:
    """Has the few methods of an event loop that a client's parts need; all callbacks run under the client's lock.

    Holds no reference to the client. The methods may be called from any thread.

    Args:
        lock: the client's.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._loop = asyncio.new_event_loop()
        self._last_act: Callable[[], None] | None = None
        # What is watched, or will be once the thread gets to it; what was removed before that must not be: its
        # descriptor may be closed by then, or somebody else's.
        self._readers: dict[int, object] = {}
        self._writers: dict[int, object] = {}
        self._thread = threading.Thread(target=self._run, name="outboard-client", daemon=True)
        self._thread.start()

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """Calls `callback(*args)` whenever `fd` is readable."""
        self._watch(self._readers, self._loop.add_reader, fd, callback, args)

    def remove_reader(self, fd: int) -> None:
        """Undoes `add_reader`."""
        self._readers.pop(fd, None)
        self._in_thread(self._loop.remove_reader, fd)

    def add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """Calls `callback(*args)` whenever `fd` is writable."""
        self._watch(self._writers, self._loop.add_writer, fd, callback, args)

    def remove_writer(self, fd: int) -> None:
        """Undoes `add_writer`."""
        self._writers.pop(fd, None)
        self._in_thread(self._loop.remove_writer, fd)

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Calls `callback(*args)` in the thread."""
        try:
            self._loop.call_soon_threadsafe(self._locked, callback, args)
        except RuntimeError:
            pass  # it has ended

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> _Timer:
        """Calls `callback(*args)` in the thread after `delay` seconds, unless the result is cancelled before."""
        timer = _Timer(callback, args)
        self._in_thread(self._loop.call_later, delay, self._locked, timer.fire, ())
        return timer

    def time(self) -> float:
        """The clock of `call_later`, seconds."""
        return self._loop.time()

    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def stop(self, last_act: Callable[[], None] | None = None) -> None:
        """Has the thread end, without waiting for it; takes no lock. `last_act` is called in the thread at its end."""
        self._last_act = last_act
        try:
            self._loop.call_soon_threadsafe(self._loop.stop)
        except RuntimeError:
            pass  # it has ended

    def join(self, timeout: float) -> None:
        """Waits for the end of the thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _watch(
        self,
        watched: dict[int, object],
        add: Callable[..., Any],
        fd: int,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        watched[fd] = wish = object()

        def carry_out() -> None:
            if watched.get(fd) is wish:
                add(fd, self._locked, callback, args)

        self._in_thread(carry_out)

    def _in_thread(self, function: Callable[..., Any], *args: Any) -> None:
        if threading.current_thread() is self._thread:
            function(*args)
            return
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            pass  # it has ended: there is nothing to call back any more

    def _locked(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        with self._lock:
            callback(*args)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            if self._last_act is not None:
                self._last_act()
            self._loop.close()


class _Timer:
    """What `call_later` returns: can be cancelled from any thread."""

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._callback = callback
        self._args = args
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def fire(self) -> None:
        if not self._cancelled:
            self._callback(*self._args)
