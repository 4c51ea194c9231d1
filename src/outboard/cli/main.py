"""The `outboard` command.

Exit status:
    0    success; also after a SIGINT (Ctrl-C) or SIGTERM, if the answer came to its end
    1    engine failure: it did not start, or it died, be it while it was drained
    2    usage: a wrong option, engine or request
    3    after a signal the answer did not come to its end in time, and was cut
    130  SIGINT ended it at once: a second one, or one during start-up or before
    143  the same by SIGTERM

This module imports next to nothing, so that a signal is answered well from the first moment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

__all__ = ["run"]


def run() -> None:
    """Entry point of the installed command."""
    _on_signals(_leave)
    _import_numpy()
    from outboard.cli.app import app

    _on_signals(_unwind)
    try:
        app()
    finally:
        _on_signals(_leave)


def _import_numpy() -> None:
    """Imports it such that the threads which its BLAS starts take no signals.

    The system gives a second signal that follows at once to any thread that takes it. The main thread, which alone runs
    handlers, then sleeps on in a write that nobody reads.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    import numpy  # noqa: F401

    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_signals(handler: Callable[[int, object], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _leave(number: int, frame: object) -> None:
    """There is nothing to clean up; an exception might be lost in the middle of an import, or printed."""
    os._exit(128 + number)


def _unwind(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
