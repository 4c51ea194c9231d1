"""The end of whoever talks to a hub."""

from __future__ import annotations

from pathlib import Path

from outboard.transport.curve import SessionKeys
from outboard.transport.sockets import ControlServer, ZmqContext
from outboard.transport.spoke import Spoke
from strangers import LOOPBACK, keyed


def receive(server: ControlServer) -> tuple[bytes, list[bytes]]:
    server.wait([], 10)
    message = server.receive()
    assert message is not None
    return message


def test_a_spoke_that_is_renewed_is_somebody_else(short_tmp: Path) -> None:
    with keyed(SessionKeys.make()) as context:
        server = ControlServer(context, f"ipc://{short_tmp}/hub", network=LOOPBACK)
        spoke = Spoke(context, server.tcp_address, linger_ms=1000)
        spoke.send(b"one")
        first, [body] = receive(server)
        assert body == b"one"
        spoke.send(b"two")
        spoke.renew()
        spoke.send(b"three")
        messages = [receive(server), receive(server)]  # what had not left when it was renewed is not lost
        assert sorted(body for _, [body] in messages) == [b"three", b"two"]
        [second] = [sender for sender, [body] in messages if body == b"three"]
        assert second != first
        server.send(first, b"to nobody")
        server.send(second, b"answer")
        spoke.wait([], 10)
        assert spoke.receive() == [b"answer"]
        assert spoke.receive() is None
        spoke.close()
        server.close()
        (short_tmp / "hub").unlink(missing_ok=True)


def test_what_has_not_left_may_be_given_up(context: ZmqContext, short_tmp: Path) -> None:
    spoke = Spoke(context, f"ipc://{short_tmp}/nobody", linger_ms=60_000)
    spoke.send(b"late")
    spoke.close(linger=False)
    context.term()  # at once
