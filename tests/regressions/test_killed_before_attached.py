"""A front end that is killed after it has joined and before it has attached left its sockets until the group's end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from outboard import launch_engines

pytestmark = pytest.mark.usefixtures("nothing_left")

FRONT_END = """
import os, signal, sys, msgspec
from outboard import AsyncMPClient, EngineAddresses
from outboard.client.link import Link

Link.invitation = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # in place of `Attach`
AsyncMPClient(addresses=msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineAddresses))
"""


def test_a_front_end_killed_before_it_attached_leaves_no_socket(short_tmp: Path) -> None:
    with launch_engines("echo") as group:
        front_end = subprocess.run(
            [sys.executable, "-c", FRONT_END], input=msgspec.msgpack.encode(group.addresses), timeout=20
        )
        assert front_end.returncode == -signal.SIGKILL
        deadline = time.monotonic() + 5
        while (sockets := [path.name for path in Path(group.addresses.directory).iterdir()]) != ["control"]:
            assert time.monotonic() < deadline, sockets
            time.sleep(0.01)
