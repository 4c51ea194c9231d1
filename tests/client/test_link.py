"""A client's connection to one engine core, made by hand."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outboard import EngineConfig, TransportConfig
from outboard.client.link import Link
from outboard.client.pending import PendingTable
from outboard.client.receiver import Counters
from outboard.config import Sockets
from outboard.launch import reach
from outboard.transport.sockets import make_context


@pytest.mark.parametrize("sockets", ["unix", "zmq"])
@pytest.mark.parametrize("way", ["inputs", "outputs"])
@pytest.mark.usefixtures("as_configured")
def test_one_that_cannot_be_made_leaves_nothing(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, sockets: Sockets, way: str
) -> None:
    def refuse(*args: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(reach, f"listen_for_{way}", refuse)
    config = EngineConfig(engine="echo", transport=TransportConfig(sockets=sockets))
    status: Any = SimpleNamespace(rank=0, incarnation=0, node="")
    listener: Any = None
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    context = make_context()
    with pytest.raises(OSError, match="Too many open files"):
        Link(status, 0, 0, config, context, str(short_tmp), PendingTable(), listener, Counters(), lambda *_: None)
    closing = threading.Thread(target=context.term, daemon=True)  # blocks while there is a socket
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    assert not list(short_tmp.iterdir())
