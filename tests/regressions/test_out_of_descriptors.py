"""Out of file descriptors: start-up raises ZeroMQ's own error and leaves its session directory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

CODE = """
import os, resource
from outboard import AsyncMPClient, OutboardError
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for spare in range(0, 24):
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for fd in held[:spare]:
        os.close(fd)
    try:
        AsyncMPClient("echo").shutdown()
    except Exception as error:
        assert isinstance(error, (OutboardError, OSError)), repr(error)
    for fd in held[spare:]:
        os.close(fd)
"""


def test_no_descriptors_left(short_tmp: Path) -> None:
    env = {**os.environ, "TMPDIR": str(short_tmp)}
    before = set(Path("/tmp").glob("outboard-*"))  # where sessions go if TMPDIR cannot be used
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=45, env=env)
    assert done.returncode == 0, done.stderr[-500:]
    assert not list(short_tmp.iterdir())
    suspects = {path for path in Path("/tmp").glob("outboard-*") if path not in before}
    deadline = time.monotonic() + 10  # others' sessions come and go; what we left would stay
    while any(_is_empty(path) for path in suspects):
        assert time.monotonic() < deadline, suspects
        time.sleep(0.05)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not list(path.iterdir())
