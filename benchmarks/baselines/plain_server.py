"""Two servers to measure Outboard's against: the plain design, and the floor.

    plain   FastAPI's `StreamingResponse`, a generator a request, over the plain client of `benchmarks.baselines.plain`
    floor   a bare `asyncio.Protocol` that writes the same bytes to every connection, each step, without an engine

Both run as Outboard's API process does: uvicorn's httptools, uvloop, msgspec for JSON.

    python -m benchmarks.baselines.plain_server plain|floor PORT STEP_MS STREAMS
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from benchmarks.baselines.plain import PlainClient

__all__ = ["event"]

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Choice(msgspec.Struct):
    """One choice of an event."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None


class Event(msgspec.Struct):
    """What one token becomes."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    object: str = "text_completion"


def event(request_id: str, created: int, text: str, finish_reason: str | None = None) -> bytes:
    """One line of the stream."""
    document = Event(request_id, created, "mock", [Choice(0, text, None, finish_reason)])
    return b"data: " + _encode(document) + b"\n\n"


def plain_app(step_ms: float, streams: int) -> FastAPI:
    """The plain design's application. Its engine begins a round once `streams` requests are there."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with PlainClient(start_after=streams, step_ms=step_ms) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body: dict[str, Any] = await request.json()
        request_id, created = f"cmpl-{uuid.uuid4().hex[:24]}", int(time.time())

        async def events() -> AsyncIterator[bytes]:
            async for output in app.state.client.generate(list(body["prompt"].encode()), body["max_tokens"]):
                one = output.outputs[0]
                yield event(request_id, created, "".join(map(chr, one.token_ids)), one.finish_reason)
            yield DONE

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


class Floor(asyncio.Protocol):
    """One connection of the floor."""

    live: dict[Floor, None] = {}  # noqa: RUF012 - of the one server there is

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._left = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self.live.pop(self, None)

    def data_received(self, data: bytes) -> None:
        body = data.partition(b"\r\n\r\n")[2]
        self._left = msgspec.json.decode(body)["max_tokens"]
        self._id, self._created = f"cmpl-{uuid.uuid4().hex[:24]}", int(time.time())
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self.live[self] = None

    def step(self, text: str) -> None:
        """Writes one token."""
        self._left -= 1
        line = event(self._id, self._created, text, None if self._left else "length")
        self._write(line if self._left else line + DONE)
        if not self._left:
            self._transport.write(b"0\r\n\r\n")
            del self.live[self]

    def _write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def floor(port: int, step_ms: float) -> None:
    """Serves without end."""
    await asyncio.get_running_loop().create_server(Floor, "127.0.0.1", port)
    deadline, step = time.monotonic(), 0
    while True:
        deadline = max(deadline + step_ms / 1000, time.monotonic())
        await asyncio.sleep(deadline - time.monotonic())
        for connection in list(Floor.live):
            connection.step(chr(97 + step % 26))
        step += 1


def main() -> None:
    kind, port, step_ms, streams = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    if kind == "plain":
        app = plain_app(step_ms, streams)
        uvicorn.run(app, host="127.0.0.1", port=port, loop="uvloop", log_level="warning", access_log=False)
    else:
        uvloop.run(floor(port, step_ms))


if __name__ == "__main__":
    main()
