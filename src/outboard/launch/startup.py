"""Starting one engine core: process, handshake, and what to raise where it does not get ready."""

from __future__ import annotations

import os
import time

import outboard.errors
from outboard.config import FaultConfig
from outboard.errors import ConfigError, EngineStartupError, EngineStartupTimeout
from outboard.launch.handshake import EngineHandshake, HandshakeState
from outboard.launch.process import EngineProcess
from outboard.protocol.environment import ChildEnvironment
from outboard.protocol.messages import ErrorReport, Init, Ready
from outboard.transport.session import SessionDirectory
from outboard.transport.sockets import ControlServer

__all__ = ["StartCancelled", "start_engine_core"]

# After an engine core has told why it fails, it needs a moment to end by itself.
_EXIT_GRACE = 1.0


class StartCancelled(Exception):
    """Whoever wanted this engine core has changed its mind; the process is gone."""


def start_engine_core(
    init: Init,
    *,
    session: SessionDirectory,
    control: ControlServer,
    control_address: str,
    faults: FaultConfig,
    cancel_fd: int | None = None,
) -> tuple[EngineProcess, Ready]:
    """Starts an engine-core process and waits until it is ready. Blocks.

    Args:
        init: what it shall run, and where it connects.
        session: its directory and token.
        control: the bound control socket; `control_address` is where the child finds it.
        faults: `startup_timeout` bounds the whole.
        cancel_fd: a file descriptor that becomes readable when the start is to be given up.

    Raises:
        ConfigError: the engine, an option or a model file is wrong (in its own subclass, the death report as cause).
        EngineStartupError: the process died or could not construct the engine.
        EngineStartupTimeout: it was not ready in time.
        StartCancelled: `cancel_fd` became readable.
    """
    environment = ChildEnvironment(control_address, session.token, init.rank, init.incarnation)
    process = EngineProcess.start({**os.environ, **environment.to_environ()}, session.path)
    try:
        ready = _shake_hands(process, init, session.token, control, faults, cancel_fd)
    except BaseException:
        process.kill()
        process.wait(_EXIT_GRACE)
        process.close()
        raise
    return process, ready


def _shake_hands(
    process: EngineProcess,
    init: Init,
    token: str,
    control: ControlServer,
    faults: FaultConfig,
    cancel_fd: int | None,
) -> Ready:
    handshake = EngineHandshake(token, init)
    deadline = time.monotonic() + faults.startup_timeout
    watched = [process.sentinel] if cancel_fd is None else [process.sentinel, cancel_fd]
    while True:
        ready = control.wait(watched, deadline - time.monotonic())
        while (message := control.receive()) is not None:
            sender, frames = message
            answer = handshake.receive(sender, frames)
            if handshake.hello is not None:
                process.identify(handshake.hello.pid, handshake.hello.pgid)
            if answer is not None:
                control.send(sender, answer)
        if handshake.ready is not None:
            return handshake.ready
        if handshake.failure is not None:
            process.wait(_EXIT_GRACE)
            raise _failure(process, init, handshake.failure)
        if process.sentinel in ready:
            process.wait(_EXIT_GRACE)
            raise process.death("start-up", EngineStartupError, rank=init.rank, incarnation=init.incarnation)
        if cancel_fd in ready:
            raise StartCancelled
        if time.monotonic() >= deadline:
            raise _timed_out(process, init, handshake.state, faults.startup_timeout)


def _failure(process: EngineProcess, init: Init, report: ErrorReport) -> ConfigError | EngineStartupError:
    error = process.death("start-up", EngineStartupError, rank=init.rank, incarnation=init.incarnation)
    if not error.remote_type:
        error.remote_type, error.remote_message, error.remote_traceback = report.type, report.message, report.traceback
    module, _, name = report.type.rpartition(".")
    known = getattr(outboard.errors, name, None) if module == outboard.errors.__name__ else None
    if isinstance(known, type) and issubclass(known, ConfigError):
        config_error = known(report.message)
        config_error.__cause__ = error
        return config_error
    return error


def _timed_out(
    process: EngineProcess, init: Init, state: HandshakeState, startup_timeout: float
) -> EngineStartupTimeout:
    return process.death(
        "start-up",
        EngineStartupTimeout,
        reason=f"engine core rank {init.rank} was not ready within {startup_timeout:g} s: {state.value}; "
        "it has been killed. If loading takes that long, raise FaultConfig(startup_timeout=...)",
        rank=init.rank,
        incarnation=init.incarnation,
    )
