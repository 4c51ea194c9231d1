"""The application behind uvicorn's protocol on a pair of sockets: what only a real transport does."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from uvicorn.server import ServerState

from fake_connection import settle
from fake_server import FakeServer, give
from outboard.serve.http_server import HttpServer
from support import Run


class _Client:
    """One connection to the application of a server that does not listen."""

    def __init__(self, server: FakeServer) -> None:
        self.socket, self._other = socket.socketpair()
        self.socket.setblocking(False)
        self._other.setblocking(False)
        for end in (self.socket, self._other):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self._state = ServerState()
        config = HttpServer(server.app, 30.0).config
        config.load()
        self._config: Any = config

    async def __aenter__(self) -> _Client:
        loop = asyncio.get_running_loop()

        def make() -> asyncio.Protocol:
            made: asyncio.Protocol = self._config.http_protocol_class(
                config=self._config, server_state=self._state, app_state={}
            )
            return made

        await loop.connect_accepted_socket(make, self._other)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.socket.close()
        await self.until_ended()

    async def ask(self, body: Any, times: int = 1) -> None:
        written = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(written)
        await asyncio.get_running_loop().sock_sendall(self.socket, (head + written) * times)

    async def read_all(self) -> bytes:
        """Up to the end of the connection."""
        loop, read = asyncio.get_running_loop(), b""
        try:
            while part := await loop.sock_recv(self.socket, 1 << 16):
                read += part
        except ConnectionError:
            pass
        return read

    async def read_answer(self) -> str:
        """The body of an answer, chunk by chunk."""
        loop, read = asyncio.get_running_loop(), b""
        while not read.endswith(b"\r\n0\r\n\r\n"):
            part = await loop.sock_recv(self.socket, 1 << 16)
            assert part, "the answer is cut"
            read += part
        rest, body = read.partition(b"\r\n\r\n")[2], b""
        while size := int((line := rest.partition(b"\r\n"))[0], 16):
            body += line[2][:size]
            rest = line[2][size + 2 :]
        return body.decode()

    async def until_ended(self) -> None:
        """Until the application has let go of all requests."""
        async with asyncio.timeout(5):
            while self._state.tasks or self._state.connections:
                await asyncio.sleep(0.005)


async def _begun(server: FakeServer) -> Any:
    async with asyncio.timeout(5):
        while not server.engine.requests:
            await asyncio.sleep(0.005)
    return server.engine.requests[-1]


def test_a_stream_through_the_protocol(run: Run) -> None:
    async def body() -> None:
        server = FakeServer()
        async with _Client(server) as client:
            await client.ask({"prompt": "x", "stream": True})
            request = await _begun(server)
            give(request, "")
            request.on_text("é")
            give(request, "!", "stop")
            events = (await client.read_answer()).split("\n\n")
        assert [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]] == ["é", "!"]
        assert events[-2:] == ["data: [DONE]", ""]
        server.check_idle()

    run(body())


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_client_that_does_not_read(run: Run, ended: bool, pipelined: bool) -> None:
    async def body() -> None:
        server = FakeServer(slow_reader_timeout=0.05)
        async with _Client(server) as client:
            await client.ask({"prompt": "x", "stream": True}, 2 if pipelined else 1)
            request = await _begun(server)
            give(request, "first")
            for _ in range(20):
                request.on_text("x" * 100_000)
            if ended:
                give(request, "last", "stop")
            await client.until_ended()  # though it never reads
            assert b"[DONE]" not in await client.read_all()
            assert len(server.engine.requests) == 1
            record = server.check_idle()
            assert (record.status, record.error) == (200, "slow_reader")

    run(body())


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_client_that_leaves(run: Run, pipelined: bool) -> None:
    async def body() -> None:
        server = FakeServer()
        async with _Client(server) as client:
            await client.ask({"prompt": "x", "stream": True}, 2 if pipelined else 1)
            request = await _begun(server)
            give(request, "first")
            client.socket.close()
            await client.until_ended()
            assert request.aborted
            assert server.check_idle().error == "client_disconnected"

    run(body())


def test_a_client_that_reads_late_loses_nothing(run: Run) -> None:
    async def body() -> None:
        server = FakeServer()
        async with _Client(server) as client:
            await client.ask({"prompt": "x", "stream": True})
            request = await _begun(server)
            give(request, "0")
            for number in range(1, 200):
                request.on_text(f"{number:1000}")
            give(request, " 200", "stop")
            await settle()
            assert server.service.live  # the end waits for the client
            answer = await client.read_answer()
            texts = [
                json.loads(event[6:])["choices"][0]["text"] for event in answer.split("\n\n") if "choices" in event
            ]
            assert "".join(texts).split() == [str(number) for number in range(201)]
            assert len(texts) < 201  # what waited was merged
            async with asyncio.timeout(5):
                while not server.records:
                    await asyncio.sleep(0.005)
            assert server.check_idle().error == ""

    run(body())
