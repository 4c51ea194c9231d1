"""Leaves the signals that people send to the main thread, which alone runs Python's handlers."""

from __future__ import annotations

import signal

__all__ = ["leave_signals_to_main"]


def leave_signals_to_main() -> None:
    """From now on the calling thread takes no SIGINT and no SIGTERM. Processes that it starts must unblock them.

    The system gives a second signal that follows at once to any thread that takes it; what the main one waits for, such
    as a write to a pipe that nobody reads, is then not interrupted, and no handler runs.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
