"""Who carries the mark is killed, nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outboard.launch import marked
from outboard.launch.marked import kill_marked

# All of them use the same marks, and would kill each other's processes.
pytestmark = pytest.mark.xdist_group("marked")

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def run() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def run(mark: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-I", "-S", "-c", WAITS]
        processes.append(subprocess.Popen(argv, env={"OUTBOARD_ENGINE": mark}, stdin=-1, stdout=-1, text=True))
        assert processes[-1].stdout.readline() == "up\n"
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("mark", "hit"), [("m1", True), ("m0 m1", True), ("m1 m2", True), ("m2", False), ("m11", False), ("", False)]
)
def test_the_mark_is_one_of_the_words(run: Callable[..., subprocess.Popen[str]], mark: str, hit: bool) -> None:
    process = run(mark)
    assert kill_marked("m1") == hit
    assert (process.poll() is None) != hit or process.wait(5) == -9


def test_many(run: Callable[..., subprocess.Popen[str]]) -> None:
    processes = [run("m3") for _ in range(8)]
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert kill_marked("m3") == 8
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert {process.wait(5) for process in processes} == {-9}
    assert kill_marked("m3") == 0


def test_one_that_is_seen_only_on_a_later_look(
    run: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = run("m4"), run("m4")
    listings = iter([[first.pid], [first.pid, later.pid], [first.pid, later.pid]])
    monkeypatch.setattr(marked, "_processes", lambda: next(listings))
    assert kill_marked("m4") == 2
    assert first.wait(5) == later.wait(5) == -9


def test_where_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(marked, "_PROC", tmp_path / "nothing")
    assert kill_marked("m5") == 0
