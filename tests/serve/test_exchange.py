"""`Exchange`: what is taken of a request, and what is refused with which status."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import msgspec
import pytest

from fake_connection import FakeConnection, settle
from outboard.serve.errors import ApiError
from outboard.serve.exchange import Exchange
from outboard.serve.requests import ChatRequest, CompletionRequest
from support import Run


class _Inner(msgspec.Struct):
    number: int


class _Body(msgspec.Struct):
    name: str
    number: Annotated[int, msgspec.Meta(ge=1)] = 1
    inner: list[_Inner] = []


def _refused(connection: FakeConnection, most: int = 1000, timeout: float = 5.0, kind: Any = _Body) -> ApiError:
    async def read() -> ApiError:
        with pytest.raises(ApiError) as caught:
            await connection.exchange().read(kind, most, timeout)
        return caught.value

    return asyncio.run(read())


def _with_body(*parts: bytes, **more: Any) -> FakeConnection:
    async def make() -> FakeConnection:
        return FakeConnection(*parts, **more)

    return asyncio.run(make())


# --- headers ---


@pytest.mark.parametrize("name", [b"a", b"req-1_2.3:4/5", b"~" * 128])
def test_a_request_id_of_the_client_is_kept(name: bytes) -> None:
    exchange = _with_body(headers=[(b"x-request-id", name)]).exchange()
    assert exchange.request_id == name.decode()
    assert exchange.answer_headers == [(b"x-request-id", name)]


@pytest.mark.parametrize("name", [None, b"", b"a b", b"a\r\nset-cookie: x", b"\xe9", b"~" * 129, b"a\n"])
def test_a_request_id_that_is_none_is_replaced(name: bytes | None) -> None:
    headers = [] if name is None else [(b"x-request-id", name)]
    ids = {_with_body(headers=headers).exchange().request_id for _ in range(2)}
    assert len(ids) == 2 and all(len(one) == 32 and one.isalnum() for one in ids)


def test_of_several_headers_the_last_counts() -> None:
    exchange = _with_body(headers=[(b"authorization", b"one"), (b"authorization", b"two")]).exchange()
    assert exchange.headers[b"authorization"] == b"two"


def test_a_server_without_extensions_will_do(run: Run) -> None:
    async def body() -> None:
        connection = FakeConnection(b"{}")
        del connection.scope["extensions"]
        exchange = connection.exchange()
        assert exchange.write_chunk is None
        exchange.cut()

    run(body())


@pytest.mark.parametrize(
    ("asked", "seconds"), [(None, 60), (b"5", 5), (b"0.25", 0.25), (b"1e9", 60), (b"inf", 60), (b" 7 ", 7)]
)
def test_a_client_may_give_its_request_less_time(asked: bytes | None, seconds: float) -> None:
    headers = [] if asked is None else [(b"x-request-timeout", asked)]
    assert _with_body(headers=headers).exchange().timeout(60) == seconds


@pytest.mark.parametrize("asked", [b"", b"0", b"-1", b"nan", b"-inf", b"soon", b"\xff", b"1,5"])
def test_a_time_that_is_none_is_refused(asked: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        _with_body(headers=[(b"x-request-timeout", asked)]).exchange().timeout(60)
    assert (caught.value.status, caught.value.param) == (400, "x-request-timeout")


# --- bodies ---


def test_a_body_may_come_in_parts(run: Run) -> None:
    async def body() -> None:
        connection = FakeConnection(b'{"na', b"", b'me":"x"', b"}")
        assert (await connection.exchange().read(_Body, 1000, 5)).name == "x"

    run(body())


def test_a_body_that_is_said_to_be_too_large_is_not_read() -> None:
    connection = _with_body(b"{}", headers=[(b"content-length", b"1001")])
    error = _refused(connection)
    assert (error.status, error.code) == (413, "body_too_large")
    assert len(connection._incoming) == 1


def test_a_body_that_becomes_too_large_is_not_read_to_its_end() -> None:
    connection = _with_body(*[b" " * 400] * 10)
    assert _refused(connection).status == 413
    assert len(connection._incoming) == 7


def test_a_body_of_the_largest_size_is_taken() -> None:
    body = b'{"name":"x"}'.ljust(1000)
    connection = _with_body(body, headers=[(b"content-length", b"1000")])
    assert asyncio.run(connection.exchange().read(_Body, 1000, 5)).name == "x"


@pytest.mark.parametrize("said", [b"", b"-1", b"x", b"1e3", b"\xb2"])
def test_a_length_that_is_none_is_no_length(said: bytes) -> None:
    connection = _with_body(b'{"name":"x"}', headers=[(b"content-length", said)])
    assert asyncio.run(connection.exchange().read(_Body, 1000, 5)).name == "x"


def test_a_slow_body(run: Run) -> None:
    async def body() -> None:
        connection = FakeConnection(b'{"name":', b'"x"}')
        connection._incoming.pop()  # the rest does not come
        with pytest.raises(ApiError) as caught:
            await connection.exchange().read(_Body, 1000, 0.02)
        assert (caught.value.status, caught.value.code) == (408, "timeout")

    run(body())


def test_a_client_that_goes_away_while_its_body_comes(run: Run) -> None:
    async def body() -> None:
        connection = FakeConnection(b'{"name":', b'"x"}')
        connection._incoming.pop()
        connection.leave()
        with pytest.raises(ConnectionError):
            await connection.exchange().read(_Body, 1000, 5)

    run(body())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"name": "x"',
        b'{"name": "x"} more',
        b"name=x",
        b'{"name": "\xff"}',
        b'{"name": "\\ud800"}',
        b"\xef\xbb\xbf{}",
        b'{"ignored": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_no_json(body: bytes) -> None:
    error = _refused(_with_body(body), most=1 << 20)
    assert (error.status, error.code, error.param) == (400, "invalid_json", None)


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        ({}, _Body, "name"),
        ({"name": 3}, _Body, "name"),
        ({"name": None}, _Body, "name"),
        ({"name": "x", "number": 0}, _Body, "number"),
        ({"name": "x", "inner": [{"number": 1}, {"number": "1"}]}, _Body, "inner[1].number"),
        ({"name": "x", "inner": [{}]}, _Body, "inner[0].number"),
        ([], _Body, None),
        ("x", _Body, None),
        (None, _Body, None),
        ({}, ChatRequest, "messages"),
        ({"messages": []}, ChatRequest, "messages"),
        ({"messages": ["x"]}, ChatRequest, "messages[0]"),
        ({}, CompletionRequest, "prompt"),
        ({"prompt": "x", "temperature": 3}, CompletionRequest, "temperature"),
        ({"prompt": "x", "logit_bias": {"1": "a"}}, CompletionRequest, "logit_bias[...]"),
        ({"prompt": "x", "stream_options": {"include_usage": 1}}, CompletionRequest, "stream_options.include_usage"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(body: Any, kind: Any, param: str | None) -> None:
    error = _refused(_with_body(json.dumps(body).encode()), kind=kind)
    assert (error.status, error.type, error.code) == (400, "invalid_request_error", "invalid_value")
    assert error.param == param
    told = json.loads(error.body)["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert "$" not in told["message"]
    if param is not None:
        assert told["message"].startswith(f"{param}: ")


# --- answers ---


@pytest.mark.parametrize("status", [400, 408, 413])
def test_a_refusal(status: int) -> None:
    connection = _with_body(headers=[(b"x-request-id", b"mine")])
    asyncio.run(connection.exchange().refuse(ApiError(status, "no", code="c", param="p")))
    assert connection.status == status and connection.complete
    assert connection.headers[b"x-request-id"] == b"mine"
    assert connection.headers[b"content-type"] == b"application/json"
    assert int(connection.headers[b"content-length"]) == len(connection.body)
    assert b"retry-after" not in connection.headers
    assert (connection.headers.get(b"connection") == b"close") == (status != 400)  # what is not read must not follow
    assert json.loads(connection.body) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "p", "code": "c"}
    }


def test_a_refusal_may_say_when_to_come_again() -> None:
    connection = _with_body()
    asyncio.run(connection.exchange().refuse(ApiError(429, "no", retry_after=3)))
    assert connection.headers[b"retry-after"] == b"3"


def test_it_is_over_when_the_client_goes_or_the_answer_is_complete(run: Run) -> None:
    async def body() -> None:
        for ends in (lambda one: one.leave(), lambda one: one.exchange().cut()):
            connection = FakeConnection(b"x", b"y")
            waits = asyncio.ensure_future(Exchange(connection.scope, connection.receive, connection.send).until_over())
            await settle()
            assert not waits.done()
            ends(connection)
            await waits
        connection = FakeConnection()
        exchange = connection.exchange()
        await exchange.answer(200, b"{}")
        await exchange.until_over()

    run(body())
