"""Two hundred starts and stops: nothing adds up."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
from engine_scripts import System

from outboard.launch.process import EngineProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STARTS = 200


def leftovers(session: Path) -> dict[str, set[str]]:
    """What is there at this moment: descriptors, children, files, and processes that carry a mark of ours."""
    marked = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
        except OSError:
            continue
        if f"MANY_STARTS={session}\0".encode() in environment:
            marked.add(path.parent.name)
    return {
        "descriptors": {path.name for path in Path("/proc/self/fd").iterdir()},
        "children": System.children(),
        "threads": {thread.name for thread in threading.enumerate()},
        "shared memory": {path.name for path in Path("/dev/shm").iterdir()},
        "files": {path.name for path in session.iterdir()},
        "descendants": marked,
    }


def start_and_stop(system: System, session: Path, turn: int) -> None:
    """One life, ended in one of four ways."""
    process = EngineProcess.start({**os.environ, "MANY_STARTS": str(session)}, session, ["sleep", "100"])
    if turn % 2:
        system.eventually(lambda: process.engine_pid)
    if turn % 4 < 2:
        assert process.stop(10) == -signal.SIGTERM
        process.close()
    elif turn % 4 == 2:
        assert process.end(10) == -signal.SIGKILL
        process.close()
    else:
        process.abandon()


@pytest.mark.parametrize("at_once", [1, 16])
def test_two_hundred_starts_and_stops(
    system: System, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], at_once: int
) -> None:
    before = leftovers(tmp_path)
    turns: SimpleQueue[int] = SimpleQueue()
    for turn in range(STARTS):
        turns.put(turn)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not turns.empty():
                start_and_stop(system, tmp_path, turns.get(timeout=0))
        except Empty:  # another thread took the last
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert not failures
    system.eventually(lambda: leftovers(tmp_path) == before, 10)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert capfd.readouterr() == ("", "")
