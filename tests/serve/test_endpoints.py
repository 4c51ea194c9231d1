"""Endpoints against an engine that the test plays: statuses, records, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types import Model

from fake_connection import FakeConnection, settle
from fake_server import FakeServer, give
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.errors import InvalidRequestError
from support import Run

_CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", _CHAT), ("/v1/completions", {"prompt": "hello"})])
def test_an_answer(run: Run, path: str, body: Any, stream: bool) -> None:
    async def go() -> None:
        server = FakeServer()
        headers = {"x_request_id": "mine", "traceparent": "00-a", "tracestate": "b=c"}
        connection, task = server.ask(path, {**body, "stream": stream, "model": "m"}, **headers)
        await settle()
        [request] = server.engine.requests
        assert request.params.output_kind == "delta"
        assert len(server.service.live) == 1
        give(request, "hi", "stop")
        await task
        assert connection.status == 200 and connection.complete
        record = server.check_idle()
        assert (record.path, record.status, record.error, record.streamed) == (path, 200, "", stream)
        assert (record.request_id, record.trace_parent, record.trace_state) == ("mine", "00-a", "b=c")
        assert record.duration > 0 and record.prompt is None
        assert server.service.completion_tokens == 1

    run(go())


@pytest.mark.parametrize(
    ("config", "headers", "body", "status", "code"),
    [
        ({"api_keys": ["k"]}, {}, b"", 401, "invalid_api_key"),
        ({"api_keys": ["k"]}, {"authorization": "Bearer x"}, {}, 401, "invalid_api_key"),
        ({"max_body_bytes": 1024}, {"content_length": "2000"}, {}, 413, "body_too_large"),
        ({}, {}, b"{", 400, "invalid_json"),
        ({}, {}, {}, 400, "invalid_value"),
        ({}, {}, {"prompt": "x", "model": "other"}, 404, "model_not_found"),
        ({}, {}, {"prompt": "x", "echo": True}, 400, "unsupported_parameter"),
        ({}, {}, {"prompt": []}, 400, "invalid_value"),
        ({}, {}, {"prompt": "x", "stop": ""}, 400, "invalid_request"),
        ({}, {"x_request_timeout": "no"}, {"prompt": "x"}, 400, "invalid_value"),
    ],
)
def test_refusals_reach_no_engine(
    run: Run, config: Any, headers: dict[str, str], body: Any, status: int, code: str | None
) -> None:
    async def go() -> None:
        server = FakeServer(**config)
        connection, task = server.ask("/v1/completions", body, **headers)
        await task
        error = json.loads(connection.body)["error"]
        assert (connection.status, error["code"]) == (status, code)
        assert not server.engine.requests
        record = server.check_idle()
        assert (record.status, record.error, record.prompts) == (status, code or "invalid_request_error", 0)

    run(go())


def test_a_prompt_that_the_front_end_refuses(run: Run) -> None:
    async def go() -> None:
        server = FakeServer()
        server.engine.raises = InvalidRequestError("odd")
        connection, task = server.ask("/v1/completions", {"prompt": "x"})
        await task
        assert connection.status == 400
        assert server.check_idle().error == "invalid_request"

    run(go())


def test_limits_over_requests_that_wait_and_over_those_of_a_key(run: Run) -> None:
    async def go() -> None:
        server = FakeServer(api_keys=["a", "b"], max_concurrent_per_key=1, max_waiting=2)
        held = [server.ask("/v1/completions", {"prompt": "x", "stream": True}, authorization="Bearer a")]
        await settle()
        connection, task = server.ask("/v1/completions", {"prompt": "x"}, authorization="Bearer a")
        await task
        assert connection.status == 429 and json.loads(connection.body)["error"]["code"] == "too_many_for_key"
        assert connection.headers[b"retry-after"] == b"1"
        assert server.records[-1].key == 0
        held.append(server.ask("/v1/completions", {"prompt": "x"}, authorization="Bearer b"))
        await settle()
        for request in server.engine.requests:
            give(request, "x", "stop")
        for _, task in held:
            await task
        server.check_idle(3)

    run(go())


@pytest.mark.parametrize("dead", [False, True])
def test_a_server_that_takes_no_more(run: Run, dead: bool) -> None:
    async def go() -> None:
        server = FakeServer()
        server.engine.dead, server.service.draining = dead, not dead
        for path in ("/v1/completions", "/readyz"):
            connection, task = server.ask(path, {"prompt": "x"}, "POST" if "v1" in path else "GET")
            await task
            assert connection.status == 503
            assert json.loads(connection.body)["error"]["code"] == ("engine_dead" if dead else "shutting_down")
            assert (b"retry-after" in connection.headers) == (not dead)
        server.check_idle()

    run(go())


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_goes_away(run: Run, begun: bool) -> None:
    async def go() -> None:
        server = FakeServer()
        connection, task = server.ask("/v1/chat/completions", {**_CHAT, "stream": True})
        await settle()
        [request] = server.engine.requests
        if begun:
            give(request, "a")
        connection.leave()
        await task
        assert request.aborted
        record = server.check_idle()
        assert (record.error, record.status) == ("client_disconnected", 200 if begun else 499)
        assert len(asyncio.all_tasks()) == 1

    run(go())


def test_a_client_that_goes_away_before_its_body_came(run: Run) -> None:
    async def go() -> None:
        server = FakeServer()
        connection, task = server.ask("/v1/chat/completions", _CHAT)
        connection._incoming[0]["more_body"] = True
        await settle()
        connection.leave()
        await task
        record = server.check_idle()
        assert (record.error, record.status) == ("client_disconnected", 499)
        assert not connection.sent

    run(go())


def test_a_task_that_is_cancelled(run: Run) -> None:
    async def go() -> None:
        server = FakeServer()
        _, task = server.ask("/v1/chat/completions", _CHAT)
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.engine.requests[0].aborted
        server.check_idle()

    run(go())


def test_all_are_cut_when_their_time_is_over(run: Run) -> None:
    async def go() -> None:
        server = FakeServer()
        asked = [server.ask("/v1/chat/completions", {**_CHAT, "stream": stream}) for stream in (False, True)]
        await settle()
        server.service.cut_all()
        server.service.cut_all()
        for connection, task in asked:
            await task
            assert connection.status == 503
        assert server.service.cut == 2
        assert server.check_idle(2).error == "shutting_down"

    run(go())


def test_a_prompt_is_in_the_record_where_that_is_wanted(run: Run) -> None:
    async def go() -> None:
        server = FakeServer(log_prompts=True)
        _, task = server.ask("/v1/completions", {"prompt": "a\nb"})
        await settle()
        give(server.engine.requests[0], "x", "stop")
        await task
        assert server.check_idle().prompt == repr("a\nb")

    run(go())


# --- beside the endpoints that generate ---


def _get(path: str, body: Any = b"", method: str = "GET") -> tuple[FakeConnection, Any]:
    async def go() -> FakeConnection:
        connection, task = FakeServer().ask(path, body, method)
        await task
        return connection

    connection = asyncio.run(go())
    return connection, json.loads(connection.body)


def test_a_method_that_is_not_there_says_which_are() -> None:
    connection, document = _get("/v1/completions")
    assert connection.status == 405 and connection.headers[b"allow"] == b"POST"
    assert document["error"]["code"] == "method_not_allowed"


def test_a_path_that_is_not_there() -> None:
    connection, document = _get("/v1/embeddings", b"{}", "POST")
    assert connection.status == 404 and document["error"]["code"] == "not_found"


def test_models() -> None:
    _, document = _get("/v1/models")
    [model] = document["data"]
    assert Model.model_validate(model, strict=True).id == "m"
    assert _get("/v1/models/m")[1] == model | {"created": _get("/v1/models/m")[1]["created"]}
    assert _get("/v1/models/org/x")[0].status == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({}, "prompt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({"prompt": 1}, "prompt"),
    ],
)
def test_what_cannot_be_tokenized(body: Any, param: str) -> None:
    connection, document = _get("/tokenize", body, "POST")
    assert (connection.status, document["error"]["param"]) == (400, param)


def test_messages_that_the_template_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, messages: Any) -> str:
        raise ValueError("roles must alternate")

    monkeypatch.setattr(ByteTokenizer, "apply_chat_template", refuse)
    connection, document = _get("/tokenize", _CHAT, "POST")
    assert connection.status == 400 and "roles must alternate" in document["error"]["message"]


def test_tokens_there_and_back() -> None:
    assert _get("/tokenize", {"prompt": "ab"}, "POST")[1] == {"tokens": [97, 98], "count": 2, "max_model_len": 100}
    assert _get("/detokenize", {"tokens": [97, 98]}, "POST")[1] == {"prompt": "ab"}
    assert _get("/detokenize", {"tokens": [256]}, "POST")[1]["error"]["param"] == "tokens"
