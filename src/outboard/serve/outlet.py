"""ASGI's `send`, stepped from call-backs: a write for each message of the engine core, and no task that is woken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, MutableMapping
from typing import Any

__all__ = ["Outlet", "Send", "WriteChunk"]

WriteChunk = Callable[[bytes], bool]
Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]


class Outlet:
    """The way to one connection. Belongs to its loop.

    A server's `send` writes and returns, unless the connection takes no more for now. So its coroutine is stepped once,
    here, in whatever call-back has something to write. Where it suspends, a task sees it through; until then the outlet
    is `busy`, and nothing may be written.

    Args:
        send: the server's own, not wrapped by any middleware.
        write_chunk: a shorter way for more of the body, where the server has one (see http_server.py); it returns
            whether it has written.
        on_busy: called when the outlet begins to be busy.
        on_free: called when it is busy no more.

    Attributes:
        busy: whether a write is still under way.
    """

    __slots__ = ("_on_busy", "_on_free", "_send", "_task", "_write_chunk", "busy")

    def __init__(
        self,
        send: Send,
        on_busy: Callable[[], None],
        on_free: Callable[[], None],
        write_chunk: WriteChunk | None = None,
    ) -> None:
        self._send = send
        self._write_chunk = write_chunk
        self._on_busy = on_busy
        self._on_free = on_free
        self._task: asyncio.Task[None] | None = None
        self.busy = False

    def start(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes, more_body: bool) -> None:
        """Writes the head of the answer, and the first of its body."""
        first = {"type": "http.response.start", "status": status, "headers": headers}
        self._write(first, {"type": "http.response.body", "body": body, "more_body": more_body})

    def body(self, body: bytes, more_body: bool = True) -> None:
        """Writes more of the body."""
        write_chunk = self._write_chunk
        try:
            if write_chunk is not None and more_body and write_chunk(body):
                return
            coroutine = self._send({"type": "http.response.body", "body": body, "more_body": more_body})
            suspended = coroutine.send(None)
        except StopIteration:
            return
        except Exception:
            return  # the client is gone, which the server tells by `receive`
        self._see_through(coroutine, suspended, [])

    def close(self) -> None:
        """Gives up what is still under way."""
        if self._task is not None:
            self._task.cancel()

    def _write(self, *messages: MutableMapping[str, Any]) -> None:
        for number, message in enumerate(messages, 1):
            coroutine = self._send(message)
            try:
                suspended = coroutine.send(None)
            except StopIteration:
                continue
            except Exception:
                return  # as above
            self._see_through(coroutine, suspended, list(messages[number:]))
            return

    def _see_through(
        self, coroutine: Coroutine[Any, Any, None], suspended: Any, rest: list[MutableMapping[str, Any]]
    ) -> None:
        self.busy = True
        self._task = asyncio.get_running_loop().create_task(self._finish(coroutine, suspended, rest))
        self._on_busy()

    async def _finish(
        self, coroutine: Coroutine[Any, Any, None], suspended: Any, rest: list[MutableMapping[str, Any]]
    ) -> None:
        try:
            await _Suspended(coroutine, suspended)
            for message in rest:
                await self._send(message)
        except Exception:
            pass  # as above
        finally:
            self.busy = False
            self._task = None
        self._on_free()


class _Suspended:
    """A coroutine that has been stepped once, to be awaited to its end: what it waits for is waited for first."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], suspended: Any) -> None:
        self._coroutine = coroutine
        self._suspended = suspended

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._suspended
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:  # a cancellation is the coroutine's own business
                step: Callable[[], Any] = lambda error=error: self._coroutine.throw(error)  # type: ignore[misc]  # noqa: E731
            else:
                step = lambda sent=sent: self._coroutine.send(sent)  # type: ignore[misc]  # noqa: E731
            try:
                waits_for = step()
            except StopIteration:
                return
