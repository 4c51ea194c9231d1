"""Outputs over a plain Unix socket: the engine core's end and the client's.

A message takes one system call at each end, of the thread that has it and of the thread that wants it. ZeroMQ passes it
through a thread of its own at either end, with a wake-up each.

The client listens, and the engine core connects when it is told to serve it. Its first bytes name the epoch, which
nobody else knows. By that the client finds its connection, among whatever has connected, once the engine core has
answered; then it listens no more, so that nobody else can connect from then on.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from outboard.errors import ProtocolError
from outboard.protocol.tensors import Buffer
from outboard.transport.framing import HELLO_BYTES, Assembler, Message, head_of, hello
from outboard.transport.poller import SocketPoller
from outboard.transport.reader import MAX_MESSAGES, MAX_TOKENS, Loop, OnMessage
from outboard.transport.sockets import remove_socket_file

__all__ = ["SCHEME", "UnixReader", "UnixSender"]

SCHEME = "unix://"

_NO_SIGNAL = int(socket.MSG_NOSIGNAL)  # an engine may have made SIGPIPE deadly again

# What a step's message of usual size takes of a socket's buffer, and the most to be asked for, bytes.
_USUAL_MESSAGE = 4096
_MOST_BUFFERED = 8 << 20
# Buffers in one system call; the kernel takes at most 1024 (IOV_MAX).
_AT_ONCE = 64
# A body up to this size is copied behind its head: that is cheaper than a list of two buffers.
_COPIED = 64 << 10
# Connections that may wait for the client to look at them.
_BACKLOG = 128


class UnixSender:
    """The engine core's end. Never blocks but to close. Belongs to the busy loop, once made.

    The socket takes what fits into its buffer. A message of which it took only a part is kept here, and finished before
    anything else is sent; `flush` does that.

    Args:
        address: where the client listens.
        epoch: of the client and this engine core.
        high_water_mark: how many messages of usual size the socket is to hold. The system may allow it less
            (`net.core.wmem_max`), and counts bytes.
        poller: tells when a socket that took no more is to be tried again.
        on_writable: called by the poller then, in its thread.

    Raises:
        OSError: nobody listens there, or no file descriptor is left.
    """

    def __init__(
        self, address: str, epoch: int, high_water_mark: int, poller: SocketPoller, on_writable: Callable[[], None]
    ) -> None:
        self._rest: deque[memoryview] = deque()  # of what was begun, or waits for more
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            # The kernel doubles it.
            wanted = min(high_water_mark * _USUAL_MESSAGE, _MOST_BUFFERED) // 2
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)
            self._socket.connect(address.removeprefix(SCHEME))
            self._socket.send(hello(epoch), _NO_SIGNAL)  # an empty buffer takes it whole
        except OSError as error:
            self._socket.close()
            raise OSError(error.errno, f"cannot connect to {address}: {error.strerror or error}") from error
        self._fd = self._socket.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)
        self._poller = poller
        poller.add_writable(self._fd, on_writable)

    def writable(self) -> bool:
        """Whether a message would be taken now; cheaper than to encode one and be refused."""
        return self.flush() and bool(self._poll.poll(0))

    def send(self, frames: Sequence[Buffer], more: bool = False) -> bool:
        """Sends a message; False if the socket takes nothing of it. Auxiliary frames are not copied.

        Where `more` comes at once, or else `flush`, a small message waits for that, to be sent together.
        """
        head = head_of(frames)
        if more and len(frames) == 1 and len(self._rest) < _AT_ONCE:
            self._rest.append(memoryview(head + frames[0]))
            return True
        if self._rest and not self.flush():
            return False
        try:
            if len(frames) == 1 and len(frames[0]) <= _COPIED:
                data = head + frames[0]
                sent = self._socket.send(data, _NO_SIGNAL)
                if sent == len(data):
                    return True
                self._rest.append(memoryview(data))
            else:
                parts = [memoryview(part) for part in (head, *frames)]
                sent = self._socket.sendmsg(parts[:_AT_ONCE], (), _NO_SIGNAL)
                self._rest.extend(parts)
        except BlockingIOError:
            self._poller.arm(self._fd)
            return False
        except OSError:  # the client is gone, and with it whoever wanted this
            return True
        self._took(sent)
        self.flush()
        return True

    def flush(self) -> bool:
        """Goes on with the message that was begun; whether all of it has been taken."""
        rest = self._rest
        if not rest:
            return True
        try:
            while rest:
                self._took(self._socket.sendmsg(list(islice(rest, _AT_ONCE)), (), _NO_SIGNAL))
        except BlockingIOError:
            self._poller.arm(self._fd)
            return False
        except OSError:  # the client is gone
            rest.clear()
        return True

    def close(self, linger_ms: int) -> None:
        """Closes. What was begun may take so long to leave; what the socket has taken stays for the client to read."""
        deadline = time.monotonic() + linger_ms / 1000
        while not self.flush() and (left := deadline - time.monotonic()) > 0:
            self._poll.poll(math.ceil(left * 1000))
        self._rest.clear()
        if self._socket.fileno() >= 0:
            self._poller.remove(self._fd)
            self._socket.close()

    def _took(self, count: int) -> None:
        rest = self._rest
        while rest and count >= len(rest[0]):
            count -= len(rest.popleft())
        if count:
            rest[0] = rest[0][count:]


class UnixReader:
    """The client's end: calls `on_message(body, auxiliary frames)` for every message.

    Not to be shared between threads. Holds its functions strongly: what must not be kept alive must not be reachable
    from them. An exception of `on_message` is not caught here. A body is valid during the call.

    Args:
        path: where to listen; the file must not exist.
        epoch: of the client and the engine core that is to connect.
        max_message_bytes: of a frame.
        on_message: see above.
        on_end: called once, when no more will come: with what is wrong, or with nothing where the other end was closed.
        on_stranger: called with what is known of each connection that was not the engine core's.

    Attributes:
        address: for `UnixSender`.

    Raises:
        OSError: the path cannot be used, or no file descriptor is left.
    """

    def __init__(
        self,
        path: str,
        epoch: int,
        max_message_bytes: int,
        on_message: OnMessage,
        on_end: Callable[[str], None],
        on_stranger: Callable[[str], None],
    ) -> None:
        self.address = SCHEME + path
        self._hello = hello(epoch)
        self._on_message = on_message
        self._on_end = on_end
        self._on_stranger = on_stranger
        self._assembler = Assembler(max_message_bytes)
        self._scheduled = False  # whether there is a callback on the loop, besides the descriptor's
        self._emptied = False  # in this drain: no need to ask the socket again
        self._loop: Loop | None = None
        self._socket: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            self._listener.bind(path)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            raise OSError(error.errno, f"cannot listen on {path}: {error.strerror or error}") from error

    def accept(self) -> bool:
        """Takes the engine core's connection, which must have been made, and listens no more; False if there is none.

        Raises:
            OSError: no file descriptor is left.
        """
        try:
            for _ in range(_BACKLOG + 1):
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    break
                said = _first_bytes(connection)
                if said == self._hello and self._socket is None:
                    self._socket = connection
                else:
                    connection.close()
                    self._on_stranger(f"its first bytes were {said!r}")
            return self._socket is not None
        finally:
            self._listener.close()
            remove_socket_file(self.address)

    def attach(self, loop: Loop) -> None:
        """Starts reading on `loop`; call it on that loop."""
        if self._socket is not None:
            self._loop = loop
            loop.add_reader(self._socket.fileno(), self._on_readable)

    def drain(self, limit: int) -> int:
        """Hands on up to `limit` messages that are there, fewer where they hold many tokens; how many they were."""
        self._emptied = False
        tokens = 0
        for count in range(limit):
            if self._socket is None or (message := self._next(self._socket)) is None:
                return count
            tokens += self._on_message(*message) or 0
            if tokens >= MAX_TOKENS:
                return count + 1
        return limit

    def stop(self) -> None:
        """Takes no more, and lets the engine core know. Idempotent. Call it on the loop, or where none runs."""
        connection, self._socket = self._socket, None
        loop, self._loop = self._loop, None
        if connection is not None:
            if loop is not None and not loop.is_closed():
                loop.remove_reader(connection.fileno())
            connection.close()

    def close(self) -> None:
        """Frees all, once it was stopped. Idempotent."""
        self._listener.close()
        remove_socket_file(self.address)

    def _on_turn(self) -> None:
        self._scheduled = False
        self._on_readable()

    def _on_readable(self) -> None:
        loop = self._loop
        if loop is None or self._scheduled:  # two drains a turn would become three in the next, and so on
            return
        try:
            self.drain(MAX_MESSAGES)
        finally:
            # What is in the socket is told of again, what is here is not.
            if self._assembler.holds and self._loop is loop:
                self._scheduled = True
                loop.call_soon(self._on_turn)

    def _next(self, connection: socket.socket) -> Message | None:
        """The next message; None if it has not all come."""
        assembler = self._assembler
        try:
            while (message := assembler.next()) is None and not self._emptied:
                room = assembler.room()
                size = connection.recv_into(room)
                if not size:
                    self._end("")
                    return None
                assembler.came(size)
                self._emptied = size < len(room)
        except BlockingIOError:
            return None
        except OSError:
            self._end("")
            return None
        except ProtocolError as error:
            self._end(str(error))
            return None
        return message

    def _end(self, reason: str) -> None:
        self.stop()
        self._on_end(reason)


def _first_bytes(connection: socket.socket) -> bytes:
    """What a new connection has said; no more than a HELLO."""
    connection.setblocking(False)
    try:
        return connection.recv(HELLO_BYTES)
    except OSError:
        return b""
