"""`ServeConfig` and `AdminConfig`: what cannot work is refused by name."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from outboard.config import EngineConfig
from outboard.errors import ConfigError
from outboard.protocol.messages import EngineInfo
from outboard.serve.config import MOST_API_SERVERS, MOST_KEYS, AdminConfig, ServeConfig


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"port": -1}, "port must be"),
        ({"port": 65536}, "port must be"),
        ({"api_server_count": 0}, "api_server_count"),
        ({"api_server_count": MOST_API_SERVERS + 1}, "api_server_count"),
        ({"api_keys": ["k"] * (MOST_KEYS + 1)}, "number of API keys"),
        ({"api_keys": [""]}, "an API key is"),
        ({"api_keys": ["a b"]}, "an API key is"),
        ({"api_keys": ["a\n"]}, "an API key is"),
        ({"api_keys": ["é"]}, "an API key is"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"max_concurrent_per_key": 1}, "needs api_keys"),
        ({"max_concurrent_per_key": 0, "api_keys": ["k"]}, "max_concurrent_per_key"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"request_timeout": float("nan")}, "request_timeout"),
        ({"slow_reader_timeout": float("inf")}, "slow_reader_timeout"),
        ({"receive_timeout": -1}, "receive_timeout"),
        ({"max_body_bytes": 10}, "max_body_bytes"),
        ({"slow_reader_bytes": 0}, "slow_reader_bytes"),
        ({"log_format": "xml"}, "log_format"),
        ({"log_level": "trace"}, "log_level"),
        ({"traces": "127.0.0.1:4318"}, "traces"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        ServeConfig(**given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"port": 0, "api_server_count": MOST_API_SERVERS, "api_keys": ["sk-1"] * MOST_KEYS},
        {"max_concurrent_per_key": 1, "api_keys": ["k"]},
        {"traces": "https://collector/v1/traces", "log_format": "json", "log_level": "debug"},
        {"admin": AdminConfig(port=0)},
    ],
)
def test_what_can_work_is_taken_and_travels(given: dict[str, Any]) -> None:
    config = ServeConfig(**given)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ServeConfig) == config


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_administration_on_this_host_needs_no_key(host: str) -> None:
    AdminConfig(host=host, port=9000)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_administration_elsewhere_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="open to other hosts"):
        AdminConfig(host=host, port=9000)
    AdminConfig(host=host, port=9000, key="secret")
    AdminConfig(host=host)  # there is none


@pytest.mark.parametrize("key", ["", " ", "a b", "é", "a\n"])
def test_a_key_of_administration_must_be_one(key: str) -> None:
    """An empty one, of a variable that is not set, must not open it to all."""
    with pytest.raises(ConfigError, match="key"):
        AdminConfig(host="0.0.0.0", port=9000, key=key)


class _Engine:
    pass


@pytest.mark.parametrize(
    ("served", "engine", "model", "name"),
    [
        ("mine", "mock", "/models/a", "mine"),
        (None, "mock", "/models/smollm2-135m", "smollm2-135m"),
        (None, "mock", "", "mock"),
        (None, "package.module:Engine", "", "Engine"),
        (None, _Engine, "", "_Engine"),
    ],
)
def test_the_name_of_the_model(served: str | None, engine: Any, model: str, name: str) -> None:
    info = msgspec.structs.replace(EngineInfo(), model=model)
    assert ServeConfig(served_model_name=served).model_name(EngineConfig(engine=engine), info) == name
