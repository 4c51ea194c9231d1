"""What a client sends: held where ZeroMQ refuses, in order, one peer apart from the other. (Unix: test_unix_inputs.py.)

Over `inproc` a high-water mark of 2 at both ends is exactly 4 messages, so nothing here depends on time. Retries run
when the test says so; they are repeated, since ZeroMQ looks for new room at most once a millisecond.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import zmq

from outboard.config import TransportConfig
from outboard.transport.outbox import Outbox
from outboard.transport.sockets import ZmqContext
from outboard.transport.zmq_inputs import ZmqInputReceiver, ZmqInputSender, bind_input

TIGHT = TransportConfig(high_water_mark=2)
ROOM = 4


class Timer:
    """Keeps what was to be called later."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []
        self.delays: list[float] = []

    def __call__(self, delay: float, callback: Callable[[], None]) -> None:
        self.delays.append(delay)
        self.due.append(callback)

    def run(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


@pytest.fixture
def timer() -> Timer:
    return Timer()


@pytest.fixture
def listen(context: ZmqContext, timer: Timer) -> Iterator[Callable[..., ZmqInputSender]]:
    """Makes a client's end for one engine core."""
    senders: list[ZmqInputSender] = []

    def listen(identity: bytes = b"a", timer: Timer = timer) -> ZmqInputSender:
        address = f"inproc://{identity.decode()}"
        senders.append(ZmqInputSender(bind_input(context, address, TIGHT), address, identity, timer))
        return senders[-1]

    yield listen
    for sender in senders:
        sender.stop()
        sender.close()


@pytest.fixture
def sender(listen: Callable[..., ZmqInputSender]) -> ZmqInputSender:
    return listen()


def connect(context: ZmqContext, sender: ZmqInputSender) -> ZmqInputReceiver:
    receiver = ZmqInputReceiver(context, sender.address, sender._identity, TIGHT)
    sender.wait_for_peer(10)
    return receiver


def message(number: int) -> list[Any]:
    return [b"\x00", number.to_bytes(4, "big")]


def frames_of(receiver: ZmqInputReceiver, timer: Timer | None = None) -> Sequence[Any]:
    """The next message's frames; retries what is held until there is one."""
    for _ in range(10_000):
        if receiver._socket.poll(1):
            frames = receiver.receive()
            assert frames is not None
            return frames
        assert timer is not None, "no message came"
        timer.run()
    raise AssertionError("no message came")


def receive(receiver: ZmqInputReceiver, timer: Timer | None = None) -> int:
    kind, body, *_ = frames_of(receiver, timer)
    assert bytes(kind) == b"\x00"
    return int.from_bytes(body, "big")


def test_messages_leave_at_once_while_there_is_room(context: ZmqContext, sender: ZmqInputSender, timer: Timer) -> None:
    receiver = connect(context, sender)
    outbox = Outbox(sender)
    for number in range(ROOM):
        outbox.send(message(number))
    assert [receive(receiver) for _ in range(ROOM)] == list(range(ROOM))
    assert (len(outbox), timer.due, outbox.sent) == (0, [], ROOM)


def test_what_is_refused_is_held_and_sent_later_in_order(
    context: ZmqContext, sender: ZmqInputSender, timer: Timer
) -> None:
    receiver = connect(context, sender)
    outbox = Outbox(sender)
    for number in range(20):
        outbox.send(message(number))
    assert len(outbox) == 20 - ROOM
    assert outbox.sent == ROOM
    got = [receive(receiver) for _ in range(ROOM)]
    sender._socket.getsockopt(zmq.EVENTS)  # it learns that there is room
    outbox.send(message(20))  # but others wait
    assert len(outbox) == 21 - ROOM
    while len(got) < 21:
        got.append(receive(receiver, timer))
    assert got == list(range(21))
    timer.run()
    assert (len(outbox), timer.due) == (0, [])


def test_retries_come_one_at_a_time_after_1_to_20_ms(context: ZmqContext, sender: ZmqInputSender, timer: Timer) -> None:
    receiver = connect(context, sender)
    outbox = Outbox(sender)
    for number in range(10):
        outbox.send(message(number))
        assert len(timer.due) == (1 if number >= ROOM else 0)
    for _ in range(10):
        timer.run()
        assert len(timer.due) == 1
    assert timer.delays[0] == 0.001
    assert timer.delays == sorted(timer.delays)
    assert timer.delays[-1] == 0.020
    for number in range(10):
        assert receive(receiver, timer) == number
    assert 0.001 in timer.delays[1:]  # it moved again
    timer.run()
    assert timer.due == []
    timer.delays.clear()
    for number in range(10):
        outbox.send(message(number))
    assert timer.delays[0] == 0.001


def test_a_held_message_can_be_taken_back(context: ZmqContext, sender: ZmqInputSender, timer: Timer) -> None:
    receiver = connect(context, sender)
    outbox = Outbox(sender)
    for number in range(8):
        outbox.send(message(number), key=number)
    outbox.send(message(8))
    assert not outbox.take_back(0)  # it has been sent
    assert not outbox.take_back(99)
    assert outbox.take_back(5)
    assert not outbox.take_back(5)
    assert outbox.take_back(7)
    got: list[int] = []
    while len(got) < 7:
        got.append(receive(receiver, timer))
    assert got == [0, 1, 2, 3, 4, 6, 8]
    assert len(outbox) == 0


def test_a_blocked_peer_delays_no_other(
    context: ZmqContext, listen: Callable[..., ZmqInputSender], timer: Timer
) -> None:
    fine_timer = Timer()
    senders = [listen(b"blocked"), listen(b"fine", fine_timer)]
    receivers = [connect(context, sender) for sender in senders]
    blocked, fine = map(Outbox, senders)
    for number in range(50):
        blocked.send(message(number))
    assert len(blocked) == 50 - ROOM
    for start in range(0, ROOM * 10, ROOM):
        for number in range(start, start + ROOM):
            blocked.send(message(number))
            fine.send(message(number))
        timer.run()
        assert [receive(receivers[1], fine_timer) for _ in range(ROOM)] == list(range(start, start + ROOM))
    assert len(fine) == 0
    assert len(blocked) == 50 - ROOM + ROOM * 10


def test_a_peer_that_is_not_there_yet(context: ZmqContext, sender: ZmqInputSender, timer: Timer) -> None:
    outbox = Outbox(sender)
    outbox.send(message(0))
    outbox.send(message(1))
    timer.run()
    assert (len(outbox), len(timer.due), outbox.sent) == (2, 1, 0)
    receiver = connect(context, sender)
    timer.run()
    assert [receive(receiver), receive(receiver)] == [0, 1]
    assert (len(outbox), outbox.sent) == (0, 2)


def test_clear_forgets_what_is_held(context: ZmqContext, sender: ZmqInputSender, timer: Timer) -> None:
    outbox = Outbox(sender)
    for number in range(3):
        outbox.send(message(number), key=number)
    outbox.clear()
    assert (len(outbox), outbox.take_back(1)) == (0, False)
    timer.run()
    assert timer.due == []
    outbox.send(message(3))  # and it goes on
    assert len(timer.due) == 1


def test_a_retry_after_the_socket_was_closed(context: ZmqContext, sender: ZmqInputSender, timer: Timer) -> None:
    outbox = Outbox(sender)
    outbox.send(message(0))
    sender.stop()
    sender.close()
    timer.run()
    assert timer.due == []
    assert sender.send(message(1))  # as to a peer that is gone


# --- auxiliary frames ------------------------------------------------------------------------------------------------


def test_buffers_are_kept_until_zeromq_has_let_go(
    context: ZmqContext, sender: ZmqInputSender, timer: Timer, eventually: Callable[..., Any]
) -> None:
    receiver = connect(context, sender)
    outbox = Outbox(sender)
    array = np.arange(100_000)
    gone = weakref.ref(array)
    outbox.send([*message(0), array.reshape(-1).view(np.uint8).data])
    expected = array.tobytes()
    del array
    gc.collect()
    assert len(sender.tracked) == 1
    assert gone() is not None
    frames = frames_of(receiver)
    assert bytes(frames[2]) == expected
    del frames
    eventually(lambda: not sender.tracked)
    gc.collect()
    assert gone() is None


def test_held_buffers_are_the_caller_s_memory_and_arrive_whole(
    context: ZmqContext, sender: ZmqInputSender, timer: Timer, eventually: Callable[..., Any]
) -> None:
    receiver = connect(context, sender)
    outbox = Outbox(sender)
    arrays = [np.full(100_000, number, np.uint8) for number in range(12)]
    for number, array in enumerate(arrays):
        outbox.send([*message(number), array.data, b"small", array.data])
    assert len(outbox) == len(arrays) - ROOM
    assert len(sender.tracked) == ROOM
    assert [frames[1] for _, frames in outbox.in_use] == [number.to_bytes(4, "big") for number in range(len(arrays))]
    for number in range(len(arrays)):
        frames = frames_of(receiver, timer)
        assert [len(frame) for frame in frames] == [1, 4, 100_000, 5, 100_000]
        assert (np.frombuffer(frames[2], np.uint8) == number).all()
        assert (np.frombuffer(frames[4], np.uint8) == number).all()
        del frames
    outbox.send(message(99))  # sending frees, too
    assert len(sender._tracked) < ROOM
    eventually(lambda: not sender.tracked)


def test_messages_with_no_auxiliary_frames_are_not_tracked(
    context: ZmqContext, sender: ZmqInputSender, timer: Timer
) -> None:
    connect(context, sender)
    outbox = Outbox(sender)
    outbox.send(message(0))
    assert not sender.tracked
