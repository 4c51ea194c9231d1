"""A connection without a socket: ASGI as uvicorn has it, where the test says when it takes no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from outboard.serve.exchange import Exchange
from outboard.serve.http_server import ABORT, WRITE_CHUNK

Headers = Sequence[tuple[bytes, bytes]]


class FakeConnection:
    """One exchange. Build it on a running loop.

    Args:
        body: of the request, in the parts in which it comes.
        headers: of the request.
        chunks: whether it offers the short way for chunks.

    Attributes:
        sent: ASGI messages that were written, and chunks as if they had been such.
        paused: whether it takes no more.
        pauses_after_each: whether each write fills it.
        gone: whether the client has left.
        aborted: whether it was cut.
    """

    def __init__(self, *body: bytes, headers: Headers = (), chunks: bool = False) -> None:
        self.sent: list[dict[str, Any]] = []
        self.paused = False
        self.pauses_after_each = False
        self.gone = False
        self.aborted = False
        self._free = asyncio.Event()
        self._over = asyncio.Event()
        self._incoming: list[dict[str, Any]] = [
            {"type": "http.request", "body": part, "more_body": number < len(body)}
            for number, part in enumerate(body, 1)
        ]
        extensions: dict[str, Any] = {ABORT: self.abort}
        if chunks:
            extensions[WRITE_CHUNK] = self._write_chunk
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": list(headers),
            "extensions": extensions,
        }

    def exchange(self) -> Exchange:
        """The exchange on it."""
        return Exchange(self.scope, self.receive, self.send)

    async def receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop(0)
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.paused and not self.gone:
            await self._free.wait()
        if self.gone:
            return
        started, complete = self.status != 0, self.complete
        assert not complete, f"{message} behind the end"
        assert started == (message["type"] == "http.response.body"), message
        self._write(dict(message))
        if self.complete:
            self._over.set()

    def pause(self) -> None:
        """It takes no more."""
        self.paused = True
        self._free.clear()

    def resume(self) -> None:
        """It takes more again."""
        self.paused = False
        self._free.set()

    def leave(self) -> None:
        """The client goes away."""
        self.gone = True
        self._free.set()
        self._over.set()

    def abort(self) -> None:
        """The server ends the connection."""
        self.aborted = True
        self.leave()

    @property
    def status(self) -> int:
        """Of the answer; 0: there is none yet."""
        return next((one["status"] for one in self.sent if one["type"] == "http.response.start"), 0)

    @property
    def headers(self) -> dict[bytes, bytes]:
        """Of the answer."""
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        """Of the answer, so far."""
        return b"".join(one.get("body", b"") for one in self.sent)

    @property
    def complete(self) -> bool:
        """Whether the answer is."""
        return bool(self.sent) and self.sent[-1]["type"] != "http.response.start" and not self.sent[-1].get("more_body")

    @property
    def events(self) -> list[Any]:
        """Documents of the stream so far; the last is "[DONE]" where it is complete."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == "", "an event is cut"
        assert all(block.startswith("data: ") for block in blocks)
        return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]

    def _write(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if self.pauses_after_each:
            self.pause()

    def _write_chunk(self, body: bytes) -> bool:
        if self.paused or self.gone or not self.status or self.complete:
            return False
        assert body, "an empty chunk would be the end"
        self._write({"type": "http.response.body", "body": body, "more_body": True})
        return True


async def settle() -> None:
    """Lets tasks that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)
