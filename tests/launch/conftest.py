"""Real engine-core processes from small scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_scripts import PRELUDE, System

from outboard.launch.process import EngineProcess


@pytest.fixture(scope="session")
def system() -> System:
    return System()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Starts the script as an engine core; stops it after the test. It tells into `tmp_path / "told"`."""
    started = []

    def start(script: str, env: dict[str, str] | None = None) -> EngineProcess:
        (tmp_path / "session").mkdir(exist_ok=True)
        argv = [sys.executable, "-I", "-S", "-c", PRELUDE + script, str(tmp_path / "told")]
        process = EngineProcess.start(dict(os.environ) if env is None else env, tmp_path / "session", argv)
        started.append(process)
        return process

    yield start
    for process in started:
        process.stop(0)
        process.close()
