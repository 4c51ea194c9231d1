"""The thread that decides who may connect to a context's TCP sockets, and counts who may not."""

from __future__ import annotations

import logging
import os
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.base import Authenticator

from outboard.transport.curve import DOMAIN, SessionKeys
from outboard.transport.tally import Tally

__all__ = ["Guard", "Watch"]

logger = logging.getLogger("outboard.transport")

_EVENT = struct.Struct("=Hi")  # as zmq.utils.monitor has it, whose import takes as long as asyncio's
_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_ENDED = int(zmq.EVENT_DISCONNECTED)
_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_WRONG_KEY = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_FAILED = _WRONG_KEY | int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL) | int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_STOPPED = int(zmq.EVENT_MONITOR_STOPPED)
_EVENTS = _ACCEPTED | _ENDED | _SUCCEEDED | _FAILED | _STOPPED
_POLLIN = int(zmq.POLLIN)


class _Silent(logging.Logger):
    """pyzmq's authenticator would log the keys that it is shown."""

    def isEnabledFor(self, level: int) -> bool:
        return False


class _Authenticator(Authenticator):
    """Lets in whoever has the session's client key."""

    def __init__(self, context: zmq.Context[Any], keys: SessionKeys) -> None:
        super().__init__(context, log=_Silent("outboard.zap"))
        self._keys = keys
        self.configure_curve_callback(DOMAIN.decode(), credentials_provider=self)
        # Not by the context, which would close it under the thread's hands in `destroy`.
        self.zap_socket = zmq.Socket(context, zmq.REP)
        self.zap_socket.linger = 0
        self.zap_socket.bind("inproc://zeromq.zap.01")

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the base for each handshake that has come so far."""
        return self._keys.lets_in(key)

    def answer(self) -> None:
        """Answers one question of ZeroMQ's."""
        _finish(self.handle_zap_message(self.zap_socket.recv_multipart()))


def _finish(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that waits for nothing: an event loop for it would cost three file descriptors."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("the authenticator waits for something")


@dataclass(slots=True)
class Watch:
    """One socket that listens. Belongs to the guard's thread.

    Attributes:
        monitor: what ZeroMQ tells of it.
        tally: who came.
        address: for messages.
        lost: for a socket of a single peer the end of a pipe, which the socket's owner must close. It becomes readable
            when that peer's connection has ended or did not come, and then holds what is wrong, or nothing. Else -1.
    """

    monitor: zmq.Socket[bytes]
    tally: Tally
    address: str = ""
    lost: int = -1
    teller: int = -1  # the pipe's other end, until it is told
    within: float = 0.0  # seconds that the single peer has to come
    deadline: float | None = None  # of `time.monotonic()`, until it came

    def tell(self, reason: str) -> None:
        """Says that the peer is lost."""
        teller, self.teller, self.deadline = self.teller, -1, None
        if teller >= 0:
            try:
                os.write(teller, reason.encode())
            except BrokenPipeError:
                pass  # whom it would concern is gone
            os.close(teller)


class Guard:
    """Answers ZeroMQ's questions who may connect, and watches the sockets that listen.

    It belongs to its context and ends with it: `context.term()` is enough, and `context.destroy()` too.

    Args:
        context: whose sockets; it must have one IO thread.
        keys: the session's.

    Raises:
        zmq.ZMQError: the context is terminated, or has another guard.
    """

    def __init__(self, context: zmq.Context[Any], keys: SessionKeys) -> None:
        self._context = context
        self._authenticator = _Authenticator(context, keys)
        self._lock = threading.Lock()  # of all below
        self._watches: dict[zmq.Socket[bytes], Watch] = {}  # by monitor
        self._new: deque[Watch] = deque()
        self._ended = False
        self._count = 0
        self._past = Tally(0)  # of sockets that were closed
        self._past_refused = 0
        self._logged = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="outboard-guard", daemon=True)
        self._thread.start()

    def watch(self, socket: zmq.Socket[bytes], handshake: float, one_peer_within: float = 0.0) -> Watch:
        """Counts who comes to a socket that is about to listen.

        Args:
            socket: not bound yet.
            handshake: seconds that its handshakes may take.
            one_peer_within: it is for a single peer, which must connect within so many seconds; 0: it is not.
        """
        with self._lock:
            if self._ended:
                raise zmq.ContextTerminated
            self._count += 1
            endpoint = f"inproc://outboard-monitor-{self._count}"
            socket.monitor(endpoint, _EVENTS)
            # Connected before anything can happen, without a limit: ZeroMQ's thread would wait for this one.
            monitor: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PAIR)
            monitor.linger = 0
            monitor.set(zmq.RCVHWM, 0)
            monitor.connect(endpoint)
            watch = Watch(monitor, Tally(handshake))
            if one_peer_within:
                watch.lost, watch.teller = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                watch.within = one_peer_within
                watch.deadline = time.monotonic() + one_peer_within
            self._new.append(watch)
            os.eventfd_write(self._wake, 1)
        return watch

    def refused(self) -> dict[str, int]:
        """See `KeyedContext.refused`."""
        now = time.monotonic()
        with self._lock:
            tallies = [watch.tally for watch in (*self._watches.values(), *self._new)]
            refused = self._past_refused + sum(tally.refused(now) for tally in tallies)
            wrong_key = self._past.wrong_key + sum(tally.wrong_key for tally in tallies)
        return {"wrong key": wrong_key, "no handshake": max(0, refused - wrong_key)}

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # they are the main thread's
        zap = self._authenticator.zap_socket
        poller = zmq.Poller()
        poller.register(zap, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(self._milliseconds()))
                if zap in ready:
                    self._authenticator.answer()
                with self._lock:
                    for monitor in ready.keys() & self._watches.keys():
                        self._read(poller, monitor)
                    if self._wake in ready:
                        os.eventfd_read(self._wake)
                        self._take_new(poller)
                    self._look_at_deadlines()
        except zmq.ContextTerminated:
            pass
        finally:
            self._close()

    def _take_new(self, poller: zmq.Poller) -> None:
        while self._new:
            watch = self._new.popleft()
            self._watches[watch.monitor] = watch
            poller.register(watch.monitor, zmq.POLLIN)

    def _read(self, poller: zmq.Poller, monitor: zmq.Socket[bytes]) -> None:
        """Takes what a monitor has told."""
        watch = self._watches[monitor]
        tally = watch.tally
        now = time.monotonic()
        while int(monitor.getsockopt(zmq.EVENTS)) & _POLLIN:
            event, value = _EVENT.unpack(monitor.recv_multipart()[0])
            if event == _ACCEPTED:
                tally.accepted(value, now)
            elif event == _SUCCEEDED:
                tally.succeeded(now)
            elif event & _FAILED:
                tally.failed(event == _WRONG_KEY)
            elif event == _ENDED:
                tally.ended(value, now)
            elif event == _STOPPED:
                self._forget(poller, watch, now)
                return
        if watch.teller >= 0 and tally.came:
            watch.deadline = None
            if tally.gone or tally.came > 1:  # who connects again has lost what was on its way
                watch.tell("")
        if not self._logged and tally.refused(now):
            self._logged = True
            logger.warning(
                "refused a connection to %s, which %s; more of them are only counted",
                watch.address,
                "has not the session's key" if tally.wrong_key else "is no engine core's, node's or front end's",
            )

    def _forget(self, poller: zmq.Poller, watch: Watch, now: float) -> None:
        """Its socket was closed."""
        poller.unregister(watch.monitor)
        del self._watches[watch.monitor]
        watch.monitor.close()
        watch.tell("")
        self._past_refused += watch.tally.refused(now)
        self._past.wrong_key += watch.tally.wrong_key

    def _milliseconds(self) -> int | None:
        """Until when to wait at most."""
        deadlines = [watch.deadline for watch in self._watches.values() if watch.deadline is not None]
        return max(0, int((min(deadlines) - time.monotonic()) * 1000) + 1) if deadlines else None

    def _look_at_deadlines(self) -> None:
        now = time.monotonic()
        for watch in self._watches.values():
            if watch.deadline is not None and watch.deadline <= now:
                watch.tell(
                    f"nobody connected to {watch.address} within {watch.within:g} s; can that port be reached from "
                    "where the engine core runs?"
                )

    def _close(self) -> None:
        with self._lock:
            self._ended = True
            for watch in (*self._watches.values(), *self._new):
                watch.monitor.close()
                watch.tell("")
            self._authenticator.zap_socket.close()
            os.close(self._wake)
