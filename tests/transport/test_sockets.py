"""The sockets' limits, and how each ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from outboard.config import TransportConfig
from outboard.transport.poller import SocketPoller
from outboard.transport.sockets import (
    ContextTerminated,
    ControlClient,
    ControlServer,
    ZmqContext,
    ZmqSender,
    bind_output,
    make_context,
    remove_socket_file,
)
from outboard.transport.zmq_inputs import ZmqInputReceiver, ZmqInputSender, bind_input

TIGHT = TransportConfig(high_water_mark=2)
ROOM = 4  # over inproc, both ends count


def listen(context: ZmqContext, address: str, identity: bytes, config: TransportConfig = TIGHT) -> ZmqInputSender:
    return ZmqInputSender(bind_input(context, address, config), address, identity, lambda delay, callback: None)


# --- output ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aux", [[], [b"x"], [b"x" * 100_000, b"", b"y"]], ids=["body", "two frames", "four frames"])
def test_a_sender_refuses_whole_messages_at_its_high_water_mark(
    context: ZmqContext, eventually: Callable[..., Any], aux: list[bytes]
) -> None:
    pull = bind_output(context, "inproc://output", TIGHT)
    sender = ZmqSender(context, "inproc://output", TIGHT)
    for number in range(ROOM):
        assert sender.writable()
        assert sender.send([b"%d" % number, *aux])
    for _ in range(3):
        assert not sender.writable()
        assert not sender.send([b"refused", *aux])
    pull.setsockopt(zmq.RCVTIMEO, 10_000)
    got = [pull.recv_multipart() for _ in range(ROOM)]
    assert got == [[b"%d" % number, *aux] for number in range(ROOM)]
    eventually(sender.writable)
    assert sender.send([b"more", *aux])
    assert pull.recv_multipart() == [b"more", *aux]
    assert not pull.poll(0)  # nothing is left of what was refused


def test_a_sender_with_no_peer_yet_holds_what_its_mark_allows(context: ZmqContext, short_tmp: Path) -> None:
    address = f"ipc://{short_tmp}/output"
    sender = ZmqSender(context, address, TIGHT)
    assert [sender.send([b"%d" % number]) for number in range(3)] == [True, True, False]
    pull = bind_output(context, address, TIGHT)
    pull.setsockopt(zmq.RCVTIMEO, 10_000)
    assert [pull.recv() for _ in range(2)] == [b"0", b"1"]


def test_what_a_sender_holds_leaves_while_it_closes(short_tmp: Path) -> None:
    address = f"ipc://{short_tmp}/output"
    ours, theirs = make_context(), make_context()
    pull = bind_output(ours, address, TransportConfig())
    pull.setsockopt(zmq.RCVTIMEO, 10_000)
    sender = ZmqSender(theirs, address, TransportConfig())
    for number in range(500):
        assert sender.send([b"%d" % number, b"x" * 10_000])
    sender.close(10_000)
    ended = threading.Thread(target=theirs.term)
    ended.start()
    assert [int(pull.recv_multipart()[0]) for _ in range(500)] == list(range(500))
    ended.join(10)
    assert not ended.is_alive()
    ours.destroy(linger=0)


def test_too_large_a_message_disconnects_its_sender_alone(context: ZmqContext, short_tmp: Path) -> None:
    address = f"ipc://{short_tmp}/output"
    pull = bind_output(context, address, TransportConfig(max_message_bytes=1000))
    large, small = (ZmqSender(context, address, TransportConfig()) for _ in range(2))
    assert large.send([b"x" * 1001])
    assert small.send([b"x" * 1000])
    assert pull.poll(10_000)
    assert len(pull.recv()) == 1000
    assert not pull.poll(50)


# --- input -----------------------------------------------------------------------------------------------------------


def test_a_receiver_gets_frames_and_ends_with_its_context(short_tmp: Path, eventually: Callable[..., Any]) -> None:
    address = f"ipc://{short_tmp}/input"
    ours, theirs = make_context(), make_context()
    sender = listen(ours, address, b"\x00id", TransportConfig())
    got: list[Any] = []

    def receive() -> None:
        receiver = ZmqInputReceiver(theirs, address, b"\x00id", TransportConfig())
        poller = SocketPoller()

        def read() -> bool:
            while (frames := receiver.receive()) is not None:
                got.append([bytes(frame) for frame in frames])
            return False

        poller.add(receiver.fd, read)
        try:
            while True:
                poller.turn()
        except ContextTerminated:
            receiver.close()
            poller.close()
        got.append("end")

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    sender.wait_for_peer(10)
    assert sender.send([b"\x00", b"body", b"aux"])
    assert sender.send([b"\x01", b""])
    sender._socket.send_multipart([b"\x00id", b"last"])
    eventually(lambda: len(got) == 3)
    closing = threading.Thread(target=theirs.term, daemon=True)  # blocks until the receiver's socket is closed
    closing.start()
    thread.join(10)
    closing.join(10)
    assert got == [[b"\x00", b"body", b"aux"], [b"\x01", b""], [b"last"], "end"]
    assert not closing.is_alive()
    ours.destroy(linger=0)


@pytest.mark.parametrize("wrong", [{"address": "nonsense"}, {"identity": b""}, {"identity": b"x" * 256}], ids=str)
def test_a_receiver_that_cannot_be_leaves_no_socket(wrong: dict[str, Any]) -> None:
    context = make_context()
    arguments: dict[str, Any] = {"address": "inproc://input", "identity": b"a"} | wrong
    with pytest.raises(OSError, match="ZeroMQ: "):
        ZmqInputReceiver(context, arguments["address"], arguments["identity"], TIGHT)
    with pytest.raises(OSError, match="ZeroMQ: "):
        ZmqSender(context, "nonsense", TIGHT)
    with pytest.raises(OSError, match="ZeroMQ: "):
        listen(context, "nonsense", b"a")
    closing = threading.Thread(target=context.term, daemon=True)  # blocks while there is a socket
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_an_unknown_peer_is_refused_not_silently_dropped(context: ZmqContext) -> None:
    sender = listen(context, "inproc://input", b"a")
    assert not sender.send([b"\x00", b"x"])
    with pytest.raises(zmq.ZMQError) as caught:
        sender._socket.send_multipart([b"a", b"x"], zmq.NOBLOCK)
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_a_peer_is_waited_for_and_no_stranger_is_taken_for_it(context: ZmqContext) -> None:
    sender = listen(context, "inproc://input", b"a")
    stranger = ZmqInputReceiver(context, "inproc://input", b"stranger", TIGHT)
    started = time.monotonic()
    sender.wait_for_peer(0.05)
    sender.wait_for_peer(-1)
    assert 0.04 < time.monotonic() - started < 5
    assert not sender.send([b"\x00", b"too early"])
    receiver = ZmqInputReceiver(context, "inproc://input", b"a", TIGHT)
    started = time.monotonic()
    sender.wait_for_peer(10)
    assert time.monotonic() - started < 5
    assert sender.send([b"\x00", b"x"])
    for one in (stranger, receiver):
        one.close()


def test_strangers_get_nothing(context: ZmqContext) -> None:
    sender = listen(context, "inproc://input", b"a")
    stranger, receiver = (ZmqInputReceiver(context, "inproc://input", name, TIGHT) for name in (b"stranger", b"a"))
    assert {sender._socket.recv_multipart()[0] for _ in range(2) if sender._socket.poll(10_000)} == {b"stranger", b"a"}
    assert [sender.send([b"\x00", b"%d" % number]) for number in range(ROOM)] == [True] * ROOM
    assert receiver.pending()
    assert [bytes(frame) for frame in receiver.receive() or ()] == [b"\x00", b"0"]
    assert not stranger.pending()
    assert stranger.receive() is None


def test_sockets_have_the_configured_limits(context: ZmqContext) -> None:
    config = TransportConfig(high_water_mark=7, max_message_bytes=5 << 30)
    sender = listen(context, "inproc://input", b"a", config)
    receiver = ZmqInputReceiver(context, "inproc://input", b"a", config)
    for socket in (sender._socket, receiver._socket, bind_output(context, "inproc://output", config)):
        assert socket.getsockopt(zmq.SNDHWM) == socket.getsockopt(zmq.RCVHWM) == 7
        assert socket.getsockopt(zmq.MAXMSGSIZE) == 5 << 30
        assert socket.getsockopt(zmq.LINGER) == 0


# --- control ---------------------------------------------------------------------------------------------------------


def test_control_messages_go_both_ways(context: ZmqContext, short_tmp: Path, eventually: Callable[..., Any]) -> None:
    address = f"ipc://{short_tmp}/control"
    server = ControlServer(context, address)
    clients = [ControlClient(context, address) for _ in range(2)]
    senders = []
    for number, client in enumerate(clients):
        client.send(b"hello %d" % number)
        assert server.wait([], 10) == set()
        message = server.receive()
        assert message is not None
        assert message[1] == [b"hello %d" % number]
        senders.append(message[0])
    assert server.receive() is None
    assert senders[0] != senders[1]
    for number in (1, 0):
        server.send(senders[number], b"answer %d" % number)
    assert [client.receive() for client in clients] == [b"answer 0", b"answer 1"]
    server.send(senders[0], b"more")
    eventually(lambda: (found := clients[0].receive_now()) and found == [b"more"])
    assert clients[0].receive_now() is None
    for client in clients:
        client.close()
    server.close()


def test_a_control_peer_that_is_gone_is_no_error(context: ZmqContext, short_tmp: Path) -> None:
    address = f"ipc://{short_tmp}/control"
    server = ControlServer(context, address)
    client = ControlClient(context, address)
    client.send(b"hello")
    server.wait([], 10)
    sender, _ = server.receive() or (b"", [])
    client.close()
    for _ in range(3):
        server.send(sender, b"answer")
    server.send(b"nobody", b"answer")
    server.close()


def test_the_control_server_waits_for_descriptors_too(context: ZmqContext, short_tmp: Path) -> None:
    server = ControlServer(context, f"ipc://{short_tmp}/control")
    (first, first_end), (second, second_end) = os.pipe(), os.pipe()
    started = time.monotonic()
    assert server.wait([first, second], 0.02) == set()
    assert time.monotonic() - started >= 0.015
    assert server.wait([first, second], -1) == set()
    os.write(second_end, b"x")
    assert server.wait([first, second], 10) == {second}
    os.close(first_end)
    assert server.wait([first, second], 10) == {first, second}
    for fd in (first, second, second_end):
        os.close(fd)
    server.close()


def test_an_address_of_tcp_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namesake = tmp_path / "127.0.0.1:5570"
    namesake.touch()
    remove_socket_file("tcp://127.0.0.1:5570")
    assert namesake.exists()
    remove_socket_file(f"ipc://{namesake}")
    assert not namesake.exists()
