"""`outboard engines`: what engines there are, and their options."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from outboard.cli.options import exit_status
from outboard.engine.loader import engine_options, load_engine_class
from outboard.engines.registry import ENGINES, resolve_engine

__all__ = ["engines"]


def engines(
    engine: Annotated[
        list[str] | None, typer.Argument(help="Names, module:Class or path.py:Class; default: all that come along.")
    ] = None,
) -> None:
    """Lists engines and their options."""
    console = Console(soft_wrap=True)
    with exit_status():
        for name in engine or ENGINES:
            cls = load_engine_class(resolve_engine(name))
            summary = (cls.__doc__ or "").strip().partition("\n")[0]
            console.print(f"[bold]{escape(name)}[/bold]  {escape(summary)}", highlight=False)
            options = engine_options(cls)
            if options is None:
                console.print("    takes any option", highlight=False)
            for option in options or ():
                console.print(f"    {escape(str(option))}", highlight=False)
