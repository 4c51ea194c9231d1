"""Load over HTTP from one thread, on epoll: as little work as Python allows, so that it disturbs the servers little."""

from __future__ import annotations

import re
import select
import socket
import time
from typing import Self

__all__ = ["Requests", "Streams"]

_TEXTS = re.compile(rb'"text":"([^"]*)"')
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: (\d+)\r\n")
_CHUNK = 65536


def _request(max_tokens: int, stream: bool) -> bytes:
    body = b'{"model":"mock","prompt":"hello","max_tokens":%d,"stream":%s}'
    body %= max_tokens, b"true" if stream else b"false"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


class _Connections:
    """Some connections to one server, all in one epoll."""

    def __init__(self, port: int, count: int) -> None:
        self.epoll = select.epoll()
        self.open: dict[int, socket.socket] = {}
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port))
            self.epoll.register(connection, select.EPOLLIN)
            self.open[connection.fileno()] = connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.open.values():
            connection.close()
        self.epoll.close()

    def send(self, request: bytes) -> None:
        """The same on each."""
        for connection in self.open.values():
            connection.sendall(request)
            connection.setblocking(False)


class Streams(_Connections):
    """A stream on each connection.

    Attributes:
        tokens: that have come: characters of texts, since each token of the servers here is one.
        reads: how many reads brought them.
        silent: connections that no token has come on.
    """

    def __init__(self, port: int, streams: int, max_tokens: int) -> None:
        super().__init__(port, streams)
        self.tokens = 0
        self.reads = 0
        self.silent = set(self.open)
        self.send(_request(max_tokens, stream=True))

    def begin(self, timeout: float) -> None:
        """Reads until each stream has had a token."""
        deadline = time.monotonic() + timeout
        while self.silent:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.silent)} streams had no token within {timeout} s")
            self.run(0.05)

    def run(self, seconds: float) -> None:
        """Reads for so long, or until all streams have ended."""
        deadline = time.monotonic() + seconds
        silent = self.silent
        while self.open and (left := deadline - time.monotonic()) > 0:
            for fd, _ in self.epoll.poll(left):
                data = self.open[fd].recv(_CHUNK)
                self.reads += 1
                new = sum(map(len, _TEXTS.findall(data)))
                self.tokens += new
                if silent and new:
                    silent.discard(fd)
                if not data or b"data: [DONE]" in data:
                    self.open.pop(fd).close()


class Requests(_Connections):
    """Requests one after the other on each connection, which stays.

    Args:
        max_tokens: of each.
        stream: whether the answers come as streams.

    Attributes:
        answered: how many have their whole answer.
    """

    def __init__(self, port: int, connections: int, max_tokens: int, stream: bool) -> None:
        super().__init__(port, connections)
        self.answered = 0
        self._is_whole = _is_whole_stream if stream else _is_whole_document
        self._request = _request(max_tokens, stream)
        self._parts = dict.fromkeys(self.open, b"")
        self.send(self._request)

    def run(self, seconds: float) -> None:
        """Asks and reads for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for fd, _ in self.epoll.poll(left):
                connection = self.open[fd]
                data = connection.recv(_CHUNK)
                if not data:
                    raise ConnectionError("the server closed a connection that was to stay")
                data = self._parts[fd] + data
                if not self._is_whole(data):
                    self._parts[fd] = data
                    continue
                if not data.startswith(b"HTTP/1.1 200 "):
                    raise RuntimeError(f"the server answered {data[:200]!r}")
                self._parts[fd] = b""
                self.answered += 1
                connection.sendall(self._request)


def _is_whole_stream(answer: bytes) -> bool:
    return answer.endswith(b"0\r\n\r\n")


def _is_whole_document(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    length = _LENGTH.search(head + b"\r\n")
    return bool(end) and len(body) >= int(length[1] if length else 0)
