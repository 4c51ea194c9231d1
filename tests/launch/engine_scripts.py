"""What engine-core scripts of the tests start with, and what to ask the system about them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What every script starts with. `tell(x)` leaves a JSON value for the test, all at once.
PRELUDE = """
import json, os, signal, sys, time
def tell(value):
    with open(sys.argv[1] + ".part", "w") as file:
        json.dump(value, file)
    os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


class System:
    """Questions with a bound: an answer in time, or a failed test."""

    @staticmethod
    def eventually(condition: Callable[[], Any], seconds: float = 5.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, "this did not happen in time"
            time.sleep(0.002)
        return value

    @staticmethod
    def alive(pid: int) -> bool:
        """Whether it runs; a zombie does not."""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    @staticmethod
    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    @staticmethod
    def children_of(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    @staticmethod
    def children() -> set[str]:
        return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}

    def told(self, path: Path) -> Any:
        """What a script told."""
        return self.eventually(lambda: path.exists() and [json.loads(path.read_text())])[0]
