"""A server that cannot start leaves nothing behind in the process that wanted it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from outboard import ConfigError, EngineConfig
from outboard.launch.process import EngineProcess
from outboard.serve.api_servers import ApiServerError, ApiServers
from outboard.serve.config import ServeConfig
from outboard.serve.supervisor import Supervisor


def sockets() -> list[str]:
    """What the sockets of this process are, by descriptor."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(fd.readlink()))
        except OSError:  # that of this listing
            continue
    return sorted(link for link in links if link.startswith("socket:"))


def spawn_nothing(servers: ApiServers, channel: Path) -> EngineProcess:
    return EngineProcess.start(dict(os.environ), channel.parent, [sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize(("engine", "error"), [("no_such_engine", ConfigError), ("echo", ApiServerError)])
def test_a_start_that_fails_leaves_no_socket_and_no_process(
    engine: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ApiServers, "spawn", spawn_nothing)

    async def start() -> list[str]:
        before = sockets()
        with pytest.raises(error):
            async with Supervisor(EngineConfig(engine=engine), ServeConfig(port=0)):
                raise AssertionError("it has started")
        return [one for one in sockets() if one not in before]

    children = set(psutil.Process().children(recursive=True))
    assert asyncio.run(start()) == []
    assert set(psutil.Process().children(recursive=True)) <= children
