"""What the command prints is what its user's locale cannot show, or nobody reads: a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OUTBOARD = str(Path(sys.executable).with_name("outboard"))


def _generate(prompt: bytes, *args: str, **kwargs: object) -> subprocess.CompletedProcess[bytes]:
    command = [OUTBOARD.encode(), b"generate", prompt, b"--engine", b"echo", *(arg.encode() for arg in args)]
    return subprocess.run(command, timeout=30, stderr=subprocess.PIPE, **kwargs)  # type: ignore[call-overload,no-any-return]


def test_an_ascii_terminal() -> None:
    done = _generate("é😀".encode(), stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert b"Traceback" not in done.stderr


def test_json_of_an_argument_that_is_no_utf8() -> None:
    done = _generate(b"a\xffb", "--json", stdout=subprocess.PIPE)
    assert b"Traceback" not in done.stderr


def test_a_full_disk() -> None:
    with Path("/dev/full").open("wb") as full:
        assert b"Traceback" not in _generate(b"abc", stdout=full).stderr


def test_a_closed_stdout() -> None:
    done = _generate(b"abc", preexec_fn=lambda: os.close(1))
    assert b"Traceback" not in done.stderr
