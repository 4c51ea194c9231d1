"""Nothing is pickled anywhere: the linter forbids what would, and it is shown here that it does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FORBIDDEN = """
import pickle
import pickle as p
from pickle import loads
import _pickle
import cPickle
import marshal
import shelve
import dill
import cloudpickle
import joblib
import jsonpickle
import multiprocessing
import multiprocessing.reduction
from multiprocessing.reduction import ForkingPickler
from multiprocessing import Queue
from multiprocessing.connection import Client
from concurrent.futures import ProcessPoolExecutor
import concurrent.futures.process
import numpy; numpy.load("x")
import numpy as np; np.save("x", 1)
import torch; torch.load("x")
import torch.multiprocessing
def f():
    import pickle
if __debug__: import pickle
""".strip()

ALLOWED = """
import msgspec
import concurrent.futures
from concurrent.futures import Future, ThreadPoolExecutor
import numpy as np; np.frombuffer(b"")
""".strip()


def banned(text: str) -> set[int]:
    """The lines of a module of ours that the linter rejects as forbidden."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "--stdin-filename"]
    result = subprocess.run(
        [*command, "src/outboard/example.py", "-"], cwd=ROOT, input=text, capture_output=True, text=True, timeout=30
    )
    found = re.findall(r":(\d+):\d+: TID251 ", result.stdout)
    assert result.returncode in (0, 1), result.stderr
    return set(map(int, found))


def test_what_pickles_is_rejected() -> None:
    lines = FORBIDDEN.splitlines()
    expected = {number for number, line in enumerate(lines, 1) if not line.startswith("def ")}
    assert {lines[number - 1] for number in expected - banned(FORBIDDEN)} == set()


def test_what_does_not_pickle_is_not() -> None:
    assert banned(ALLOWED) == set()


@pytest.mark.parametrize("word", ["send_pyobj", "recv_pyobj", "allow_pickle=True", "noqa: TID251", "__reduce", "eval("])
def test_no_other_way_in(word: str) -> None:
    """Methods the linter cannot know the owners of, such as those of ZeroMQ's sockets; and exceptions to its rule."""
    assert not [
        path for path in (ROOT / "src").rglob("*.py") if re.search(rf"(?<!\w){re.escape(word)}", path.read_text())
    ]
