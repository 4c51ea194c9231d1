"""Configuration: small frozen structs, one a component. A component gets its own part, never the whole."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from outboard.errors import ConfigError

__all__ = ["EngineConfig", "FaultConfig", "Outputs", "RestartPolicy", "TransportConfig"]

# How outputs travel from an engine core to a client.
Outputs = Literal["unix", "zmq"]

# Seconds; what the system's timers count in milliseconds of 32 bits ends soon after.
_LONGEST = 1_000_000


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether an engine core that died is started again. Use `never()` or `on_failure(...)`.

    Attributes:
        max_restarts: how many restarts are allowed within `window`; 0: none at all.
        window: seconds.
        backoff: seconds before the first restart; doubles with each one in the window.
        max_backoff: seconds; the longest pause.
    """

    max_restarts: int = 0
    window: float = 300.0
    backoff: float = 0.1
    max_backoff: float = 10.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts must be at least 0, not {self.max_restarts!r}")
        for name in ("window", "backoff", "max_backoff"):
            least = 0 if name != "window" else 1e-3
            if not least <= getattr(self, name) <= _LONGEST:
                raise ConfigError(f"{name} must be at least {least:g} and at most {_LONGEST} s")

    @classmethod
    def never(cls) -> RestartPolicy:
        """An engine core that died stays dead; vLLM's behaviour, and the default."""
        return cls()

    @classmethod
    def on_failure(
        cls, max_restarts: int = 3, window: float = 300.0, backoff: float = 0.1, max_backoff: float = 10.0
    ) -> RestartPolicy:
        """An engine core that died is started again, up to `max_restarts` times in any `window` seconds."""
        return cls(max_restarts=max_restarts, window=window, backoff=backoff, max_backoff=max_backoff)


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long to wait for an engine core before it is given up, and what comes then. All times in seconds.

    Attributes:
        startup_timeout: from the start of the process until READY. Loading large weights takes minutes, hence 600.
        shutdown_timeout: from the request to stop until the process is killed.
        stall_timeout: how long an engine core may give no sign of progress, while something waits for it, before it is
            `STALLED`. A step that takes longer should call `EngineCore.progress`.
        stall_action: "report" it, or "restart": kill it, and let the restart policy decide.
        restart: whether an engine core that died is started again.
        in_flight: what becomes of the requests of an engine core that is started again: "fail" ends them with
            `EngineRestartedError`; "resubmit" sends those anew that had no output yet, and ends the others; "resume"
            also goes on with the others, from their prompt and tokens so far.
        max_resubmits: how often one request is sent anew; a request that kills every engine that takes it must end.
        max_queued: how many requests may wait for an engine core that is being started again; more are refused with
            `EngineRestartingError`.
    """

    startup_timeout: float = 600.0
    shutdown_timeout: float = 10.0
    stall_timeout: float = 60.0
    stall_action: Literal["report", "restart"] = "report"
    restart: RestartPolicy = RestartPolicy()
    in_flight: Literal["fail", "resubmit", "resume"] = "fail"
    max_resubmits: int = 1
    max_queued: int = 1024

    def __post_init__(self) -> None:
        for name in ("startup_timeout", "shutdown_timeout", "stall_timeout"):
            if not 0 < getattr(self, name) <= _LONGEST:
                raise ConfigError(f"{name} must be above 0 and at most {_LONGEST} s, not {getattr(self, name)!r}")
        for name in ("max_resubmits", "max_queued"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)!r}")
        for name, choices in (("stall_action", ("report", "restart")), ("in_flight", ("fail", "resubmit", "resume"))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")


class TransportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the sockets between a client and its engine cores.

    Attributes:
        outputs: how outputs travel from an engine core to a client: "unix", a plain Unix socket, or "zmq".
        high_water_mark: messages that the sockets hold for each direction before the sender keeps them itself.
            ZeroMQ's own default. A Unix socket counts bytes: it is asked for 4 KiB a message, up to 8 MiB, of which the
            system may allow less (`net.core.wmem_max`; by default some 100 messages of 256 requests).
        max_message_bytes: a peer that sends a larger message is disconnected.
        inline_bytes: arrays up to this size travel inside the message body; larger ones as frames of their own,
            which no sender copies from 64 KiB on (below that ZeroMQ copies anyway).
        shared_memory_bytes: arrays larger than this travel through shared memory, where there is room for them.
        shared_memory_limit: most bytes of shared memory for each engine core and each direction; memory is taken as it
            is needed, and kept for reuse. 0 turns shared memory off.
        stream_buffer_bytes: results that one stream holds for a reader that is behind; past it that stream ends with
            `SlowReaderError`. Tokens do not count: they merge.
    """

    outputs: Outputs = "unix"
    high_water_mark: int = 1000
    max_message_bytes: int = 4 << 30
    inline_bytes: int = 64 << 10
    shared_memory_bytes: int = 1 << 20
    shared_memory_limit: int = 1 << 30
    stream_buffer_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        if self.outputs not in get_args(Outputs):
            raise ConfigError(f"outputs must be one of {', '.join(get_args(Outputs))}, not {self.outputs!r}")
        for name in self.__struct_fields__[1:]:
            least = 0 if name == "shared_memory_limit" else 1
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)!r}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run, and how.

    Attributes:
        engine: the name of an engine that comes along ("openvino", "echo", "mock"), "module:Class", "path.py:Class",
            or an `EngineCore` class that can be imported from its module.
        options: keyword arguments of the engine's constructor; any msgpack values.
        faults: time limits, and what to do when an engine core dies or hangs.
        transport: limits of the sockets.
    """

    engine: str | type[Any]
    options: dict[str, Any] = {}
    faults: FaultConfig = FaultConfig()
    transport: TransportConfig = TransportConfig()
