"""What commands share: engine options from the command line, and errors as exit status (see `main`)."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import typer

from outboard.errors import ConfigError, InvalidRequestError, ModelFileError, OutboardError

__all__ = ["ENGINE_FAILURE", "USAGE", "exit_status", "parse_options"]

ENGINE_FAILURE = 1
USAGE = 2


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Engine options of `key=value` pairs. Values stay text, which the engine's annotations convert; lists and objects
    are JSON.

    Raises:
        ConfigError: a pair has no `=`, or its JSON is broken.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"--option takes key=value, not {pair!r}")
        try:
            options[key] = msgspec.json.decode(value) if value.startswith(("[", "{")) else value
        except msgspec.DecodeError as error:
            raise ConfigError(f"--option {key}: {value!r} is no JSON: {error}") from None
    return options


def _forget_stdout() -> None:
    """Has the interpreter's last flush of stdout go nowhere, instead of complaining."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


@contextmanager
def exit_status() -> Iterator[None]:
    """Prints an error of ours to stderr and exits with its status."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the rest of the process
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the locale cannot show
    try:
        yield
        sys.stdout.flush()
    except OutboardError as error:
        typer.echo(f"outboard: {error}", err=True)
        usage = isinstance(error, (ConfigError, InvalidRequestError)) and not isinstance(error, ModelFileError)
        raise typer.Exit(USAGE if usage else ENGINE_FAILURE) from None
    except OSError as error:  # of stdout: whoever read it has gone, or the disk is full
        _forget_stdout()
        if not isinstance(error, BrokenPipeError):
            typer.echo(f"outboard: cannot write: {error}", err=True)
        raise typer.Exit(ENGINE_FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except SystemExit:  # by a signal, perhaps because nobody reads what we write
        _forget_stdout()
        raise
