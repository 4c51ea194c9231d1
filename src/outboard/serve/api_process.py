"""An API process: `python -m outboard.serve.api_process`, started by the supervisor under a warden."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from outboard.errors import OutboardError
from outboard.frontend.llm import AsyncLLM
from outboard.observe.logs import configure_logs, log_request
from outboard.observe.metrics import ServerMetrics, render
from outboard.observe.record import OnRequest
from outboard.serve.app import ApiApp
from outboard.serve.channel import CHANNEL_PATH, Channel, Drain, Drained, Serving, SetLogLevel, Setup, ToApi
from outboard.serve.channel import receive_setup as receive
from outboard.serve.http_server import HttpServer, allow_many_connections
from outboard.serve.limits import Admission, LimitsPage
from outboard.serve.service import Service

__all__ = ["main"]

logger = logging.getLogger("outboard.serve")


class ApiProcess:
    """One API process. It ends when it has drained, and at once when the supervisor is gone.

    Args:
        setup: what the supervisor says.
        connection: to it.
        descriptors: the listening socket's, and the limits page's.
    """

    def __init__(self, setup: Setup, connection: socket.socket, descriptors: list[int]) -> None:
        self._setup = setup
        self._connection = connection
        listener, limits = descriptors
        self._listener = socket.socket(fileno=listener)
        config = setup.config
        page = LimitsPage(limits, config.api_server_count, len(config.api_keys))
        os.close(limits)
        self._admission = Admission(page, setup.index, config.max_waiting, config.max_concurrent_per_key)
        self._service: Service | None = None
        self._server: HttpServer | None = None
        self._drain_timeout: float | None = None

    async def run(self) -> None:
        """Serves until it is to end.

        Raises:
            OutboardError: it could not join the engine cores.
        """
        setup, config = self._setup, self._setup.config
        channel: Channel[ToApi] = Channel(self._connection, ToApi, self._on_message, self._on_orphaned)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._drain, 0.0)
        async with AsyncLLM(addresses=setup.addresses, client_index=setup.client_index) as llm:
            observers: list[OnRequest] = []

            async def render_metrics() -> bytes:
                await each_second()
                # In a thread: it reads the files of all API processes.
                return await asyncio.to_thread(render, Path(setup.metrics_directory), Path(setup.report))

            service = self._service = Service(llm, config, self._admission, observers, render_metrics)
            metrics = ServerMetrics(service.model)
            observers += [metrics.on_request, log_request]
            if config.traces is not None:
                from outboard.observe.traces import RequestTracer  # OpenTelemetry need not be there otherwise

                tracer = RequestTracer(config.traces, service.model)
                observers.append(tracer.on_request)

            async def each_second() -> None:
                metrics.tell_tokens(service.completion_tokens)
                metrics.tell_refused(llm.client.stats().get("refused", {}))

            server = self._server = HttpServer(
                ApiApp(service), config.receive_timeout, lambda: channel.send(Serving()), each_second
            )
            if self._drain_timeout is not None:
                self._drain(self._drain_timeout)
            # What has been made so far stays: no collection need look at it again.
            gc.collect()
            gc.freeze()
            await server.serve([self._listener])
            metrics.tell_tokens(service.completion_tokens)
            channel.send(Drained(service.cut))
            if config.traces is not None:
                await asyncio.to_thread(tracer.close)
        channel.close()

    def _on_message(self, message: ToApi) -> None:
        match message:
            case Drain():
                self._drain(message.timeout)
            case SetLogLevel():
                logging.getLogger("outboard").setLevel(message.level.upper())

    def _drain(self, timeout: float) -> None:
        self._drain_timeout = timeout
        if self._service is not None:
            self._service.draining = True
            asyncio.get_running_loop().call_later(timeout, self._service.cut_all)
        if self._server is not None:
            # Those that are cut get an answer that says so, for which there is some time.
            self._server.drain(timeout + 2)

    def _on_orphaned(self) -> None:
        """There is nobody to serve for, and nothing to save: engine cores and sockets end with the supervisor."""
        os._exit(1)


def main() -> int:
    """Runs an API process; its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the supervisor
    connection, setup, descriptors = receive(Path(os.environ.pop(CHANNEL_PATH)))
    configure_logs(setup.config.log_format, setup.config.log_level)
    allow_many_connections()
    process = ApiProcess(setup, connection, descriptors)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(process.run())
    except OutboardError as error:
        logger.error("the API process cannot go on: %s", error)
        return 1
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
