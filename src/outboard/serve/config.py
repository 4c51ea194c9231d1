"""`ServeConfig`: what the server is to do beside running an engine."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal

import msgspec

from outboard.config import EngineConfig
from outboard.errors import ConfigError
from outboard.protocol.messages import EngineInfo

__all__ = ["AdminConfig", "ServeConfig"]

# Slots of the shared page; see limits.py.
MOST_API_SERVERS = 64
MOST_KEYS = 256


class AdminConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where administration can be reached; nowhere unless a port is set.

    Attributes:
        host: address to listen on.
        port: None: there is no administration. 0: any free port.
        key: what a request has to show, as `Authorization: Bearer KEY`. Only an address of this host alone may do
            without.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        _check_port(self.port or 0, "admin_port")
        if self.key is not None:
            _check_key("the admin key", self.key)
        if self.port is not None and self.key is None and not _is_loopback(self.host):
            raise ConfigError(
                f"administration on {self.host} would be open to other hosts: set an admin key, or listen on 127.0.0.1"
            )


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `outboard serve` is to do beside running an engine.

    Attributes:
        host, port: where the API listens; port 0: any free one.
        api_server_count: API processes; they share the port and the engine cores.
        served_model_name: the model's name in the API; None: as the engine reports it.
        api_keys: a request has to show one of these, as `Authorization: Bearer KEY`; none: everybody may.
        max_waiting: requests, of all API processes together, that may wait for their first token; more are refused
            with 429.
        max_concurrent_per_key: requests that one key may have in flight, over all API processes; None: any number.
        request_timeout: seconds that a request may take as a whole; the header `x-request-timeout` asks for less.
        slow_reader_timeout: seconds that a connection may take to accept what was written; then its request ends.
        slow_reader_bytes: text that is kept for such a connection.
        max_body_bytes: of a request; more is refused with 413.
        receive_timeout: seconds for the header of a request, and again for its body.
        admin: administration.
        log_format: "text" or "json".
        log_level: of Outboard's loggers: "debug", "info", "warning" or "error".
        log_prompts: whether the line of a request has its prompt.
        traces: URL that OTLP traces are posted to, such as http://127.0.0.1:4318/v1/traces; None: there are none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_server_count: int = 1
    served_model_name: str | None = None
    api_keys: list[str] = []
    max_waiting: int = 1024
    max_concurrent_per_key: int | None = None
    request_timeout: float = 600.0
    slow_reader_timeout: float = 30.0
    slow_reader_bytes: int = 1 << 20
    max_body_bytes: int = 32 << 20
    receive_timeout: float = 30.0
    admin: AdminConfig = msgspec.field(default_factory=AdminConfig)
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_prompts: bool = False
    traces: str | None = None

    def __post_init__(self) -> None:
        _check_port(self.port, "port")
        _within("api_server_count", self.api_server_count, 1, MOST_API_SERVERS)
        _within("the number of API keys", len(self.api_keys), 0, MOST_KEYS)
        for key in self.api_keys:
            _check_key("an API key", key)
        _within("max_waiting", self.max_waiting, 1, 1 << 31)
        if self.max_concurrent_per_key is not None:
            _within("max_concurrent_per_key", self.max_concurrent_per_key, 1, 1 << 31)
            if not self.api_keys:
                raise ConfigError("max_concurrent_per_key needs api_keys: without them nobody is told from others")
        for name in ("request_timeout", "slow_reader_timeout", "receive_timeout"):
            if not 0 < getattr(self, name) <= 1_000_000:
                raise ConfigError(f"{name} must be above 0 and at most 1000000 s, not {getattr(self, name)!r}")
        for name in ("max_body_bytes", "slow_reader_bytes"):
            _within(name, getattr(self, name), 1024, 1 << 40)
        _one_of("log_format", self.log_format, ("text", "json"))
        _one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        if self.traces is not None and not self.traces.startswith(("http://", "https://")):
            raise ConfigError(f"traces must be an http:// or https:// URL, not {self.traces!r}")

    def model_name(self, engine: EngineConfig, info: EngineInfo) -> str:
        """The model's name in the API."""
        if self.served_model_name is not None:
            return self.served_model_name
        reference = engine.engine if isinstance(engine.engine, str) else engine.engine.__name__
        return Path(info.model).name or reference.rpartition(":")[2]


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} must be at least {least} and at most {most}, not {value!r}")


def _check_key(name: str, key: str) -> None:
    if not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{name} is made of printable ASCII characters without spaces, and is not empty")


def _check_port(value: int, name: str) -> None:
    _within(name, value, 0, 65535)


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
