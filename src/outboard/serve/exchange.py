"""One HTTP exchange: headers, the body within its limits, and answers that are one document."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeVar

import msgspec

from outboard.serve.errors import ApiError
from outboard.serve.http_server import ABORT, WRITE_CHUNK
from outboard.serve.outlet import Send, WriteChunk

__all__ = ["Exchange", "Receive", "Scope", "parse", "request_id_of"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_T = TypeVar("_T")
_USABLE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The client's `x-request-id`, where it has a usable one, or a random one."""
    asked = headers.get(b"x-request-id", b"")
    return asked.decode() if _USABLE_ID.fullmatch(asked) else secrets.token_hex(16)


class Exchange:
    """A request of HTTP and the way to answer it.

    Attributes:
        headers: of the request, by lower-case name; of several the last.
        request_id: see `request_id_of`.
        send: the server's.
        write_chunk: see `Outlet`.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = request_id_of(self.headers)
        self.send = send
        extensions = scope.get("extensions", {})
        self.write_chunk: WriteChunk | None = extensions.get(WRITE_CHUNK)
        self._abort: Callable[[], None] | None = extensions.get(ABORT)
        self._receive = receive

    @property
    def answer_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that every answer has."""
        return [(b"x-request-id", self.request_id.encode())]

    async def read(self, kind: type[_T], most_bytes: int, timeout: float, empty: bytes = b"") -> _T:
        """The body, as JSON of this kind.

        Args:
            most_bytes: that it may have.
            timeout: seconds that it may take.
            empty: what an empty one stands for.

        Raises:
            ApiError: it is too large, too slow, or not what it should be.
            ConnectionError: the client went away.
        """
        try:
            async with asyncio.timeout(timeout):
                body = await self._read_all(most_bytes)
        except TimeoutError:
            raise ApiError(408, f"the request's body did not come within {timeout:g} s", code="timeout") from None
        return parse(body or empty, kind)

    async def _read_all(self, most_bytes: int) -> bytes:
        said = self.headers.get(b"content-length", b"")
        if said.isdigit() and int(said) > most_bytes:
            raise _too_large(most_bytes)
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client went away")
            body += message.get("body", b"")
            if len(body) > most_bytes:
                raise _too_large(most_bytes)
            if not message.get("more_body"):
                return bytes(body)

    def timeout(self, most: float) -> float:
        """Seconds that the client gives its request, by `x-request-timeout`; at most `most`."""
        asked = self.headers.get(b"x-request-timeout")
        if asked is None:
            return most
        try:
            seconds = float(asked)
        except ValueError:
            seconds = -1.0
        if not seconds > 0:
            raise ApiError(400, "x-request-timeout must be seconds above 0", param="x-request-timeout")
        return min(seconds, most)

    async def until_over(self) -> None:
        """Waits until the answer is complete, or the client has gone away."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def cut(self) -> None:
        """Ends the connection, whatever is still to be written; `until_over` returns."""
        if self._abort is not None:
            self._abort()

    async def refuse(self, error: ApiError) -> None:
        """Answers with an error."""
        more = error.headers
        if error.status in (408, 413):
            more.append((b"connection", b"close"))  # the rest of the body is not read
        await self.answer(error.status, error.body, more)

    async def answer(self, status: int, body: bytes, more: list[tuple[bytes, bytes]] | None = None) -> None:
        """Answers with a JSON document."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *(more or [])]
        await self.send({"type": "http.response.start", "status": status, "headers": headers + self.answer_headers})
        await self.send({"type": "http.response.body", "body": body})


def parse(body: bytes, kind: type[_T]) -> _T:
    """A body, as JSON of this kind. Raises `ApiError`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request's body is no JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the request's body is nested too deeply", code="invalid_json") from None


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {most_bytes} bytes", code="body_too_large")


def _invalid(message: str) -> ApiError:
    """The message of msgspec names the place as `$.messages[0]`: that is OpenAI's `param`."""
    what, _, place = message.partition(" - at `$")
    param = place.rstrip("`").lstrip(".") or None
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing is not None:
        param = f"{param}.{missing[1]}" if param else missing[1]
    return ApiError(400, f"{param}: {what}" if param else what, code="invalid_value", param=param)
