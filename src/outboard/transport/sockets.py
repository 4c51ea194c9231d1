"""The only place that makes ZeroMQ sockets.

    input    ROUTER (client, bound) -> DEALER (engine core)
    output   PUSH (engine core) -> PULL (client, bound)
    control  DEALER (engine core) <-> ROUTER (launcher, bound): the handshake

One socket for each direction: a send on a socket eats the edge of its file descriptor, and a reader that waits for that
edge would sleep for ever.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import zmq
from zmq.backend import Socket as SocketBase

from outboard.config import TransportConfig
from outboard.protocol.tensors import Buffer

__all__ = [
    "ControlClient",
    "ControlServer",
    "InputReceiver",
    "OutputSender",
    "ZmqContext",
    "ZmqSocket",
    "bind_input",
    "bind_output",
    "make_context",
    "wait_for_peers",
    "wait_readable",
]

ZmqContext: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
ZmqSocket: TypeAlias = "zmq.Socket[bytes]"

# A plain int: arithmetic on ZeroMQ's enums costs 1 us.
_NOBLOCK = int(zmq.NOBLOCK)

# File descriptors that a client may need: 17 with its process, its sockets and their engine core, and some to spare.
_DESCRIPTORS = 32

# Handshake messages are small; a peer that sends more is none of ours.
_MAX_CONTROL_BYTES = 16 << 20


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raises what ZeroMQ cannot get of the system, such as file descriptors, as the OSError that it is."""
    try:
        yield
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"ZeroMQ: {error.strerror}") from error


@_os_errors()
def make_context() -> ZmqContext:
    """A context with one IO thread. A context of our own can be terminated, so that nothing is left afterwards.

    Raises:
        OSError: too few file descriptors are left; ZeroMQ would abort the whole process where it runs out of them.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if limit - used < _DESCRIPTORS:
        raise OSError(
            errno.EMFILE,
            f"too few file descriptors are left: a client needs up to {_DESCRIPTORS}, {used} of {limit} are in use; "
            "raise the limit (ulimit -n)",
        )
    return zmq.Context(io_threads=1)


@_os_errors()
def bind_input(context: ZmqContext, address: str, config: TransportConfig) -> ZmqSocket:
    """A client's ROUTER, which addresses engine cores by identity."""
    socket = _make(context, zmq.ROUTER, config)
    # Without it a ROUTER drops silently what it cannot route, and what exceeds its high-water mark.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(address)
    return socket


@_os_errors()
def bind_output(context: ZmqContext, address: str, config: TransportConfig) -> ZmqSocket:
    """A client's PULL."""
    socket = _make(context, zmq.PULL, config)
    socket.bind(address)
    return socket


class InputReceiver:
    """An engine core's DEALER. Belongs to the input thread."""

    def __init__(self, context: ZmqContext, address: str, identity: bytes, config: TransportConfig) -> None:
        self._socket = _make(context, zmq.DEALER, config)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address)
        # A ROUTER can address a peer only once it knows its identity: the client waits for this before it is ready.
        self._socket.send(b"")

    def receive(self) -> list[Buffer] | None:
        """The frames of the next message; blocks. None once the context is terminated: the socket is then closed."""
        try:
            frames: list[Buffer] = []
            while True:  # `recv_multipart` would ask the socket for what each frame knows: whether there are more
                frame = SocketBase.recv(self._socket, copy=False)
                frames.append(frame.buffer)
                if not frame.more:
                    return frames
        except zmq.ContextTerminated:
            self._socket.close(linger=0)
            return None


class OutputSender:
    """An engine core's PUSH. Never blocks."""

    def __init__(self, context: ZmqContext, address: str, config: TransportConfig) -> None:
        self._socket = _make(context, zmq.PUSH, config)
        self._socket.connect(address)
        # Past pyzmq's wrapper, which only adds arguments of other socket types.
        self._send = functools.partial(SocketBase.send, self._socket)

    def writable(self) -> bool:
        """Whether a message would be taken now; cheaper than to encode one and be refused."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLOUT))

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Sends a message; False if ZeroMQ holds as many as it may. Auxiliary frames are not copied."""
        socket = self._socket
        try:
            if len(frames) == 1:
                self._send(frames[0], _NOBLOCK)
                return True
            socket.send(frames[0], zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.Again:
            return False
        # The first frame reserved the place of all: the rest cannot be refused.
        for frame in frames[1:-1]:
            socket.send(frame, zmq.SNDMORE, copy=False)
        socket.send(frames[-1], copy=False)
        return True

    def close(self, linger_ms: int) -> None:
        """Closes; what is still held is sent for up to `linger_ms` while the context terminates."""
        self._socket.close(linger=linger_ms)


class ControlServer:
    """The launcher's end of the control channel: a ROUTER."""

    @_os_errors()
    def __init__(self, context: ZmqContext, address: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_CONTROL_BYTES)
        self._socket.bind(address)

    def wait(self, fds: Sequence[int], timeout: float) -> set[int]:
        """Waits until a message is there or one of `fds` is readable, at most `timeout` seconds; the readable `fds`."""
        return wait_readable(self._socket, fds, timeout)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """(sender, frames) of the next message; None if there is none."""
        try:
            sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return sender, frames

    def send(self, receiver: bytes, body: bytes) -> None:
        """Sends to a peer that has sent something; a peer that is gone is no error."""
        self._socket.send_multipart([receiver, body])

    def close(self) -> None:
        self._socket.close(linger=0)


class ControlClient:
    """An engine core's end of the control channel: a DEALER."""

    def __init__(self, context: ZmqContext, address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)

    def send(self, body: bytes) -> None:
        self._socket.send(body)

    def receive(self) -> bytes:
        """The next message; blocks. An owner that is gone ends this process, so there is no time limit here."""
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close()


def wait_readable(socket: ZmqSocket, fds: Sequence[int], timeout: float | None) -> set[int]:
    """Waits until a message is there or one of `fds` is readable, at most `timeout` seconds; the readable `fds`."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    for fd in fds:
        poller.register(fd, zmq.POLLIN)
    # Rounded up: poll() counts in milliseconds, and 0 would not wait at all.
    milliseconds = None if timeout is None else max(0, math.ceil(timeout * 1000))
    return {ready for ready, _ in poller.poll(milliseconds) if isinstance(ready, int)}


def wait_for_peers(socket: ZmqSocket, identities: set[bytes], timeout: float) -> set[bytes]:
    """Waits until these identities have connected to a client's input socket; those that have not in `timeout` s."""
    missing = set(identities)
    deadline = time.monotonic() + timeout
    while missing and socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        missing.discard(socket.recv_multipart()[0])
    return missing


def _make(context: ZmqContext, kind: int, config: TransportConfig) -> ZmqSocket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, config.high_water_mark)
    socket.setsockopt(zmq.RCVHWM, config.high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, config.max_message_bytes)
    return socket
