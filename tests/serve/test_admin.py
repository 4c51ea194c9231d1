"""Bodies and keys of administration; what it does is tested with a server."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from fake_connection import FakeConnection
from outboard.serve.admin import AdminApp
from outboard.serve.config import AdminConfig


def _ask(path: str, body: bytes = b"", key: str | None = None, headers: Any = ()) -> tuple[int, Any, list[str]]:
    """Status, document, and the log levels that were set."""
    levels: list[str] = []
    servers: Any = SimpleNamespace(set_log_level=levels.append)
    nobody: Any = None

    async def ask() -> tuple[int, Any, list[str]]:
        app = AdminApp(AdminConfig(key=key), nobody, servers, nobody, lambda: None, lambda: b"")
        connection = FakeConnection(body, headers=[(b"content-length", b"%d" % len(body)), *headers])
        connection.scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "client": None}
        await app(connection.scope, connection.receive, connection.send)
        return connection.status, json.loads(connection.body), levels

    return asyncio.run(ask())


@pytest.mark.parametrize(("path", "param"), [("/admin/scale", "data_parallel_size"), ("/admin/log-level", "level")])
def test_a_body_that_is_needed_and_missing(path: str, param: str) -> None:
    status, document, _ = _ask(path)
    assert (status, document["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [b'{"level": "loud"}', b'{"level": 3}', b"{", b'"debug"'])
def test_a_body_that_is_wrong(body: bytes) -> None:
    status, document, levels = _ask("/admin/log-level", body)
    assert status == 400 and document["error"]["type"] == "invalid_request_error" and not levels


def test_a_body_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logging.Logger.setLevel", lambda self, level: None)
    assert _ask("/admin/log-level", b'{"level": "debug"}') == (200, {}, ["debug"])


@pytest.mark.parametrize("headers", [(), [(b"authorization", b"Bearer other")]])
def test_without_its_key_nothing_is_done(headers: Any) -> None:
    status, document, levels = _ask("/admin/log-level", b'{"level": "debug"}', "secret", headers)
    assert (status, document["error"]["code"], levels) == (401, "invalid_api_key", [])
