"""uvicorn as it is used here: no signals of its own, and a time limit for the header of a request."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from outboard.serve.outlet import WriteChunk

__all__ = ["ABORT", "WRITE_CHUNK", "HttpServer", "allow_many_connections"]

# Of idle connections; longer than that of usual proxies, which then close first.
_KEEP_ALIVE = 75
_BACKLOG = 2048
# Names of ASGI extensions: to write a chunk of the answer with no coroutine, and to drop the connection with all that
# was written and not sent.
WRITE_CHUNK = "outboard.write_chunk"
ABORT = "outboard.abort"


class HttpServer(uvicorn.Server):
    """A uvicorn server on a socket that is bound already.

    Args:
        app: an ASGI application.
        receive_timeout: seconds that the header of a request may take, from its connection or its first byte on.
        on_started: called once connections are taken.
        on_second: awaited about once a second.
    """

    def __init__(
        self,
        app: Any,
        receive_timeout: float,
        on_started: Callable[[], None] = lambda: None,
        on_second: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        protocol = type("Protocol", (_Protocol,), {"receive_timeout": receive_timeout})
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE,
            callback_notify=on_second,
            timeout_notify=1,
        )
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes none: whoever runs this has its own."""
        yield

    def drain(self, timeout: float) -> None:
        """Has `serve` return once all answers are complete, at the latest after `timeout` seconds."""
        self.config.timeout_graceful_shutdown = max(1, round(timeout))
        self.should_exit = True


class _Protocol(HttpToolsProtocol):
    """uvicorn's, and some things more.

    It closes a connection that does not get a request's header across in time, such as one that sends a byte a minute:
    uvicorn has a limit for the time between requests, and none for this. Where a connection is lost, it tells all
    requests that have no answer yet: uvicorn tells the last alone, and a client may send it before it has read the
    answer to the first. And it offers `WRITE_CHUNK` and `ABORT`.
    """

    receive_timeout = 30.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._header_timer: asyncio.TimerHandle | None = None
        self._gates: list[_Gate] = []  # of requests that have no complete answer yet
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_came()
        self._shut_gates()
        for gate in self._gates:
            if not gate.cycle.response_complete:
                gate.cycle.disconnected = True
                gate.cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._shut_gates()
        super().pause_writing()

    def on_response_complete(self) -> None:
        self._shut_gates()
        super().on_response_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_header()

    def on_headers_complete(self) -> None:
        self._header_came()
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            gate = _Gate(cycle)
            self._gates = [one for one in self._gates if not one.cycle.response_complete] + [gate]
            transport = cycle.transport
            extensions: dict[str, Any] = {WRITE_CHUNK: _chunk_writer(gate, transport), ABORT: transport.abort}
            self.scope["extensions"] = extensions

    def _shut_gates(self) -> None:
        for gate in self._gates:
            gate.shut = True

    def _await_header(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.receive_timeout, self._too_slow)

    def _header_came(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        if any(not gate.cycle.response_complete for gate in self._gates):
            self._await_header()  # an answer is under way, which must not be cut
        elif not self.transport.is_closing():
            self.transport.close()


class _Gate:
    """Whether chunks of an answer can be written as they are. Shut by the protocol; opened by looking again.

    What it stands for is in several objects of uvicorn's; to ask them all for every token takes as long as the rest.
    """

    __slots__ = ("cycle", "shut")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        self.shut = True

    def opens(self) -> bool:
        """Whether the head is out, more is to come, and the connection takes it."""
        cycle = self.cycle
        self.shut = (
            cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete
        )
        return not self.shut


def _chunk_writer(gate: _Gate, transport: Any) -> WriteChunk:
    """Writes a chunk of an answer, and returns True; False: it did not, and `send` is to be used.

    What `send` does with a chunk, without its coroutine, its message and its checks, which take longer than all else
    that a token takes in this process, but for the system call.
    """
    write = transport.write

    def write_chunk(body: bytes) -> bool:
        if gate.shut and not gate.opens():
            return False
        write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    return write_chunk


def allow_many_connections() -> None:
    """Raises the limit of open descriptors as far as the system lets this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (ValueError, OSError):
        pass  # what there is has to do
