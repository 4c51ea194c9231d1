"""Engine cores of a client that was dropped end by its own hand: that was told as a death, and a restart to follow."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time

import pytest

from outboard import AsyncMPClient, EngineConfig, FaultConfig, RestartPolicy
from outboard.launch.launcher import Launcher

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_dropped_client_tells_of_no_death(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # The launcher's thread then wakes only as the process has ended, as it may at any time.
    monkeypatch.setattr(Launcher, "_wake", lambda self: None)

    async def start_and_drop() -> None:
        faults = FaultConfig(restart=RestartPolicy.on_failure())
        await AsyncMPClient.launch(EngineConfig(engine="echo", faults=faults))

    with caplog.at_level(logging.WARNING, "outboard"):
        asyncio.run(start_and_drop())
        gc.collect()
        deadline = time.monotonic() + 10
        while any(thread.name == "outboard-launcher" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not caplog.records
