"""The commands, put together."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from outboard._version import __version__
from outboard.cli import engines, generate, models, node, serve

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run an inference engine in a process of its own.",
)
app.command("generate")(generate.generate)
app.command("serve")(serve.serve)
app.command("node")(node.node)
app.command("engines")(engines.engines)
app.add_typer(models.app, name="models")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outboard {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
