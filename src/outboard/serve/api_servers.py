"""The API processes as the supervisor keeps them: started, set up, drained, and started again when one dies."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from outboard.errors import OutboardError
from outboard.launch.group import EngineAddresses
from outboard.launch.process import EngineProcess, describe_exit
from outboard.observe.metrics import MULTIPROCESS_DIR
from outboard.serve.channel import (
    CHANNEL_PATH,
    Channel,
    Drain,
    Drained,
    FromApi,
    Serving,
    SetLogLevel,
    Setup,
    send_setup,
)
from outboard.serve.config import ServeConfig
from outboard.serve.limits import LimitsPage

__all__ = ["ApiServerError", "ApiServers"]

logger = logging.getLogger("outboard.serve")

# One that has lived so long, seconds, is no sign of trouble when it ends.
_HEALTHY = 30.0
_LONGEST_PAUSE = 10.0
# So many that end before they serve, one after the other: there will be none.
_MOST_FAILURES = 5
# For an API process to end by itself once it has drained, seconds.
_EXIT_GRACE = 5.0
# For its warden to kill it, seconds; then it is killed without.
_KILL_BOUND = 10.0


class ApiServerError(OutboardError):
    """API processes do not come to serve."""


class ApiServers:
    """All API processes. Belongs to the supervisor's loop.

    Args:
        config: of the server.
        addresses: of the engine cores.
        listener: the bound socket that they share.
        directory: private to this server.
        metrics_directory, report: see `outboard.observe.metrics.render`.
        on_failure: called once if they cannot be kept up.

    Attributes:
        page: the limits that they share.
        restarts: how many died and were started again.
    """

    def __init__(
        self,
        config: ServeConfig,
        addresses: EngineAddresses,
        listener: socket.socket,
        directory: Path,
        metrics_directory: Path,
        report: Path,
        on_failure: Callable[[ApiServerError], None],
    ) -> None:
        self._config = config
        self._addresses = addresses
        self._listener = listener
        self._directory = directory
        self._metrics_directory = metrics_directory
        self._report = report
        self._on_failure = on_failure
        self.page, self._page_fd = LimitsPage.create(config.api_server_count, len(config.api_keys))
        self._servers = [_ApiServer(self, index) for index in range(config.api_server_count)]
        self.restarts = 0
        self.stopping = False

    async def start(self) -> None:
        """Starts all; returns once they serve.

        Raises:
            ApiServerError: one does not.
        """
        for server in self._servers:
            server.start()
        await asyncio.gather(*(server.first for server in self._servers))

    @property
    def pids(self) -> list[int]:
        """Of those that serve."""
        return [server.pid for server in self._servers if server.serving and server.pid is not None]

    def set_log_level(self, level: str) -> None:
        """Of Outboard's loggers, in all of them."""
        for server in self._servers:
            server.send(SetLogLevel(level))

    async def drain(self, timeout: float) -> int:
        """Has all end their requests, and ends them; how many requests were cut."""
        self.stopping = True
        return sum(await asyncio.gather(*(server.drain(timeout) for server in self._servers)))

    async def kill(self) -> None:
        """Ends all at once."""
        self.stopping = True
        await asyncio.gather(*(server.kill() for server in self._servers))

    def close(self) -> None:
        """Releases what is held; all have ended."""
        if self._page_fd >= 0:
            os.close(self._page_fd)
            self._page_fd = -1

    # --- for one of them ---

    def set_up(self, connection: socket.socket, index: int) -> None:
        """Sends an API process all that it must know."""
        setup = Setup(
            index,
            index + 1,  # the supervisor's own client is front end 0
            self._addresses,
            self._config,
            str(self._metrics_directory),
            str(self._report),
        )
        send_setup(connection, setup, [self._listener.fileno(), self._page_fd])

    def spawn(self, channel: Path) -> EngineProcess:
        """Starts a process that will connect there."""
        env = {**os.environ, CHANNEL_PATH: str(channel), MULTIPROCESS_DIR: str(self._metrics_directory)}
        command = [sys.executable, "-P", "-m", "outboard.serve.api_process"]
        return EngineProcess.start(env, self._directory, command)

    def channel_path(self, index: int) -> Path:
        """Where API process `index` connects."""
        return self._directory / f"api-{index}"

    def failed(self, error: ApiServerError) -> None:
        """One of them cannot be kept up."""
        if not self.stopping:
            self._on_failure(error)


class _ApiServer:
    """One API process after the other, with one index."""

    def __init__(self, owner: ApiServers, index: int) -> None:
        self._owner = owner
        self._index = index
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = self._loop.create_future()
        self.serving = False
        self._process: EngineProcess | None = None
        self._waiting: socket.socket | None = None  # for the process to connect
        self._channel: Channel[FromApi] | None = None
        self._ended = asyncio.Event()
        self._ended.set()
        self._started_at = 0.0
        self._failures = 0
        self._pause = 0.0
        self._cut = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.engine_pid

    def start(self) -> None:
        path = self._owner.channel_path(self._index)
        path.unlink(missing_ok=True)
        waiting = self._waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        waiting.bind(str(path))
        waiting.listen(1)
        self._loop.add_reader(waiting.fileno(), self._on_connect)
        self._started_at = time.monotonic()
        process = self._process = self._owner.spawn(path)
        self._ended.clear()
        self._loop.add_reader(process.sentinel, self._on_exit)

    def send(self, message: Drain | SetLogLevel) -> None:
        if self._channel is not None:
            self._channel.send(message)

    async def drain(self, timeout: float) -> int:
        if self._timer is not None:
            self._timer.cancel()
        if self._channel is None:  # it has not come up, or is between two
            await self.kill()
            return 0
        self.send(Drain(timeout))
        try:
            async with asyncio.timeout(timeout + _EXIT_GRACE):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("API process %d (pid %s) did not end in time, and is killed", self._index, self.pid)
            self._cut += 1
            await self.kill()
        return self._cut

    async def kill(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.kill()
            try:
                async with asyncio.timeout(_KILL_BOUND):
                    await self._ended.wait()
            except TimeoutError:
                if self._process is not None:
                    self._process.kill(force=True)
        await self._ended.wait()

    def _on_connect(self) -> None:
        assert self._waiting is not None
        try:
            connection, _ = self._waiting.accept()
        except BlockingIOError:
            return
        self._stop_waiting()
        try:
            connection.setblocking(True)
            self._owner.set_up(connection, self._index)
        except OSError:
            connection.close()  # it is gone, which its sentinel tells
            return
        self._channel = Channel(connection, FromApi, self._on_message, lambda: None)

    def _on_message(self, message: FromApi) -> None:
        match message:
            case Serving():
                self.serving = True
                self._failures = 0
                if not self.first.done():
                    self.first.set_result(None)
            case Drained():
                self._cut = message.cut

    def _on_exit(self) -> None:
        process = self._process
        assert process is not None  # its sentinel told
        self._loop.remove_reader(process.sentinel)
        how = describe_exit(process.poll())
        pid = process.engine_pid
        # All of it went to our own stderr; of one that served, the last line is some request's.
        last_words = "" if self.serving else process.report.read_stderr_tail().rstrip().rpartition("\n")[2]
        process.close()
        self._process = None
        self._stop_waiting()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._owner.page.clear(self._index)
        served, self.serving = self.serving, False
        self._ended.set()
        if self._owner.stopping:
            if not self.first.done():
                self.first.cancel()
            return
        self._failures += 1
        error = ApiServerError(f"API process {self._index} (pid {pid}) ended by itself: {how}. {last_words}".rstrip())
        if not served and (not self.first.done() or self._failures >= _MOST_FAILURES):
            if not self.first.done():
                self.first.set_exception(error)
            self._owner.failed(error)
            return
        logger.error("%s", error, extra={"api_process": self._index})
        self._owner.restarts += 1
        self._pause = min(self._pause * 2, _LONGEST_PAUSE) if time.monotonic() - self._started_at < _HEALTHY else 0.0
        self._timer = self._loop.call_later(self._pause, self._start_again)
        self._pause = max(self._pause, 0.1)

    def _start_again(self) -> None:
        self._timer = None
        if not self._owner.stopping:
            self.start()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._loop.remove_reader(self._waiting.fileno())
            self._waiting.close()
            self._waiting = None
