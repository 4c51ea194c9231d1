"""Start-up of a client: its session, its sockets, and the engine core at their other end."""

from __future__ import annotations

import os
import secrets
import struct
import sys
from contextlib import ExitStack
from pathlib import PurePath
from typing import Any

import msgspec

from outboard.client.resources import Resources
from outboard.config import EngineConfig
from outboard.engine.loader import IMPORTING_ENGINE
from outboard.engines.registry import resolve_engine
from outboard.errors import ConfigError, EngineStartupError
from outboard.launch.startup import start_engine_core
from outboard.protocol.messages import EngineInfo, Init
from outboard.protocol.shm_pair import SharedMemory
from outboard.protocol.tensors import is_scalar
from outboard.transport.session import SessionDirectory
from outboard.transport.sockets import (
    ControlServer,
    ZmqSocket,
    bind_input,
    bind_output,
    make_context,
    wait_for_peers,
)

__all__ = ["CoreEngine", "connect"]

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
        typed_utilities: methods whose results are converted by their annotations.
    """

    rank: int
    incarnation: int
    identity: bytes
    pid: int
    info: EngineInfo
    typed_utilities: frozenset[str] = frozenset()


def connect(
    config: EngineConfig, client_index: int, epoch: int, cancel_fd: int | None
) -> tuple[Resources, ZmqSocket, ZmqSocket, CoreEngine]:
    """Makes the session and its sockets, and starts the engine core; leaves nothing behind where that fails."""
    if importing := os.environ.get(IMPORTING_ENGINE):
        raise ConfigError(
            f"a client was started while an engine-core process imports {importing}; put whatever starts one under "
            'if __name__ == "__main__":'
        )
    reference = resolve_engine(config.engine)
    options = _sendable_options(config.options)
    with ExitStack() as undo:
        session = SessionDirectory()
        undo.callback(session.remove)
        context = make_context()
        undo.callback(context.destroy, linger=0)
        memory = SharedMemory.offer(config.transport.shared_memory_limit)
        undo.callback(memory.close)
        # Names are never used twice: what a dead peer still holds for an old name must not reach a new socket.
        nonce = secrets.token_hex(4)
        control_address = session.address("control")
        init = Init(
            engine=reference,
            options=options,
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
            shared_memory_bytes=config.transport.shared_memory_bytes,
            arena=memory.address,
        )
        control = ControlServer(context, control_address)
        input_socket = bind_input(context, init.input_address, config.transport)
        output_socket = bind_output(context, init.output_address, config.transport)
        process, ready = start_engine_core(
            init,
            session=session,
            control=control,
            control_address=control_address,
            faults=config.faults,
            cancel_fd=cancel_fd,
        )
        assert process.engine_pid is not None  # HELLO told it
        resources = Resources(context, session, control, input_socket, output_socket, process)
        resources.memory = memory
        memory.attach(process.engine_pid)
        if wait_for_peers(input_socket, {init.identity}, _CONNECT_TIMEOUT):
            resources.close(timeout=0)
            raise EngineStartupError("the engine core said READY but did not connect its input socket")
        undo.pop_all()
    engine = CoreEngine(0, 0, init.identity, process.engine_pid, ready.info, frozenset(ready.typed_utilities))
    return resources, input_socket, output_socket, engine


def _search_path() -> list[str]:
    """Where the front end finds modules: its `sys.path`, and the working directory behind it."""
    paths = [path for path in sys.path if isinstance(path, str)]
    try:
        here = os.getcwd()  # noqa: PTH109 - a plain string is wanted
    except FileNotFoundError:  # it has been deleted
        return [path for path in paths if path]
    return [path or here for path in paths] + [here]


def _sendable_options(options: dict[str, Any]) -> dict[str, Any]:
    """Engine options as plain msgpack values: paths become text, numpy scalars numbers.

    Raises:
        ConfigError: a value cannot be sent.
    """
    try:
        plain: dict[str, Any] = msgspec.to_builtins(options, enc_hook=_plain)
        msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"the engine's options cannot be sent to it: {error}; use msgpack values") from error
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if is_scalar(value):
        return value.item()
    raise TypeError(f"no value of type {type(value).__module__}.{type(value).__qualname__}")
