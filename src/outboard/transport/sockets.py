"""The only place that makes ZeroMQ sockets.

    input    ROUTER (client, bound) -> DEALER (engine core)
    output   PUSH (engine core) -> PULL (client, bound)
    control  DEALER (engine core, client) <-> ROUTER (launcher, bound): the handshake, states, introductions

An address says whether a socket is one of this host or of TCP; the latter has the keys of its context (curve.py).

One socket for each direction: a send on a socket eats the edge of its file descriptor, and a reader that waits for that
edge would sleep for ever.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import resource
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import zmq
from zmq.backend import Socket as SocketBase

from outboard.config import NetworkConfig, TransportConfig
from outboard.protocol.tensors import Buffer
from outboard.transport.curve import KeyedContext, SessionKeys
from outboard.transport.network import bind_tcp, connect, is_tcp

__all__ = [
    "ContextTerminated",
    "ControlClient",
    "ControlServer",
    "ZmqContext",
    "ZmqSender",
    "ZmqSocket",
    "bind_output",
    "check_descriptors",
    "closed_on_error",
    "connect_control",
    "make_context",
    "make_socket",
    "os_errors",
    "remove_socket_file",
    "wait_readable",
]

ZmqContext: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
ZmqSocket: TypeAlias = "zmq.Socket[bytes]"
# What every call raises that meets the end of its context.
ContextTerminated = zmq.ContextTerminated

# Plain ints: arithmetic on ZeroMQ's enums costs 1 us.
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)

# File descriptors that a client may need: 17 with its process, its sockets and their engine core, and some to spare.
_DESCRIPTORS = 32

# What a control server's senders begin with: whether they are on this host.
_LOCAL = b"l"
_FAR = b"f"

# Handshake messages are small; a peer that sends more is none of ours.
_MAX_CONTROL_BYTES = 16 << 20


@contextmanager
def os_errors() -> Iterator[None]:
    """Raises what ZeroMQ cannot get of the system, such as file descriptors, as the OSError that it is."""
    try:
        yield
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"ZeroMQ: {error.strerror}") from error


@contextmanager
def closed_on_error(socket: ZmqSocket) -> Iterator[None]:
    """Closes the socket where something is raised."""
    try:
        yield
    except BaseException:
        socket.close(linger=0)
        raise


@os_errors()
def make_context(keys: SessionKeys | None = None) -> ZmqContext:
    """A context with one IO thread. A context of our own can be terminated, so that nothing is left afterwards.

    Args:
        keys: for its sockets with an address of TCP; without them it can have none.

    Raises:
        OSError: too few file descriptors are left; ZeroMQ would abort the whole process where it runs out of them.
    """
    check_descriptors(_DESCRIPTORS, "a client")
    return zmq.Context(io_threads=1) if keys is None else KeyedContext(keys)


def check_descriptors(needed: int, who: str) -> None:
    """Makes sure that so many file descriptors can be had.

    Raises:
        OSError: too few are left; ZeroMQ would abort the whole process where it runs out of them.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if limit - used < needed:
        raise OSError(
            errno.EMFILE,
            f"too few file descriptors are left: {who} needs up to {needed}, {used} of {limit} are in use; "
            "raise the limit (ulimit -n)",
        )


@os_errors()
def bind_output(context: ZmqContext, address: str, config: TransportConfig) -> ZmqSocket:
    """A client's PULL."""
    socket = make_socket(context, zmq.PULL, config)
    socket.bind(address)
    return socket


@os_errors()
def connect_control(context: ZmqContext, address: str) -> ZmqSocket:
    """A client's DEALER to its launcher."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)  # a launcher that is busy for a moment loses nothing
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_CONTROL_BYTES)
    with closed_on_error(socket):
        connect(socket, address)
    return socket


class ZmqSender:
    """An engine core's PUSH. Never blocks.

    Raises:
        OSError: the address is none, or too few file descriptors are left.
    """

    @os_errors()
    def __init__(self, context: ZmqContext, address: str, config: TransportConfig) -> None:
        self._socket = make_socket(context, zmq.PUSH, config)
        with closed_on_error(self._socket):
            connect(self._socket, address)
        # Past pyzmq's wrapper, which only adds arguments of other socket types.
        self._send = functools.partial(SocketBase.send, self._socket)

    def writable(self) -> bool:
        """Whether a message would be taken now; cheaper than to encode one and be refused."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLOUT))

    def send(self, frames: Sequence[Buffer], more: bool = False) -> bool:
        """Sends a message; False if ZeroMQ holds as many as it may. Auxiliary frames are not copied.

        `more` means nothing here: ZeroMQ's thread sends together what it finds.
        """
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

    def flush(self) -> bool:
        """ZeroMQ's thread does it."""
        return True

    def close(self, linger_ms: int) -> None:
        """Closes; what is still held is sent for up to `linger_ms` while the context terminates."""
        self._socket.close(linger=linger_ms)


class ControlServer:
    """The launcher's end of the control channel, or a hub such as a coordinator: a ROUTER.

    Where there is a network, a second one listens by TCP; whom a message is from says which of them brought it.

    Args:
        context: of the sockets; with the session's keys where there is a network.
        address: for peers on this host.
        high_water_mark: messages held for each peer; what exceeds them is dropped silently. 0: no limit.
        network: where to listen for peers on other machines; None: nowhere.
        port: there; 0: any free one; None: one of `network.ports`.

    Attributes:
        tcp_address: for peers on other machines; "": there are none.

    Raises:
        ConfigError: there is no such interface or address, or no key to listen with.
        OSError: an address is taken, or too few file descriptors are left.
    """

    @os_errors()
    def __init__(
        self,
        context: ZmqContext,
        address: str,
        high_water_mark: int = 0,
        network: NetworkConfig | None = None,
        port: int | None = None,
    ) -> None:
        self.tcp_address = ""
        self._sockets: dict[bytes, ZmqSocket] = {}  # by what senders of theirs begin with
        with ExitStack() as undo:
            for mark in (_LOCAL, _FAR) if network is not None else (_LOCAL,):
                socket = self._sockets[mark] = context.socket(zmq.ROUTER)
                undo.callback(socket.close, linger=0)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.MAXMSGSIZE, _MAX_CONTROL_BYTES)
                socket.setsockopt(zmq.SNDHWM, high_water_mark)
                socket.setsockopt(zmq.RCVHWM, 0)
            self._sockets[_LOCAL].bind(address)
            if network is not None:
                # Who comes back, before it was noticed that it had gone, is not turned away.
                self._sockets[_FAR].setsockopt(zmq.ROUTER_HANDOVER, 1)
                self.tcp_address = bind_tcp(self._sockets[_FAR], network, port)
            undo.pop_all()

    def wait(self, fds: Sequence[int], timeout: float | None) -> set[int]:
        """Waits until a message is there or one of `fds` is readable, at most `timeout` seconds; the readable `fds`."""
        first, *others = self._sockets.values()
        return wait_readable(first, fds, timeout, *others)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """(sender, frames) of the next message; None if there is none."""
        for mark, socket in self._sockets.items():
            try:
                sender, *frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                continue
            if len(self._sockets) > 1:  # who has much to say is heard after the others
                self._sockets[mark] = self._sockets.pop(mark)
            return mark + sender, frames
        return None

    def send(self, receiver: bytes, body: bytes) -> None:
        """Sends to a peer that has sent something; a peer that is gone is no error."""
        socket = self._sockets.get(receiver[:1])
        if socket is not None:
            socket.send_multipart([receiver[1:], body])

    def close(self, linger_ms: int = 0) -> None:
        """Closes; what has not left may take `linger_ms` while the context terminates."""
        for socket in self._sockets.values():
            socket.close(linger=linger_ms)


class ControlClient:
    """An engine core's end of the control channel: a DEALER. The input thread's once the engine core is ready.

    Attributes:
        fd: for `SocketPoller`.
    """

    def __init__(self, context: ZmqContext, address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        if is_tcp(address):  # it stays when the connection is a new one; nobody can guess it, and take that place
            self._socket.setsockopt(zmq.IDENTITY, b"e" + secrets.token_bytes(16))
        with closed_on_error(self._socket):
            connect(self._socket, address)
        self.fd = int(self._socket.getsockopt(zmq.FD))

    def send(self, body: bytes) -> None:
        self._socket.send(body)

    def receive(self) -> bytes:
        """The next message; blocks. An owner that is gone ends this process, so there is no time limit here."""
        return self._socket.recv()

    def receive_now(self) -> list[bytes] | None:
        """The frames of the next message; None if there is none.

        Raises:
            ContextTerminated: it is time to close.
        """
        if not int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            return None
        return self._socket.recv_multipart(_NOBLOCK)

    def close(self) -> None:
        """Closes; what has not left may take 1 s while the context terminates."""
        self._socket.close()


def remove_socket_file(address: str) -> None:
    """Removes the file of an address, or a path, which stays when a socket is closed. Never raises. TCP has none."""
    if address.startswith("tcp://"):
        return
    try:
        os.unlink(address.rpartition("://")[2])  # noqa: PTH108 - also called by finalizers: the less code the better
    except OSError:
        pass  # the whole session's directory may be gone


def wait_readable(socket: ZmqSocket, fds: Sequence[int], timeout: float | None, *others: ZmqSocket) -> set[int]:
    """Waits until a message is there or one of `fds` is readable, at most `timeout` seconds; the readable `fds`.

    The `others` are sockets whose messages count too.
    """
    poller = zmq.Poller()
    for one in (socket, *others):
        poller.register(one, zmq.POLLIN)
    for fd in fds:
        poller.register(fd, zmq.POLLIN)
    # Rounded up: poll() counts in milliseconds, and 0 would not wait at all.
    milliseconds = None if timeout is None else max(0, math.ceil(timeout * 1000))
    return {ready for ready, _ in poller.poll(milliseconds) if isinstance(ready, int)}


def make_socket(context: ZmqContext, kind: int, config: TransportConfig) -> ZmqSocket:
    """A socket with the limits of a config, neither bound nor connected."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, config.high_water_mark)
    socket.setsockopt(zmq.RCVHWM, config.high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, config.max_message_bytes)
    return socket
