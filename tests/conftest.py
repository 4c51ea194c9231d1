"""What all tests share: a loop with a time limit, and a look at what is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from outboard.config import TransportConfig
from outboard.launch import reach
from support import SOCKETS, Run, children


def pytest_configure() -> None:
    """Ctrl-C works as in a terminal, though a shell that started this in the background had SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is there now stays to the end: who looks for garbage need not look there, where it takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that is marked `no_cover` is not traced.

    In each process of several pytest-cov measures twice, and of these it ends one alone: what is within is traced on.
    """
    if item.get_closest_marker("no_cover") is None:
        return (yield)
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


_DEFAULT = TransportConfig().sockets
_LISTEN = {name: getattr(reach, name) for name in ("listen_for_inputs", "listen_for_outputs")}


def _with_chosen_sockets(listen: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(*args: Any) -> Any:
        return listen(*map(choose, args))

    def choose(arg: Any) -> Any:
        default = isinstance(arg, TransportConfig) and arg.sockets == _DEFAULT
        return msgspec.structs.replace(arg, sockets=SOCKETS) if default else arg

    return chosen


@pytest.fixture(autouse=True, scope="session")
def _chosen_sockets() -> Iterator[None]:
    """Clients of this process whose config does not choose take those of `support.SOCKETS`."""
    for name, listen in _LISTEN.items():
        setattr(reach, name, _with_chosen_sockets(listen))
    yield
    for name, listen in _LISTEN.items():
        setattr(reach, name, listen)


@pytest.fixture
def as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data takes the sockets that the test's config says, whatever `support.SOCKETS` is."""
    for name, listen in _LISTEN.items():
        monkeypatch.setattr(reach, name, listen)


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for sockets and temporary files of one test, with a path short enough for a Unix socket."""
    tmp_path_factory.getbasetemp()  # pytest's own must not be made inside
    path = Path(tempfile.mkdtemp(prefix="ob-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def nothing_left(short_tmp: Path) -> Iterator[None]:
    """Fails the test if it leaves a process, a file descriptor or a file behind."""
    descriptors = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    threads = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    _, alive = psutil.wait_procs(children(), timeout=5)
    assert not alive, f"processes left: {[child.cmdline() for child in alive]}"
    # Of a client that is dropped nobody waits for the launcher, whose last act is to remove its files.
    for thread in set(threading.enumerate()) - threads:
        if thread.name == "outboard-launcher":
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a launcher is left"
    files = list(short_tmp.iterdir())
    assert not files, f"files left: {files}"
    left = set(os.listdir("/proc/self/fd")) - descriptors  # noqa: PTH208
    # The default executor and ZeroMQ's garbage thread are the process's, and stay.
    assert len(left) <= 12, f"descriptors left: {[os.readlink(f'/proc/self/fd/{fd}') for fd in left]}"  # noqa: PTH115


def _run(awaitable: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(45):
            return await awaitable

    return asyncio.run(bounded())


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on a fresh event loop, of either kind, within a bound."""
    if request.param == "asyncio":
        return _run
    uvloop = pytest.importorskip("uvloop")

    def with_uvloop(awaitable: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(45):
                return await awaitable

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(bounded())

    return with_uvloop
