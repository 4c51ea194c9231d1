"""What a client owns outside of Python's memory, and the two ways to give it back.

`close_sockets` and `close` are the orderly one: called by `shutdown`, bounded, afterwards nothing is left.
`abandon` is the finalizer's: called by the garbage collector, in any thread, so it takes no lock and never blocks.
"""

from __future__ import annotations

import _thread
import asyncio
import os
from collections.abc import Callable

from outboard.client.monitor import EngineMonitor
from outboard.launch.process import EngineProcess
from outboard.protocol.messages import ErrorReport
from outboard.protocol.shm_pair import SharedMemory
from outboard.transport.outbox import Outbox
from outboard.transport.reader import SocketReader
from outboard.transport.session import SessionDirectory
from outboard.transport.sockets import ControlServer, ZmqContext, ZmqSocket

__all__ = ["Resources"]


class Resources:
    """Owns sockets, context, session directory and process of one client; knows nothing of the client.

    Attributes:
        creator: id of the process that made it; a forked copy must not touch it.
        process: the engine core's.
        loop: the event loop that reads; None while there is none.
        reader, monitor, outbox: what works on the sockets; set by the client.
        stop_tasks: cancels the tasks of hooks; set by the client.
        on_dead: told of an ENGINE_CORE_DEAD message; set by the client.
        timer: calls a function after a delay in the thread that reads, where there is one.
        memory: shared with the engine core; off unless the client sets it.
        stop_thread: ends the thread that reads, where there is one, which then calls what it is given.
    """

    def __init__(
        self,
        context: ZmqContext,
        session: SessionDirectory,
        control: ControlServer,
        input_socket: ZmqSocket,
        output_socket: ZmqSocket,
        process: EngineProcess,
    ) -> None:
        self._context = context
        self._session = session
        self._control = control
        self._sockets = (input_socket, output_socket)
        self.creator = os.getpid()
        self.process = process
        self.loop: asyncio.AbstractEventLoop | None = None
        self.reader: SocketReader | None = None
        self.monitor: EngineMonitor | None = None
        self.outbox: Outbox | None = None
        self.on_dead: Callable[[ErrorReport], None] | None = None
        self.stop_tasks: Callable[[], None] | None = None
        self.timer: Callable[[float, Callable[[], None]], None] | None = None
        self.stop_thread: Callable[[Callable[[], None]], None] | None = None
        self.memory = SharedMemory()

    def call_later(self, delay: float, function: Callable[[], None]) -> None:
        """Calls `function` after `delay` seconds on the attached loop, or in the thread that reads."""
        if self.timer is not None:
            self.timer(delay, function)
        else:
            assert self.loop is not None  # nothing is sent before a loop is attached
            self.loop.call_later(delay, function)

    def on_engine_dead(self, report: ErrorReport) -> None:
        """The engine core has told that it is about to end."""
        if self.on_dead is not None:
            self.on_dead(report)

    def give_up(self) -> None:
        """Nothing more is wanted of the engine core: stops reading and kills what may be left of it. Does not block."""
        self.stop_reading()
        self.process.kill()

    def stop_reading(self) -> None:
        """Takes the reader and the monitor off the loop, and forgets what was not sent. Idempotent.

        Call it on the loop, or where none runs.
        """
        if self.reader is not None:
            self.reader.detach()
        if self.monitor is not None:
            self.monitor.detach()
        if self.outbox is not None:
            self.outbox.clear()
        self.memory.close()

    def close_sockets(self) -> None:
        """Closes all sockets, which nobody may be using. Idempotent."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._control.close()

    def close(self, timeout: float) -> None:
        """Stops the process, then frees all; `stop_reading` must have been called. Blocks, bounded.

        The sockets close after the process has ended: it ends at once while it can get rid of its last messages.
        """
        self.process.stop(timeout)
        self.close_sockets()
        self.process.close()
        self._context.term()
        self._session.remove()

    def abandon(self) -> None:
        """Gives everything back without waiting for anything; does nothing in a forked copy of the front end."""
        if os.getpid() != self.creator:
            return
        self.process.release()
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
        self.stop_reading()
        if self.stop_tasks is not None:
            self.stop_tasks()
        self.process.abandon()
        self.close_sockets()
        self._session.remove()
        # term() may wait for the IO thread; a raw thread takes no lock to start.
        _thread.start_new_thread(self._context.term, ())
