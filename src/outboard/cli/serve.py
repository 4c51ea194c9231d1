"""`outboard serve`: an engine behind an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated, Literal

import typer

from outboard.cli.network import DEFAULT_PORT, head_network
from outboard.cli.options import exit_status, parse_options
from outboard.cli.ray import ray_placement
from outboard.config import EngineConfig, FaultConfig, ParallelConfig, RestartPolicy
from outboard.dp.balancing import make_policy
from outboard.errors import ConfigError
from outboard.frontend.signals import ShutdownSignals

__all__ = ["serve"]

_DEFAULTS = FaultConfig()
_API, _LIMITS, _ENGINES, _FAULTS, _OPERATION = "API", "Limits", "Engine cores", "Faults", "Operation"
_NODES = "Nodes: engine cores on other machines"
_RAY = "Ray: engine cores in a Ray cluster"


def serve(
    engine: Annotated[str, typer.Argument(help="A name (see `outboard engines`), module:Class or path.py:Class.")],
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the engine; may be given again.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_API)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", rich_help_panel=_API)] = 8000,
    api_server_count: Annotated[
        int, typer.Option(help="API processes; they share the port and the engine cores.", rich_help_panel=_API)
    ] = 1,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The model's name in the API; default: as the engine has it.", rich_help_panel=_API),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="OUTBOARD_API_KEY",
            help="Key that requests must show; may be given again. Others on this host can read arguments: prefer the "
            "environment or a file.",
            rich_help_panel=_API,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of such keys, one a line.", rich_help_panel=_API)
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait for their first token; more get 429.", rich_help_panel=_LIMITS)
    ] = 1024,
    max_concurrent_per_key: Annotated[
        int | None, typer.Option(help="Requests that one key may have in flight.", rich_help_panel=_LIMITS)
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="What a request may take as a whole.", rich_help_panel=_LIMITS)
    ] = 600.0,
    slow_reader_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="What a client may take to read what was written.", rich_help_panel=_LIMITS
        ),
    ] = 30.0,
    receive_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="For a request's header, and again its body.", rich_help_panel=_LIMITS),
    ] = 30.0,
    max_body_bytes: Annotated[int, typer.Option(help="Of a request.", rich_help_panel=_LIMITS)] = 32 << 20,
    data_parallel_size: Annotated[int, typer.Option(help="Engine cores.", rich_help_panel=_ENGINES)] = 1,
    max_data_parallel_size: Annotated[
        int | None,
        typer.Option(help="How many there may be after scaling; needed to scale from one.", rich_help_panel=_ENGINES),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="How to choose between them: least_loaded, round_robin, power_of_two or prefix_affine.",
            rich_help_panel=_ENGINES,
        ),
    ] = "least_loaded",
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="INTERFACE",
            help="Let nodes join (`outboard node`): a network interface, or an address of this host.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    local_ranks: Annotated[
        int | None,
        typer.Option(help="Engine cores on this host; the others are on nodes. Default: 1.", rich_help_panel=_NODES),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="Of the secret that nodes share; `outboard node --new-token` makes it.", rich_help_panel=_NODES
        ),
    ] = None,
    join_port: Annotated[
        int | None, typer.Option(help=f"Where nodes join. Default: {DEFAULT_PORT}.", rich_help_panel=_NODES)
    ] = None,
    ports: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-LAST",
            help="Ports of all other connections; default: any.",
            rich_help_panel=_NODES,
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Where nodes reach this host, if not there.", rich_help_panel=_NODES),
    ] = None,
    node_patience: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long a node may be silent. Default: 10.", rich_help_panel=_NODES),
    ] = None,
    backend: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Who starts engine cores: this host and nodes, or Ray alone.", rich_help_panel=_RAY),
    ] = "local",
    ray_resources: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=AMOUNT,...",
            help="What each takes, such as CPU=4,GPU=1. Default: CPU=1.",
            rich_help_panel=_RAY,
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Of the cluster, or auto: it must be there. Default: that of this host, or a new one.",
            rich_help_panel=_RAY,
        ),
    ] = None,
    room_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="How long a start may wait for room in it. Default: 60.", rich_help_panel=_RAY
        ),
    ] = None,
    restart: Annotated[
        Literal["never", "on-failure"], typer.Option(help="What to do when one dies.", rich_help_panel=_FAULTS)
    ] = "never",
    max_restarts: Annotated[int, typer.Option(help="In five minutes, each.", rich_help_panel=_FAULTS)] = 3,
    in_flight: Annotated[
        Literal["fail", "resubmit", "resume"],
        typer.Option(help="What becomes of its requests.", rich_help_panel=_FAULTS),
    ] = "fail",
    max_queued: Annotated[
        int,
        typer.Option(help="Requests that may wait for one to be started again; more get 503.", rich_help_panel=_FAULTS),
    ] = _DEFAULTS.max_queued,
    startup_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For an engine core to load.", rich_help_panel=_FAULTS)
    ] = _DEFAULTS.startup_timeout,
    shutdown_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="For requests to end after SIGTERM or Ctrl-C.", rich_help_panel=_FAULTS),
    ] = _DEFAULTS.shutdown_timeout,
    stall_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Without progress, it hangs.", rich_help_panel=_FAULTS)
    ] = _DEFAULTS.stall_timeout,
    stall_action: Annotated[
        Literal["report", "restart"], typer.Option(help="What to do then.", rich_help_panel=_FAULTS)
    ] = "report",
    admin_host: Annotated[str, typer.Option(help="For administration.", rich_help_panel=_OPERATION)] = "127.0.0.1",
    admin_port: Annotated[
        int | None, typer.Option(help="For administration; without one there is none.", rich_help_panel=_OPERATION)
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar="OUTBOARD_ADMIN_KEY",
            help="Key for administration; prefer the environment.",
            rich_help_panel=_OPERATION,
        ),
    ] = None,
    log_format: Annotated[Literal["text", "json"], typer.Option(rich_help_panel=_OPERATION)] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(rich_help_panel=_OPERATION)
    ] = "info",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Have prompts in the log.", rich_help_panel=_OPERATION)
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where to post traces, by OTLP over HTTP.", rich_help_panel=_OPERATION),
    ] = None,
) -> None:
    """Serves an engine behind an OpenAI-compatible API.

    After SIGTERM or Ctrl-C requests may go on to their end, for a while; a second one stops at once. Exit status: see
    docs/serve.md.
    """
    with exit_status():
        try:
            from outboard.observe.logs import configure_logs
            from outboard.serve.config import AdminConfig, ServeConfig
            from outboard.serve.supervisor import Supervisor
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error}: install what serving needs, with pip install 'outboard[serve]'") from None
        if otlp_traces_endpoint is not None:
            try:
                import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
            except ModuleNotFoundError as error:
                raise ConfigError(f"{error}: install what traces need, with pip install 'outboard[traces]'") from None
        config = ServeConfig(
            host=host,
            port=port,
            api_server_count=api_server_count,
            served_model_name=served_model_name,
            api_keys=[*(api_key or []), *_keys_of(api_key_file)],
            max_waiting=max_waiting,
            max_concurrent_per_key=max_concurrent_per_key,
            request_timeout=request_timeout,
            slow_reader_timeout=slow_reader_timeout,
            max_body_bytes=max_body_bytes,
            receive_timeout=receive_timeout,
            admin=AdminConfig(host=admin_host, port=admin_port, key=admin_key),
            log_format=log_format,
            log_level=log_level,
            log_prompts=log_prompts,
            traces=otlp_traces_endpoint,
        )
        make_policy(policy)  # a wrong one is refused also where there is one engine core
        faults = FaultConfig(
            startup_timeout=startup_timeout,
            shutdown_timeout=shutdown_timeout,
            stall_timeout=stall_timeout,
            stall_action=stall_action,
            restart=RestartPolicy.never() if restart == "never" else RestartPolicy.on_failure(max_restarts),
            in_flight=in_flight,
            max_queued=max_queued,
        )
        parallel = ParallelConfig(
            data_parallel_size=data_parallel_size,
            max_size=max_data_parallel_size,
            policy=policy,
            backend=backend,
            placement=ray_placement(backend, ray_resources, ray_address, room_timeout),
        )
        network = head_network(
            listen, advertise, join_port, ports, token_file, local_ranks, node_patience, with_token=backend == "local"
        )
        what = EngineConfig(
            engine=engine, options=parse_options(option or []), parallel=parallel, faults=faults, network=network
        )
        for name in ("OUTBOARD_API_KEY", "OUTBOARD_ADMIN_KEY"):
            os.environ.pop(name, None)  # engines have no business with them
        configure_logs(log_format, log_level)

        if network is not None and backend == "local":
            typer.echo(f"outboard: nodes may join at port {network.port} of {network.advertise or network.listen}")

        async def run() -> int:
            supervisor = Supervisor(what, config)
            async with ShutdownSignals(supervisor, timeout=shutdown_timeout, on_drain=_tell) as signals, supervisor:
                _say_where(supervisor.address, supervisor.admin_address, engine, what)
                await supervisor.wait()
            return signals.exit_status

        status = asyncio.run(run())
    if status:
        raise typer.Exit(status)


def _say_where(address: tuple[str, int], admin: tuple[str, int] | None, engine: str, what: EngineConfig) -> None:
    typer.echo(
        f"outboard: serving {engine} with {what.parallel.data_parallel_size} engine core(s) on {_url(address)}/v1; "
        f"page at {_url(address)}/ui/"
    )
    if admin is not None:
        typer.echo(f"outboard: administration on {_url(admin)}/admin/engines")


def _url(address: tuple[str, int]) -> str:
    host, port = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _keys_of(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: cannot read {path}: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file: there is no key in {path}")
    return keys


def _tell(received: signal.Signals) -> None:
    again = "Ctrl-C" if received is signal.SIGINT else received.name
    typer.echo(f"outboard: requests may end; {again} again stops at once", err=True)
