"""Many sockets, one thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outboard.config import TransportConfig
from outboard.transport.poller import SocketPoller
from outboard.transport.sockets import ZmqContext
from outboard.transport.zmq_inputs import ZmqInputReceiver, ZmqInputSender, bind_input

CONFIG = TransportConfig()


@pytest.fixture
def poller() -> Iterator[SocketPoller]:
    poller = SocketPoller()
    yield poller
    poller.close()


class Line:
    """A ROUTER, the receiver at its other end, and what that has read, up to `limit` messages a time."""

    def __init__(self, context: ZmqContext, address: str, limit: int = 64) -> None:
        self.sender = ZmqInputSender(
            bind_input(context, address, CONFIG), address, b"peer", lambda delay, callback: None
        )
        self.receiver = ZmqInputReceiver(context, address, b"peer", CONFIG)
        self.sender.wait_for_peer(10)
        self.got: list[bytes] = []
        self.limit = limit

    def send(self, *bodies: bytes) -> None:
        for body in bodies:
            assert self.sender.send([b"\x00", body])

    def read(self) -> bool:
        for _ in range(self.limit):
            frames = self.receiver.receive()
            if frames is None:
                return False
            self.got.append(bytes(frames[1]))
        return True


@pytest.fixture
def line(context: ZmqContext, short_tmp: Path) -> Callable[..., Line]:
    count = iter(range(100))
    return lambda **kwargs: Line(context, f"ipc://{short_tmp}/{next(count)}", **kwargs)


def turn_until(poller: SocketPoller, condition: Callable[[], bool]) -> None:
    """Each turn waits for an event; the time limit of the test is the bound."""
    while not condition():
        poller.turn()


def test_what_came_before_the_socket_was_added_is_read(poller: SocketPoller, line: Callable[..., Line]) -> None:
    one = line()
    one.send(b"1", b"2")
    poller.add(one.receiver.fd, one.read)
    turn_until(poller, lambda: one.got == [b"1", b"2"])


def test_each_message_of_each_socket_is_read_in_order(poller: SocketPoller, line: Callable[..., Line]) -> None:
    lines = [line(limit=3) for _ in range(5)]
    for one in lines:
        poller.add(one.receiver.fd, one.read)
    expected = [b"%d" % number for number in range(100)]
    for start in range(0, 100, 10):
        for one in lines:
            one.send(*expected[start : start + 10])
        turn_until(poller, lambda start=start: all(len(one.got) == start + 10 for one in lines))  # type: ignore[misc]
    assert all(one.got == expected for one in lines)


def test_one_that_sends_much_does_not_keep_others_waiting(poller: SocketPoller) -> None:
    """Each turn reads all that may have something, once."""
    calls: list[str] = []
    much, little = os.eventfd(1), os.eventfd(0)

    def read(name: str, unfinished: bool) -> bool:
        calls.append(name)
        return unfinished

    try:
        poller.add(much, lambda: read("much", True))
        poller.add(little, lambda: read("little", False))
        poller.turn()
        poller.turn()
        assert calls == ["much", "little", "much"]
        os.eventfd_write(little, 1)
        poller.turn()
        assert calls[3:] == ["much", "little"]
    finally:
        os.close(much)
        os.close(little)


def test_a_socket_that_is_removed_is_not_read(poller: SocketPoller, line: Callable[..., Line]) -> None:
    """Also where it was left unfinished, where another's reader removes it, and where its descriptor is used again."""
    first, second, third = line(limit=1), line(), line()
    poller.add(first.receiver.fd, first.read)

    def remove_and_replace() -> bool:
        if len(second.got) == 0 and not second.read() and second.got:
            poller.remove(first.receiver.fd)
            first.receiver.close()
            poller.add(third.receiver.fd, third.read)
        return False

    first.send(b"1", b"2", b"3")
    turn_until(poller, lambda: bool(first.got))
    poller.add(second.receiver.fd, remove_and_replace)
    second.send(b"x")
    third.send(b"z")
    turn_until(poller, lambda: bool(third.got))
    assert third.got == [b"z"]
