"""What all clients have in common, and what those with an engine core in another process share: start and end."""

from __future__ import annotations

import asyncio
import os
import secrets
import struct
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from outboard.client.resources import Resources
from outboard.config import EngineConfig
from outboard.engine.loader import IMPORTING_ENGINE
from outboard.engines.registry import resolve_engine
from outboard.errors import ConfigError, EngineStartupError
from outboard.launch.startup import start_engine_core
from outboard.protocol.messages import EngineInfo, Init
from outboard.transport.session import SessionDirectory
from outboard.transport.sockets import (
    ControlServer,
    ZmqSocket,
    bind_input,
    bind_output,
    make_context,
    wait_for_peers,
)

__all__ = ["CoreEngine", "EngineCoreClient", "MPClient"]

# READY has come, so the engine core has connected already; this only bounds what cannot happen.
_CONNECT_TIMEOUT = 10.0


class CoreEngine(msgspec.Struct, frozen=True):
    """One engine core, as its client knows it.

    Attributes:
        rank: its index in the group.
        incarnation: how often it had been started before.
        identity: its ZeroMQ identity, made of both.
        pid: its process id.
        info: what it reported of itself when it was ready.
    """

    rank: int
    incarnation: int
    identity: bytes
    pid: int
    info: EngineInfo


class EngineCoreClient(ABC):
    """Drives engine cores; the subclasses differ in where these run and in how one waits for them."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Stops the engine core and frees everything. Idempotent and bounded.

        Args:
            timeout: seconds that the engine core gets to stop by itself; default `FaultConfig.shutdown_timeout`.
        """


class MPClient(EngineCoreClient):
    """A client whose engine core runs in a process of its own, which it starts and owns.

    The constructor blocks until the engine core is ready.

    Args:
        config: what to run; a bare engine name, reference or class stands for `EngineConfig(engine=...)`.
        client_index: index of this front end.
        cancel_fd: a file descriptor that becomes readable when start-up is to be given up.

    Raises:
        ConfigError: the engine, an option or a model file is wrong; a subclass says which.
        EngineStartupError: the engine core died or failed before it was ready, or was too slow
            (`EngineStartupTimeout`); says how and why. Whatever had been started is gone.

    Attributes:
        config: the whole configuration.
        client_index: index of this front end.
        core_engines: the engine cores.
    """

    def __init__(
        self, config: EngineConfig | str | type[Any], *, client_index: int = 0, cancel_fd: int | None = None
    ) -> None:
        self.config = config if isinstance(config, EngineConfig) else EngineConfig(engine=config)
        self.client_index = client_index
        self._epoch = secrets.randbits(64)
        self._resources, self._input_socket, self._output_socket, engine = _start(
            self.config, client_index, self._epoch, cancel_fd
        )
        self.core_engines: list[CoreEngine] = [engine]
        self._shutdown_lock = threading.Lock()
        self._closed = False
        # The finalizer must not reach the client, or it would never run.
        self._finalizer = weakref.finalize(self, self._resources.abandon)

    @property
    def engine_info(self) -> EngineInfo:
        """What the engine core reported of itself when it was ready."""
        return self.core_engines[0].info

    def shutdown(self, timeout: float | None = None) -> None:
        """Stops the engine core and frees everything: process, sockets, files.

        Idempotent; bounded by `timeout` and a moment to kill; callable from any thread, also after the event loop has
        closed. Whatever still waits ends with `ClientClosedError`. Blocks: on an event loop, prefer a thread
        (`await asyncio.to_thread(client.shutdown)`).

        Args:
            timeout: seconds that the engine core gets to stop by itself before it is killed; default
                `FaultConfig.shutdown_timeout`.
        """
        if os.getpid() != self._resources.creator:
            return  # a forked copy owns nothing
        with self._shutdown_lock:
            if self._closed:
                return
            self._closed = True
            self._finalizer.detach()
            self._on_owning_thread(self._stop_reading)
            self._resources.close(self.config.faults.shutdown_timeout if timeout is None else timeout)

    @abstractmethod
    def _stop_reading(self) -> None:
        """Ends what waits, and takes the sockets out of use."""

    def _on_owning_thread(self, function: Callable[[], None]) -> None:
        """Calls `function` where the sockets are used: on the loop if it runs in another thread, else here."""
        loop = self._resources.loop
        if loop is None or not loop.is_running() or _runs_here(loop):
            function()
            return
        done = threading.Event()

        def call() -> None:
            try:
                function()
            finally:
                done.set()

        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:  # it was closed in between
            function()
            return
        # A loop that stops before its turn comes never calls.
        deadline = time.monotonic() + self.config.faults.shutdown_timeout
        while not done.wait(0.05):
            if not loop.is_running() or time.monotonic() > deadline:
                function()
                return


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _start(
    config: EngineConfig, client_index: int, epoch: int, cancel_fd: int | None
) -> tuple[Resources, ZmqSocket, ZmqSocket, CoreEngine]:
    """Makes the session and its sockets, and starts the engine core; leaves nothing behind where that fails."""
    if importing := os.environ.get(IMPORTING_ENGINE):
        raise ConfigError(
            f"a client was started while an engine-core process imports {importing}; put whatever starts one under "
            'if __name__ == "__main__":'
        )
    reference = resolve_engine(config.engine)
    session = SessionDirectory()
    context = make_context()
    try:
        # Names are never used twice: what a dead peer still holds for an old name must not reach a new socket.
        nonce = secrets.token_hex(4)
        control_address = session.address("control")
        init = Init(
            engine=reference,
            options=config.options,
            sys_path=_search_path(),
            rank=0,
            incarnation=0,
            epoch=epoch,
            client_index=client_index,
            identity=b"engine" + struct.pack(">HI", 0, 0),
            input_address=session.address(f"in-{nonce}"),
            output_address=session.address(f"out-{nonce}"),
            high_water_mark=config.transport.high_water_mark,
            max_message_bytes=config.transport.max_message_bytes,
            inline_bytes=config.transport.inline_bytes,
        )
        control = ControlServer(context, control_address)
        input_socket = bind_input(context, init.input_address, config.transport)
        output_socket = bind_output(context, init.output_address, config.transport)
        process, info = start_engine_core(
            init,
            session=session,
            control=control,
            control_address=control_address,
            faults=config.faults,
            cancel_fd=cancel_fd,
        )
        resources = Resources(context, session, control, input_socket, output_socket, process)
        if wait_for_peers(input_socket, {init.identity}, _CONNECT_TIMEOUT):
            resources.close(timeout=0)
            raise EngineStartupError("the engine core said READY but did not connect its input socket")
    except BaseException:
        context.destroy(linger=0)
        session.remove()
        raise
    assert process.engine_pid is not None  # HELLO told it
    return resources, input_socket, output_socket, CoreEngine(0, 0, init.identity, process.engine_pid, info)


def _search_path() -> list[str]:
    """Where the front end finds modules: its `sys.path`, and the working directory behind it."""
    here = os.getcwd()  # noqa: PTH109 - a plain string is wanted
    return [path or here for path in sys.path] + [here]
