"""`outboard node`: room for engine cores of a head on another machine."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from outboard.cli.network import head_address, secret_of
from outboard.cli.options import exit_status, parse_options
from outboard.errors import ConfigError
from outboard.launch.nodes.node import Node
from outboard.transport.curve import new_token_file
from outboard.transport.node_server import node_context

__all__ = ["node"]


def node(
    join: Annotated[
        str | None, typer.Option(metavar="HEAD[:PORT]", help="The head: a host name or an address; [...] around IPv6.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the secret that head and nodes share, of mode 0600.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="How many engine cores there is room for here.")] = 1,
    name: Annotated[str, typer.Option(help="What to call this node; default: its host name.")] = "",
    engine: Annotated[str, typer.Option(help="The only engine that may be run here; default: any.")] = "",
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option that this engine must have; may be given again."),
    ] = None,
    new_token: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only make a token file with a new secret, and exit.")
    ] = None,
) -> None:
    """Run engine cores for a head on another machine (`outboard serve --listen ...`).

    Joins the head, starts what it wants, and joins again whenever the head comes back. SIGTERM or Ctrl-C: engine cores
    may end what they are at; a second one ends them at once. See docs/many-machines.md.
    """
    with exit_status():
        if new_token is not None:
            new_token_file(new_token)
            typer.echo(f"outboard: made {new_token}; copy it to the head and to every node, for nobody else to read")
            return
        if join is None:
            raise ConfigError("a node needs --join HEAD[:PORT]")
        if ranks < 1:
            raise ConfigError(f"--ranks must be at least 1, not {ranks}")
        if option and not engine:
            raise ConfigError("--option says what the engine must have that --engine names: give both")
        address = head_address(join)
        secret = secret_of(token_file)
        logging.getLogger("outboard").setLevel(logging.INFO)
        context = node_context(secret)
        try:
            options = parse_options(option or [])
            run = Node(context, address, secret, name=name, ranks=ranks, engine=engine, options=options)
            with _signals_to(run.stop):
                typer.echo(f"outboard: node {run.name} joins {address}, with room for {ranks} engine core(s)")
                run.run()
            run.close()
        finally:
            context.term()


class _signals_to:
    """While it is entered, SIGINT and SIGTERM call a function."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __enter__(self) -> None:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, lambda *_: self._function()) for number in numbers}

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
