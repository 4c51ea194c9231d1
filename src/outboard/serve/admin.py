"""Administration, on a port of its own: the state of everything, and what operators may change. Changes are audited."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outboard.client.async_mp import AsyncMPClient
from outboard.client.data_parallel import DPLBAsyncMPClient
from outboard.errors import (
    ConfigError,
    OutboardError,
    ScaleError,
    ScaleInProgressError,
    UnsupportedError,
    UtilityError,
    UtilityTimeoutError,
)
from outboard.protocol.control import EngineState
from outboard.protocol.scaling import (
    ScaleProgress,
)
from outboard.serve.api_servers import ApiServers
from outboard.serve.app import error_response, json_response
from outboard.serve.config import AdminConfig
from outboard.serve.errors import ApiError, to_api_error
from outboard.serve.exchange import Exchange
from outboard.serve.keys import Keys
from outboard.serve.reporter import Reporter

__all__ = ["AdminApp"]

_audit = logging.getLogger("outboard.audit")

_T = TypeVar("_T")
_MOST_BYTES = 64 << 10
_BODY_TIMEOUT = 10.0
# Controls are answered between two steps, and some of them load weights.
_CALL_TIMEOUT = 300.0


class _Nothing(msgspec.Struct):
    pass


class _Pause(msgspec.Struct):
    mode: Literal["abort", "wait", "keep"] = "abort"


class _Sleep(msgspec.Struct):
    level: Literal[1, 2] = 1


class _Wake(msgspec.Struct):
    tags: list[str] | None = None


class _Scale(msgspec.Struct):
    data_parallel_size: int
    drain_timeout: float = 60.0
    timeout: float | None = None


class _Profile(msgspec.Struct):
    path: str | None = None


class _LogLevel(msgspec.Struct):
    level: Literal["debug", "info", "warning", "error"]


class AdminApp:
    """An ASGI application.

    Args:
        config: the key.
        client: to the engine cores.
        servers: the API processes.
        reporter: what is known.
        check_ready: raises what keeps requests from being served.
        render_metrics: the page for Prometheus; called in a thread.
    """

    def __init__(
        self,
        config: AdminConfig,
        client: AsyncMPClient,
        servers: ApiServers,
        reporter: Reporter,
        check_ready: Callable[[], None],
        render_metrics: Callable[[], bytes],
    ) -> None:
        self._keys = Keys([config.key] if config.key else [])
        self._client = client
        self._servers = servers
        self._reporter = reporter
        self._check_ready = check_ready
        self._render_metrics = render_metrics
        self._scale_state: dict[str, Any] | None = None
        change = self._change
        self._app = Starlette(
            routes=[
                Route("/admin/engines", self._engines, methods=["GET"]),
                change("/admin/pause", _Pause, self._pause),
                change("/admin/resume", _Nothing, self._resume),
                change("/admin/sleep", _Sleep, self._sleep),
                change("/admin/wake", _Wake, self._wake),
                change("/admin/scale", _Scale, self._scale),
                change("/admin/engines/{rank:int}/restart", _Nothing, self._restart),
                change("/admin/profile/start", _Profile, self._start_profile),
                change("/admin/profile/stop", _Nothing, self._stop_profile),
                change("/admin/log-level", _LogLevel, self._set_log_level),
                Route("/livez", self._livez, methods=["GET"]),
                Route("/readyz", self._readyz, methods=["GET"]),
                Route("/health", self._readyz, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
            ],
            exception_handlers={
                ApiError: error_response,
                OutboardError: _error_response,
                HTTPException: error_response,
                Exception: error_response,
            },
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    # --- what there is ---

    async def _engines(self, request: Request) -> Response:
        self._exchange(request)
        report = msgspec.to_builtins(self._reporter.report())
        return json_response({**report, "scale": self._scale_state})

    async def _livez(self, request: Request) -> Response:
        return Response()

    async def _readyz(self, request: Request) -> Response:
        self._check_ready()
        return Response()

    async def _metrics(self, request: Request) -> Response:
        page = await asyncio.to_thread(self._render_metrics)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    # --- what can be changed ---

    async def _pause(self, request: Request, asked: _Pause) -> Any:
        await self._call("pause_generation", asked.mode)

    async def _resume(self, request: Request, asked: _Nothing) -> Any:
        await self._call("resume_generation")

    async def _sleep(self, request: Request, asked: _Sleep) -> Any:
        await self._call("sleep", asked.level)

    async def _wake(self, request: Request, asked: _Wake) -> Any:
        await self._call("wake_up", asked.tags)

    async def _start_profile(self, request: Request, asked: _Profile) -> Any:
        if asked.path is not None and len(self._client.core_engines) > 1:
            raise ApiError(400, "several engine cores cannot write to one path: leave it out", param="path")
        return {"paths": await self._call("start_profile", asked.path)}

    async def _stop_profile(self, request: Request, asked: _Nothing) -> Any:
        return {"paths": await self._call("stop_profile")}

    async def _scale(self, request: Request, asked: _Scale) -> Any:
        client = self._client
        if not isinstance(client, DPLBAsyncMPClient):
            raise UnsupportedError("this server has one rank for good: start it with --max-data-parallel-size above 1")
        await client.scale(
            asked.data_parallel_size,
            timeout=asked.timeout,
            drain=asked.drain_timeout,
            on_progress=self._on_scale_progress,
        )
        return {"data_parallel_size": client.data_parallel_size}

    def _on_scale_progress(self, progress: ScaleProgress) -> None:
        self._scale_state = {"state": progress.state.name, "detail": msgspec.to_builtins(progress)}
        _audit.info("scale: %s", progress.state.name)

    async def _restart(self, request: Request, asked: _Nothing) -> Any:
        rank = request.path_params["rank"]
        status = next((one for one in self._client.engine_status if one.rank == rank), None)
        if status is None:
            raise ApiError(404, f"there is no engine core of rank {rank}", code="no_such_rank")
        if not self._client.config.faults.restart.max_restarts:
            raise ApiError(
                409, "an engine core that ends stays gone here: start the server with --restart on-failure",
                code="no_restarts",
            )  # fmt: skip
        if status.state not in (EngineState.READY, EngineState.STALLED):
            raise ApiError(409, f"engine core rank {rank} is {status.state.name}", code="not_running")
        self._client.kill_engine(rank, f"Engine core rank {rank} (pid {status.pid}) was restarted by an operator.")
        return {"rank": rank, "incarnation": status.incarnation}

    async def _set_log_level(self, request: Request, asked: _LogLevel) -> Any:
        logging.getLogger("outboard").setLevel(asked.level.upper())
        self._servers.set_log_level(asked.level)

    # --- around all that ---

    async def _call(self, method: str, *args: Any) -> Any:
        client = self._client
        if isinstance(client, DPLBAsyncMPClient):
            return await client.call_utility_all_async(method, *args, timeout=_CALL_TIMEOUT)
        return [await client.call_utility_async(method, *args, timeout=_CALL_TIMEOUT)]

    def _change(self, path: str, kind: type[_T], handler: Callable[[Request, _T], Awaitable[Any]]) -> Route:
        return Route(path, functools.partial(self._audited, kind, handler), methods=["POST"])

    async def _audited(
        self, kind: type[_T], handler: Callable[[Request, _T], Awaitable[Any]], request: Request
    ) -> Response:
        facts = {"client": request.client.host if request.client else ""}
        try:
            exchange = self._exchange(request)
            facts["request_id"] = exchange.request_id
            asked = await exchange.read(kind, _MOST_BYTES, _BODY_TIMEOUT, empty=b"{}")
        except Exception as error:
            _audit.warning("%s: refused: %s", request.url.path, str(error).partition("\n")[0], extra=facts)
            raise
        what = f"{request.url.path} {msgspec.json.encode(asked).decode()}"
        _audit.info("%s: asked", what, extra=facts)
        try:
            done = await handler(request, asked)
        except Exception as error:
            _audit.warning("%s: failed: %s", what, str(error).partition("\n")[0], extra=facts)
            raise
        _audit.info("%s: done", what, extra=facts)
        return json_response(done or {})

    def _exchange(self, request: Request) -> Exchange:
        """With its key checked."""
        exchange = Exchange(request.scope, request.receive, request._send)  # type: ignore[arg-type]
        if self._keys.find(exchange.headers.get(b"authorization", b"")) == -1:
            raise ApiError(401, "administration wants its key, as Authorization: Bearer KEY", code="invalid_api_key")
        return exchange


async def _error_response(request: Request, error: Exception) -> Response:
    """Errors of operators' own doing have statuses of their own."""
    told: Exception = error
    match error:
        case ConfigError():
            told = ApiError(400, str(error), code="invalid_value")
        case ScaleInProgressError():
            told = ApiError(409, str(error), code="scale_in_progress", retry_after=1)
        case UnsupportedError():
            told = ApiError(409, str(error), code="unsupported")
        case UtilityTimeoutError():
            told = ApiError(504, str(error), "server_error", "timeout")
        case ScaleError() | UtilityError():
            told = ApiError(500, str(error), "server_error", "failed")
    return await error_response(request, told if told is not error else to_api_error(error))
