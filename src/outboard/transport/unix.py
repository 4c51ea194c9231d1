"""Plain Unix sockets, as the data between a client and an engine core uses them: listen, connect, write, read.

A message takes one system call at each end, of the thread that has it and of the thread that wants it. ZeroMQ passes it
through a thread of its own at either end, with a wake-up each.

The client listens, one socket for each direction, and the engine core connects when it is told to serve it. Its first
bytes name the epoch, which nobody else knows. By that the client finds its connection, among whatever has connected,
once the engine core has answered; then it listens no more, so that nobody else can connect from then on.
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
from outboard.transport.sockets import remove_socket_file

__all__ = ["SCHEME", "UnixListener", "UnixMessages", "UnixWriter", "connect_unix"]

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


class UnixListener:
    """Where a client waits for one engine core. Not to be shared between threads.

    Args:
        path: the file must not exist.
        epoch: of the client and the engine core that is to connect.
        on_stranger: called with what is known of each connection that was not the engine core's.

    Attributes:
        address: for `connect_unix`.

    Raises:
        OSError: the path cannot be used, or no file descriptor is left.
    """

    def __init__(self, path: str, epoch: int, on_stranger: Callable[[str], None]) -> None:
        self.address = SCHEME + path
        self._hello = hello(epoch)
        self._on_stranger = on_stranger
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            self._listener.bind(path)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            raise OSError(error.errno, f"cannot listen on {path}: {error.strerror or error}") from error

    def accept(self) -> socket.socket | None:
        """Takes the engine core's connection, which must have been made, and listens no more; None if there is none.

        Raises:
            OSError: no file descriptor is left.
        """
        found: socket.socket | None = None
        try:
            for _ in range(_BACKLOG + 1):
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    break
                said = _first_bytes(connection)
                if said == self._hello and found is None:
                    found = connection
                else:
                    connection.close()
                    self._on_stranger(f"its first bytes were {said!r}")
            return found
        finally:
            self.close()

    def close(self) -> None:
        """Listens no more. Idempotent."""
        self._listener.close()
        remove_socket_file(self.address)


def connect_unix(address: str, epoch: int) -> socket.socket:
    """An engine core's connection to a `UnixListener`, non-blocking.

    Raises:
        OSError: nobody listens there, or no file descriptor is left.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(address.removeprefix(SCHEME))
        connection.send(hello(epoch), _NO_SIGNAL)  # an empty buffer takes it whole
    except OSError as error:
        connection.close()
        raise OSError(error.errno, f"cannot connect to {address}: {error.strerror or error}") from error
    return connection


class UnixWriter:
    """Sends messages over a connection. Never blocks but to `finish`. Belongs to one thread at a time.

    The socket takes what fits into its buffer. A message of which it took only a part is kept here, and finished before
    anything else is sent; `flush` does that.

    Args:
        connection: non-blocking; closed by whoever made it. What it has taken by then stays for the peer to read.
        high_water_mark: how many messages of usual size the socket is to hold. The system may allow it less
            (`net.core.wmem_max`), and counts bytes.
        wait_for_room: called when the socket takes no more; `flush` is to be called when it does.
        on_gone: called when the peer is found to be gone; what is sent to it then is lost.
    """

    def __init__(
        self,
        connection: socket.socket,
        high_water_mark: int,
        wait_for_room: Callable[[], None],
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        self._rest: deque[memoryview] = deque()  # of what was begun, or waits for more
        self._socket = connection
        # The kernel doubles it.
        wanted = min(high_water_mark * _USUAL_MESSAGE, _MOST_BUFFERED) // 2
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLOUT)
        self._wait_for_room = wait_for_room
        self._on_gone = on_gone

    @property
    def unsent(self) -> Sequence[Buffer]:
        """What is kept of a message that was begun."""
        return tuple(self._rest)

    def writable(self) -> bool:
        """Whether a message would be taken now; cheaper than to encode one and be refused."""
        return self.flush() and bool(self._poll.poll(0))

    def send(self, frames: Sequence[Buffer], more: bool = False, prefix: bytes = b"") -> bool:
        """Sends a message; False if the socket takes nothing of it. Auxiliary frames are not copied.

        Where `more` comes at once, or else `flush`, a small message waits for that, to be sent together. A `prefix`
        becomes part of the first frame.
        """
        head = head_of(frames, prefix)
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
            self._wait_for_room()
            return False
        except OSError:  # the peer is gone, and with it whoever wanted this
            self._on_gone()
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
            self._wait_for_room()
            return False
        except OSError:  # the peer is gone
            rest.clear()
            self._on_gone()
        return True

    def finish(self, linger_ms: int) -> None:
        """Sends nothing more. What was begun may take so long to leave."""
        deadline = time.monotonic() + linger_ms / 1000
        while not self.flush() and (left := deadline - time.monotonic()) > 0:
            self._poll.poll(math.ceil(left * 1000))
        self._rest.clear()

    def _took(self, count: int) -> None:
        rest = self._rest
        while rest and count >= len(rest[0]):
            count -= len(rest.popleft())
        if count:
            rest[0] = rest[0][count:]


class UnixMessages:
    """The messages that come over a connection. Never blocks. Not to be shared between threads.

    Args:
        connection: non-blocking; closed by whoever made it.
        max_message_bytes: of a frame.

    Attributes:
        ended: whether no more will come: the peer has closed, or sent what is no message.
    """

    def __init__(self, connection: socket.socket, max_message_bytes: int) -> None:
        self._socket = connection
        self._assembler = Assembler(max_message_bytes)
        self._emptied = False  # no need to ask the socket again before it tells
        self.ended = False

    @property
    def holds(self) -> bool:
        """Whether there may be another message among what has been read."""
        return self._assembler.holds

    def look(self) -> None:
        """The socket may have something again."""
        self._emptied = self.ended

    def next(self) -> Message | None:
        """The next message; None if it has not all come, or none will. See `Assembler.next`.

        Raises:
            ProtocolError: what came is no message.
        """
        assembler = self._assembler
        try:
            while (message := assembler.next()) is None and not self._emptied:
                room = assembler.room()
                size = self._socket.recv_into(room)
                if not size:
                    self.ended = self._emptied = True
                    return None
                assembler.came(size)
                self._emptied = size < len(room)
        except BlockingIOError:
            return None
        except OSError:
            self.ended = self._emptied = True
            return None
        except ProtocolError:
            self.ended = self._emptied = True
            self._assembler = Assembler(0)  # what is left makes no sense, and may take much memory
            raise
        return message


def _first_bytes(connection: socket.socket) -> bytes:
    """What a new connection has said; no more than a HELLO."""
    connection.setblocking(False)
    try:
        return connection.recv(HELLO_BYTES)
    except OSError:
        return b""
