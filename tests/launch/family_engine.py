"""An engine with workers of every kind, which tells the process ids of all once it is where the test wants it."""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path

from outboard import OutputBatch
from outboard.engines.echo import EchoEngine


def worker(double: bool, session: bool, clean: bool = False) -> int:
    """Starts `sleep`: double-forked or not, in a session of its own or not, with an empty environment or not."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        if session:
            os.setsid()
        if double and os.fork():
            os._exit(0)
        os.write(writer, b"%d" % os.getpid())
        os.execve("/bin/sleep", ["sleep", "1000"], {} if clean else dict(os.environ))
    os.close(writer)
    with os.fdopen(reader) as told:
        return int(told.read())


class FamilyEngine(EchoEngine):
    """Tells in the row's phase, and stays there.

    Args:
        told: the file for the process ids: the engine's, four that inherit its environment, one that does not.
        row: "idle", "start-up", "step", "native" or "stderr".
    """

    def __init__(self, told: str, row: str) -> None:
        super().__init__()
        workers = [worker(double, session) for double in (False, True) for session in (False, True)]
        self._family = [os.getpid(), *workers, worker(double=True, session=True, clean=True)]
        self._told = Path(told)
        self._row = row
        if row in ("idle", "start-up"):
            self._tell()
        if row == "start-up":
            time.sleep(1000)

    def _tell(self) -> None:
        part = self._told.with_suffix(".part")
        part.write_text(json.dumps(self._family))
        part.rename(self._told)

    def step(self, outputs: OutputBatch) -> None:
        if self._row == "stderr":
            for megabyte in range(10):
                os.write(2, (b"x" * 99 + b"\n") * 10_000)
                if megabyte == 2:
                    self._tell()
            return
        self._tell()
        if self._row == "native":
            ctypes.PyDLL(None).sleep(1000)
        time.sleep(1000)
