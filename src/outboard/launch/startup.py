"""What an engine core is told to run, and what to raise where it does not get ready."""

from __future__ import annotations

import os
import sys
from pathlib import PurePath
from typing import Any

import msgspec

import outboard.errors
from outboard.config import EngineConfig
from outboard.engine.loader import IMPORTING_ENGINE
from outboard.engines.registry import resolve_engine
from outboard.errors import ConfigError, EngineStartupError, EngineStartupTimeout
from outboard.launch.handshake import HandshakeState
from outboard.launch.rank_process import RankProcess
from outboard.protocol.messages import ErrorReport, Init
from outboard.protocol.tensors import is_scalar

__all__ = [
    "InitMaker",
    "StartCancelled",
    "search_path",
    "sendable_options",
    "startup_failure",
    "startup_timeout",
]


class StartCancelled(Exception):
    """Whoever wanted these engine cores has changed its mind; their processes are gone."""


class InitMaker:
    """Says what each rank is to run.

    Args:
        config: of all ranks.

    Attributes:
        engine: reference of what runs.

    Raises:
        ConfigError: no such engine, options that cannot be sent, or this is a process that imports an engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        if importing := os.environ.get(IMPORTING_ENGINE):
            raise ConfigError(
                f"a client was started while an engine-core process imports {importing}; put whatever starts one under "
                'if __name__ == "__main__":'
            )
        self._config = config
        self._sys_path = search_path()
        self.engine = resolve_engine(config.engine)
        for rank in range(max(config.parallel.data_parallel_size, len(config.parallel.rank_options))):
            self.init(rank, config.parallel.data_parallel_size)  # what is wrong with any is known now

    def init(self, rank: int, size: int, incarnation: int = 0, *, joining: bool = False) -> Init:
        """What a rank is to run, one of so many."""
        config, parallel, transport = self._config, self._config.parallel, self._config.transport
        return Init(
            engine=self.engine,
            options=sendable_options({**config.options, **parallel.of_rank(rank).options}),
            sys_path=self._sys_path,
            rank=rank,
            incarnation=incarnation,
            high_water_mark=transport.high_water_mark,
            max_message_bytes=transport.max_message_bytes,
            inline_bytes=transport.inline_bytes,
            shared_memory_bytes=transport.shared_memory_bytes,
            data_parallel_size=size,
            cpus=parallel.of_rank(rank).cpus,
            dp_sync_interval=parallel.dp_sync_interval,
            dp_sync_timeout=parallel.dp_sync_timeout,
            elastic=parallel.elastic,
            joining=joining,
            across_hosts=parallel.backend == "ray"
            or (config.network is not None and config.network.local_ranks < size),
        )


def startup_failure(process: RankProcess, init: Init, report: ErrorReport | None) -> ConfigError | EngineStartupError:
    """What to raise for an engine core that ended before it was ready; with what it told by FAILED, if anything.

    A `ConfigError` that its constructor raised comes back as what it is, with the death as its cause.
    """
    error = process.death("start-up", EngineStartupError, rank=init.rank, incarnation=init.incarnation)
    if report is None:
        return error
    if not error.remote_type:
        error.remote_type, error.remote_message, error.remote_traceback = report.type, report.message, report.traceback
    module, _, name = report.type.rpartition(".")
    known = getattr(outboard.errors, name, None) if module == outboard.errors.__name__ else None
    if isinstance(known, type) and issubclass(known, ConfigError):
        config_error = known(report.message)
        config_error.__cause__ = error
        return config_error
    return error


def startup_timeout(process: RankProcess, init: Init, state: HandshakeState, seconds: float) -> EngineStartupTimeout:
    """What to raise for an engine core that was not ready in time; `state` is how far it had come."""
    return process.death(
        "start-up",
        EngineStartupTimeout,
        reason=f"engine core rank {init.rank} was not ready within {seconds:g} s: {state.value}; "
        "it has been killed. If loading takes that long, raise FaultConfig(startup_timeout=...)",
        rank=init.rank,
        incarnation=init.incarnation,
    )


def search_path() -> list[str]:
    """Where this process finds modules: its `sys.path`, and the working directory behind it."""
    paths = [path for path in sys.path if isinstance(path, str)]
    try:
        here = os.getcwd()  # noqa: PTH109 - a plain string is wanted
    except FileNotFoundError:  # it has been deleted
        return [path for path in paths if path]
    return [path or here for path in paths] + [here]


def sendable_options(options: dict[str, Any]) -> dict[str, Any]:
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
