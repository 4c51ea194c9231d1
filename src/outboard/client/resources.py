"""What a client owns outside of Python's memory, and the two ways to give it back.

`close` is the orderly one: called by `shutdown`, bounded, afterwards nothing is left. `abandon` is the finalizer's:
called by the garbage collector, in any thread, so it takes no lock and never blocks.
"""

from __future__ import annotations

import _thread
import asyncio
import os
from collections import Counter
from collections.abc import Callable

from outboard.client.membership import Membership
from outboard.launch.group import EngineGroup
from outboard.transport.curve import refused_by
from outboard.transport.sockets import ZmqContext

__all__ = ["Resources"]

# How long LEAVE may take to leave, in milliseconds.
_LINGER_MS = 500


class Resources:
    """Owns the sockets, the context and, where the client started them, the engine cores; knows nothing of the client.

    Attributes:
        creator: id of the process that made it; a forked copy must not touch it.
        group: the engine cores; None: somebody else's.
        membership: of the client.
        loop: the event loop that reads; None while there is none.
        stop_tasks: cancels the tasks of hooks; set by the client.
        stop_thread: ends the thread that reads, where there is one, which then calls what it is given.
    """

    def __init__(self, context: ZmqContext, group: EngineGroup | None) -> None:
        self._context = context
        self.creator = os.getpid()
        self.group = group
        self.membership: Membership | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stop_tasks: Callable[[], None] | None = None
        self.stop_thread: Callable[[Callable[[], None]], None] | None = None

    @property
    def refused(self) -> dict[str, int]:
        """How many connections of strangers were turned away, by reason."""
        counts = Counter(refused_by(self._context))
        if self.group is not None:
            counts.update(self.group.refused)
        return dict(+counts)

    def give_up(self) -> None:
        """Nothing more is wanted of the engine cores: those of our own are killed. Does not block."""
        if self.group is not None:
            self.group.kill()
        elif self.membership is not None:
            self.membership.leave()

    def close(self, timeout: float) -> None:
        """Stops the engine cores, then frees all; reading must have stopped. Blocks, bounded.

        The sockets close after the processes have ended: they end at once while they can get rid of their last
        messages.
        """
        if self.group is not None:
            self.group.shutdown(timeout)
        if self.membership is not None:
            if self.group is None:
                self.membership.leave()
            self.membership.close_sockets(_LINGER_MS if self.group is None else 0)
        self._context.term()

    def abandon(self) -> None:
        """Gives everything back without waiting for anything; does nothing in a forked copy of the front end."""
        if os.getpid() != self.creator:
            return
        if self.group is not None:
            self.group.abandon()
        if self.stop_thread is not None:
            self.stop_thread(self._release)
            return
        loop = self.loop
        if loop is not None and loop.is_running():
            try:
                loop.call_soon_threadsafe(self._release)
                return
            except RuntimeError:  # it was closed in between
                pass
        self._release()

    def _release(self) -> None:
        membership = self.membership
        if membership is not None:
            membership.stop_reading()
        if self.stop_tasks is not None:
            self.stop_tasks()
        if membership is not None:
            if self.group is None:
                membership.leave()
            membership.close_sockets(_LINGER_MS if self.group is None else 0)
        # term() may wait for the IO thread; a raw thread takes no lock to start.
        _thread.start_new_thread(self._context.term, ())
