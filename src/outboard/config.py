"""Configuration: small frozen structs, one a component. A component gets its own part, never the whole."""

from __future__ import annotations

from typing import Any

import msgspec

from outboard.errors import ConfigError

__all__ = ["EngineConfig", "FaultConfig", "TransportConfig"]


# Seconds; what the system's timers count in milliseconds of 32 bits ends soon after.
_LONGEST = 1_000_000


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long to wait for an engine core before it is given up. All times in seconds.

    Attributes:
        startup_timeout: from the start of the process until READY. Loading large weights takes minutes, hence 600.
        shutdown_timeout: from the request to stop until the process is killed.
    """

    startup_timeout: float = 600.0
    shutdown_timeout: float = 10.0

    def __post_init__(self) -> None:
        for name in ("startup_timeout", "shutdown_timeout"):
            if not 0 < getattr(self, name) <= _LONGEST:
                raise ConfigError(f"{name} must be above 0 and at most {_LONGEST} s, not {getattr(self, name)!r}")


class TransportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the sockets between a client and its engine cores.

    Attributes:
        high_water_mark: messages that ZeroMQ holds for each direction before the sender keeps them itself.
            ZeroMQ's own default.
        max_message_bytes: a peer that sends a larger message is disconnected.
        inline_bytes: arrays up to this size travel inside the message body; larger ones as frames of their own,
            which ZeroMQ does not copy from 64 KiB on (below that it copies anyway).
        shared_memory_bytes: arrays larger than this travel through shared memory, where there is room for them.
        shared_memory_limit: most bytes of shared memory for each engine core and each direction; memory is taken as it
            is needed, and kept for reuse. 0 turns shared memory off.
        stream_buffer_bytes: results that one stream holds for a reader that is behind; past it that stream ends with
            `SlowReaderError`. Tokens do not count: they merge.
    """

    high_water_mark: int = 1000
    max_message_bytes: int = 4 << 30
    inline_bytes: int = 64 << 10
    shared_memory_bytes: int = 1 << 20
    shared_memory_limit: int = 1 << 30
    stream_buffer_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            least = 0 if name == "shared_memory_limit" else 1
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)!r}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run, and how.

    Attributes:
        engine: the name of an engine that comes along ("openvino", "echo", "mock"), "module:Class", "path.py:Class",
            or an `EngineCore` class that can be imported from its module.
        options: keyword arguments of the engine's constructor; any msgpack values.
        faults: time limits of start-up and shutdown.
        transport: limits of the sockets.
    """

    engine: str | type[Any]
    options: dict[str, Any] = {}
    faults: FaultConfig = FaultConfig()
    transport: TransportConfig = TransportConfig()
