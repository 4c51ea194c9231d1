"""The ways in which an engine core can die or hang."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from typing import Literal, NoReturn

__all__ = ["EXIT_CODE", "HangKind", "Way", "die", "hang"]

Way = Literal["exception", "sys_exit", "_exit", "sigkill", "sigsegv", "abort"]
HangKind = Literal["sleep", "spin", "gil"]

EXIT_CODE = 7


def die(way: Way) -> NoReturn:
    """Ends this process.

    Args:
        way: "exception": raises RuntimeError("boom"); "sys_exit": raises SystemExit(7); "_exit": ends at once with
            status 7, with no clean-up; "sigkill", "sigsegv": a real signal, the second from a read of address 0;
            "abort": C's abort(), as a failed assertion in native code does.
    """
    print(f"about to die by {way}", file=sys.stderr, flush=True)
    match way:
        case "exception":
            raise RuntimeError("boom")
        case "sys_exit":
            raise SystemExit(EXIT_CODE)
        case "_exit":
            os._exit(EXIT_CODE)
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sigsegv":
            ctypes.string_at(0)
        case "abort":
            ctypes.CDLL(None).abort()
    raise AssertionError(f"still alive after {way!r}")


def hang(kind: HangKind, seconds: float) -> None:
    """Does nothing useful for so long.

    Args:
        kind: "sleep": as on a lock: other threads run; "spin": Python code that keeps a core busy: other threads run
            now and then; "gil": native code that keeps the GIL: no other thread of Python runs.
        seconds: for how long; with "gil" rounded up to whole seconds.
    """
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:  # again and again: a signal ends sleep() in C early
        if kind == "sleep":
            time.sleep(left)
        elif kind == "gil":
            ctypes.PyDLL(None).sleep(math.ceil(left))
