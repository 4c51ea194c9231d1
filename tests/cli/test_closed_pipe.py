"""Whoever reads the command's output may go: `outboard generate ... | head -c 1`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("nothing_left")

OUTBOARD = str(Path(sys.executable).with_name("outboard"))
# Longer than any test: only the closed pipe can end it.
ENDLESS = ["--engine", "mock", "--option", "step_ms=1", "--max-tokens", "100000000"]


def generate(*args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([OUTBOARD, "generate", "x", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_it_ends_with_status_1_and_says_nothing() -> None:
    with generate(*ENDLESS) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b"a"
        process.stdout.close()
        assert process.wait(20) == 1
        assert process.stderr.read() == b""


def test_in_a_shell() -> None:
    command = f"{OUTBOARD} generate x {' '.join(ENDLESS)} | head -c 1; echo :${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == (b"a:1\n", b"")


def test_json_that_nobody_reads() -> None:
    """All of it is written at the end, when the reader has long gone."""
    with generate("--engine", "echo", "--json") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(20) == 1
        assert process.stderr.read() == b""
