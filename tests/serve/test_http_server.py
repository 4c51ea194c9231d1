"""uvicorn's protocol as it is changed here, on a transport that the test plays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn.server import ServerState

from fake_connection import settle
from outboard.serve.http_server import ABORT, WRITE_CHUNK, HttpServer
from support import Run

_GET = b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n"


class _Transport(asyncio.Transport):
    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = b""
        self.closing = False

    def write(self, data: Any) -> None:
        assert not self.closing, "written behind the end"
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class _Requests:
    """An application whose answers the test writes."""

    def __init__(self, receive_timeout: float = 30.0) -> None:
        self.begun: list[Any] = []  # (scope, receive, send), in order
        self.disconnected: list[str] = []
        config = HttpServer(self, receive_timeout).config
        config.load()
        protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})  # type: ignore
        self.protocol: Any = protocol
        self.transport = _Transport(protocol)
        protocol.connection_made(self.transport)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append((scope, receive, send))
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected.append(scope["path"])


async def _start(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize("pipelined", [0, 1, 2])
@pytest.mark.parametrize("cut", [False, True])
def test_a_request_learns_that_its_client_has_gone(run: Run, pipelined: int, cut: bool) -> None:
    """Though others wait behind it, which uvicorn alone would tell."""

    async def body() -> None:
        requests = _Requests()
        requests.protocol.data_received(b"".join(_GET % number for number in range(1 + pipelined)))
        await settle()
        [(scope, _, send)] = requests.begun
        await _start(send)
        if cut:
            scope["extensions"][ABORT]()
        else:
            requests.transport.close()
        await settle()
        assert requests.disconnected == ["/0"]
        assert len(asyncio.all_tasks()) == 1

    run(body())


def test_pipelined_requests_are_answered_one_after_the_other(run: Run) -> None:
    async def body() -> None:
        requests = _Requests()
        requests.protocol.data_received(_GET % 0 + _GET % 1)
        await settle()
        for number in range(2):
            assert len(requests.begun) == number + 1
            scope, _, send = requests.begun[number]
            assert scope["path"] == f"/{number}"
            await _start(send)
            assert scope["extensions"][WRITE_CHUNK](b"text")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            await settle()
        assert requests.transport.written.count(b"4\r\ntext\r\n0\r\n\r\n") == 2
        requests.transport.close()
        await settle()

    run(body())


def test_the_short_way_is_closed_where_send_would_not_write(run: Run) -> None:
    async def body() -> None:
        requests = _Requests()
        requests.protocol.data_received(_GET % 0)
        await settle()
        [(scope, _, send)] = requests.begun
        write_chunk = scope["extensions"][WRITE_CHUNK]
        assert not write_chunk(b"before the head")
        await _start(send)
        assert write_chunk(b"a")
        requests.protocol.pause_writing()
        assert not write_chunk(b"while it takes no more")
        requests.protocol.resume_writing()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        assert not write_chunk(b"behind the end")
        requests.transport.close()
        await settle()
        assert not write_chunk(b"gone")

    run(body())


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nho"])
def test_a_header_that_does_not_come_closes_the_connection(run: Run, sent: bytes) -> None:
    async def body() -> None:
        requests = _Requests(receive_timeout=0.02)
        if sent:
            requests.protocol.data_received(sent)
        async with asyncio.timeout(5):
            while not requests.transport.closing:
                await asyncio.sleep(0.005)
        await settle()

    run(body())


def test_a_header_that_came_closes_nothing(run: Run) -> None:
    async def body() -> None:
        requests = _Requests(receive_timeout=0.02)
        requests.protocol.data_received(_GET % 0)
        await asyncio.sleep(0.06)
        assert not requests.transport.closing
        requests.transport.close()
        await settle()

    run(body())


def test_a_header_that_does_not_come_cuts_no_answer(run: Run) -> None:
    async def body() -> None:
        requests = _Requests(receive_timeout=0.02)
        requests.protocol.data_received(_GET % 0 + b"GET /1 HT")
        await settle()
        [(_, _, send)] = requests.begun
        await _start(send)
        await asyncio.sleep(0.06)
        assert not requests.transport.closing
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        async with asyncio.timeout(5):
            while not requests.transport.closing:
                await asyncio.sleep(0.005)
        await settle()

    run(body())
