"""What a node sees of an engine core: its progress, its process, and the stack of a step that takes long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fake_head import eventually

from outboard.launch.nodes.watch import RankWatch
from outboard.protocol.nodes import WatchRank
from outboard.protocol.progress import BUSY, IDLE

# Says its descriptors, and takes a step for each line that it reads; the step lasts until the next line.
ENGINE = """
import sys
from outboard.engine.stacks import STACK_SIGNAL, dump_stacks_on_signal
from outboard.protocol.progress import BUSY, IDLE, ProgressPage

def step():
    page.alive(BUSY)
    print("busy", flush=True)
    sys.stdin.readline()
    page.stepped()
    page.alive(IDLE)
    page.took(3)

page = ProgressPage()
print(page.fd, dump_stacks_on_signal(), STACK_SIGNAL, flush=True)
while sys.stdin.readline():
    step()
    print("idle", flush=True)
"""

STALL_TIMEOUT = 0.2


class Engine:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        fds = map(int, self._read().split())
        self.watch = RankWatch(WatchRank(4, 2, self.process.pid, *fds), STALL_TIMEOUT)

    def next(self) -> str:
        """Begins a step, or ends it; what it is at then."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        return self._read().strip()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        self.watch.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_progress_is_what_the_page_says(engine: Engine) -> None:
    before = engine.watch.look()
    assert (before.rank, before.incarnation, before.steps, before.activity, before.taken) == (4, 2, 0, IDLE, {})
    assert before.process in ("sleeping", "running")
    assert engine.next() == "busy"
    assert engine.watch.look().activity == BUSY
    assert engine.next() == "idle"
    after = engine.watch.look()
    assert (after.steps, after.activity, after.taken, after.stack) == (1, IDLE, {3: 1}, "")


def test_the_stack_of_a_long_step_is_told_while_it_lasts(engine: Engine) -> None:
    for _ in range(2):
        engine.next()
        assert engine.watch.look().stack == ""  # it has just begun
        stack = eventually(lambda: engine.watch.look().stack)
        assert "in step" in stack
        assert engine.watch.look().stack == stack  # it was asked for once
        engine.next()
        assert engine.watch.look().stack == ""


def test_a_stopped_process_is_not_asked(engine: Engine) -> None:
    engine.next()
    os.kill(engine.process.pid, signal.SIGSTOP)
    progress = eventually(lambda: (found := engine.watch.look()).age > STALL_TIMEOUT and found)
    assert (progress.process, progress.stack) == ("stopped", "")
    os.kill(engine.process.pid, signal.SIGCONT)
    assert "in step" in eventually(lambda: engine.watch.look().stack)


def test_one_that_has_ended(engine: Engine) -> None:
    engine.next()
    engine.process.kill()
    assert eventually(lambda: engine.watch.look().process == "gone")
    engine.process.wait()
    eventually(lambda: engine.watch.look().age > STALL_TIMEOUT)
    assert engine.watch.look().stack == ""
    with pytest.raises(OSError):
        RankWatch(WatchRank(4, 2, engine.process.pid, 3, 4, 44), STALL_TIMEOUT)
