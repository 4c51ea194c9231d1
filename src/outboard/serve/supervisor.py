"""The supervisor: owns the engine cores, the port and the API processes, and ends all of them together."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from pathlib import Path

import msgspec

from outboard.client.async_mp import AsyncMPClient
from outboard.client.data_parallel import client_class
from outboard.config import EngineConfig
from outboard.errors import ClientClosedError, ConfigError, EngineDeadError, OutboardError
from outboard.observe.engines import ServerReport
from outboard.observe.metrics import render
from outboard.protocol.control import EngineStatus
from outboard.serve.admin import AdminApp
from outboard.serve.api_servers import ApiServers
from outboard.serve.config import ServeConfig
from outboard.serve.errors import ApiError, to_api_error
from outboard.serve.http_server import HttpServer
from outboard.serve.reporter import Reporter

__all__ = ["Supervisor"]

logger = logging.getLogger("outboard.serve")


class Supervisor:
    """A server: engine cores, API processes, administration. Belongs to one event loop; use it in `async with`.

        supervisor = Supervisor(EngineConfig(engine="openvino"), ServeConfig())
        async with ShutdownSignals(supervisor) as signals, supervisor:
            await supervisor.wait()

    All of it ends with this process, also where that is killed.

    Args:
        engine: what to run; its `parallel.client_count` is set to the number of API processes.
        config: how to serve it.

    Attributes:
        address: host and port of the API, once started.
        admin_address: of administration; None: there is none.
    """

    def __init__(self, engine: EngineConfig, config: ServeConfig) -> None:
        parallel = msgspec.structs.replace(engine.parallel, client_count=config.api_server_count)
        self._engine = msgspec.structs.replace(engine, parallel=parallel)
        self._config = config
        self.address = ("", 0)
        self.admin_address: tuple[str, int] | None = None
        self._client: AsyncMPClient | None = None
        self._servers: ApiServers | None = None
        self._reporter: Reporter | None = None
        self._admin: tuple[HttpServer, asyncio.Task[None]] | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start: asyncio.Task[None] | None = None
        self._listeners: list[socket.socket] = []
        self._closing = False
        self._draining = False
        self._closed: asyncio.Task[None] | None = None
        self._cut = 0

    async def __aenter__(self) -> Supervisor:
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Starts everything; returns once requests are served. Cancelling, and `shutdown` meanwhile, stop that.

        Raises:
            ConfigError: the engine, an option, a model file, the address or the port is wrong, or in use.
            EngineStartupError: an engine core died, failed or was too slow.
            ApiServerError: an API process did.
            ClientClosedError: `shutdown` stopped it.
        """
        self._start = asyncio.ensure_future(self._start_all())
        try:
            await self._start
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closing and not (task is not None and task.cancelling()):
                raise ClientClosedError("the server was stopped while it started", phase="stopping") from None
            raise
        finally:
            self._start = None

    async def wait(self) -> None:
        """Waits until the server cannot go on, and raises why. Returns if it is drained or shut down.

        Raises:
            EngineDeadError: no engine core is left, and none will come back.
            ApiServerError: API processes do not stay up.
        """
        await asyncio.shield(self._failure)

    async def drain(self, timeout: float | None = None) -> bool:
        """Takes no more connections, lets requests end, and shuts down; whether all ended by themselves.

        Args:
            timeout: seconds that they get; default `FaultConfig.shutdown_timeout`. Those that are left end with an
                error that says so.
        """
        self._draining = True
        if self._servers is not None and self._start is None and not self._closing:
            seconds = self._engine.faults.shutdown_timeout if timeout is None else timeout
            self._listener.close()  # nobody connects any more, once the API processes have closed theirs
            self._cut += await self._servers.drain(seconds)
        await self.shutdown()
        return not self._cut

    async def shutdown(self, timeout: float | None = None) -> None:
        """Ends everything, requests too. Idempotent.

        Args:
            timeout: seconds that engine cores get to stop by themselves; default `FaultConfig.shutdown_timeout`.
        """
        self._closing = True
        start = self._start
        if start is not None:
            start.cancel()
            await asyncio.wait([start])
        if self._closed is None:
            self._closed = asyncio.ensure_future(self._close(timeout))
        elif timeout == 0 and self._client is not None:
            await asyncio.to_thread(self._client.shutdown, 0)
        await asyncio.shield(self._closed)

    # --- start and end ---

    async def _start_all(self) -> None:
        config, admin = self._config, self._config.admin
        listener = self._listener = self._bind(config.host, config.port)
        self.address = listener.getsockname()[:2]
        admin_listener = None if admin.port is None else self._bind(admin.host, admin.port)
        client = self._client = await client_class(self._engine).launch(self._engine)
        client.subscribe(self._on_status)
        # In the engine cores' directory: whoever survives this process removes it.
        directory = Path(client.addresses.directory)
        metrics_directory = directory / "metrics"
        metrics_directory.mkdir(mode=0o700)
        report = directory / "server.json"
        self._servers = ApiServers(
            config, client.addresses, listener, directory, metrics_directory, report, self._on_api_failure
        )
        self._reporter = Reporter(client, report, self._report)
        self._reporter.start()
        await self._servers.start()
        if admin_listener is not None:
            self.admin_address = admin_listener.getsockname()[:2]
            app = AdminApp(
                admin,
                client,
                self._servers,
                self._reporter,
                self._check_ready,
                functools.partial(render, metrics_directory, report),
            )
            server = HttpServer(app, config.receive_timeout)
            self._admin = server, asyncio.ensure_future(server.serve([admin_listener]))

    async def _close(self, timeout: float | None) -> None:
        if self._servers is not None:
            await self._servers.kill()
            self._servers.close()
        if self._admin is not None:
            server, task = self._admin
            server.force_exit = True
            server.drain(0)
            await asyncio.wait([task])
        if self._reporter is not None:
            await self._reporter.stop()
        if self._client is not None:
            await asyncio.to_thread(self._client.shutdown, timeout)
        for listener in self._listeners:
            listener.close()
        if not self._failure.done():
            self._failure.set_result(None)

    def _bind(self, host: str, port: int) -> socket.socket:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
            self._listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
        return listener

    # --- what happens meanwhile ---

    def _on_status(self, status: EngineStatus) -> None:
        client = self._client
        if client is None or self._failure.done():
            return
        try:
            client.validate_alive()
        except EngineDeadError as error:
            if not self._closing and not isinstance(error, ClientClosedError):
                self._fail(error)

    def _on_api_failure(self, error: OutboardError) -> None:
        if self._start is None:  # else it is raised there
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # somebody may only ask later

    def _check_ready(self) -> None:
        if self._draining or self._closing or self._client is None:
            raise ApiError(503, "the server is shutting down", "server_error", "shutting_down")
        try:
            self._client.check_health()
        except OutboardError as error:
            raise to_api_error(error) from None
        if self._servers is None or not self._servers.pids:
            raise ApiError(503, "no API process serves", "server_error", "no_api_process", retry_after=1)

    def _report(self) -> ServerReport:
        assert self._client is not None and self._servers is not None  # it is asked for by the reporter
        servers = self._servers
        return ServerReport(
            model=self._config.model_name(self._engine, self._client.engine_info),
            api_processes=servers.pids,
            api_restarts=servers.restarts,
            waiting=servers.page.waiting,
            refused=self._client.stats().get("refused", {}),
        )
