"""Keys: what they are derived from, where they are not shown, and who gets in by them."""

from __future__ import annotations

import io
import logging
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from rich.console import Console

from outboard.config import TransportConfig
from outboard.errors import ConfigError
from outboard.transport.curve import KeyedContext, SessionKeys, new_token_file, read_token_file
from outboard.transport.network import bind_tcp
from outboard.transport.sockets import (
    ControlClient,
    ControlServer,
    ZmqSender,
    connect_control,
    make_context,
)
from outboard.transport.spoke import Spoke
from outboard.transport.zmq_inputs import ZmqInputReceiver
from strangers import LOOPBACK, REQUEST, keyed, knocking, visit

KEYS = SessionKeys.make()
OTHERS = SessionKeys.make()


def parts(keys: SessionKeys) -> list[str]:
    return [getattr(keys, name) for name in keys.__struct_fields__]


def test_keys_belong_together() -> None:
    for keys in (KEYS, SessionKeys.from_secret("s" * 32)):
        assert zmq.curve_public(keys.server_secret.encode()).decode() == keys.server_public
        assert zmq.curve_public(keys.client_secret.encode()).decode() == keys.client_public
        assert [len(key) for key in parts(keys)] == [40] * 4
        assert len(set(parts(keys))) == 4
    assert not set(parts(KEYS)) & set(parts(OTHERS))


def test_the_same_secret_gives_the_same_keys() -> None:
    secret = "0123456789abcdef" * 2
    keys = SessionKeys.from_secret(secret)
    assert SessionKeys.from_secret(f"  {secret}\n".encode()) == keys
    assert keys.client_secret == "w!zwTRbK$vf1FFx!WPn$yP--Rm%ww2o!opGiB1+*"  # on every machine, of every version
    assert not set(parts(SessionKeys.from_secret(secret[:-1] + "0"))) & set(parts(keys))
    with pytest.raises(ConfigError, match="has 31 characters; it must have at least 32") as caught:
        SessionKeys.from_secret(secret[:-1] + " ")
    assert secret[:-1] not in str(caught.value)


def test_keys_travel_and_peers_do_not_get_all() -> None:
    theirs = KEYS.for_peers()
    assert theirs.server_secret == ""
    assert [key for key in parts(KEYS) if key not in parts(theirs)] == [KEYS.server_secret]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(theirs), type=SessionKeys) == theirs


def test_a_token_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    new_token_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_token_file(path)) == 64
    path.chmod(0o400)
    SessionKeys.from_secret(read_token_file(path))
    with pytest.raises(ConfigError, match="cannot be made: File exists"):
        new_token_file(path)
    for mode in (0o640, 0o604, 0o602):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"has mode {mode:04o}, others may use it: chmod 600 {path}"):
            read_token_file(path)
    path.chmod(0o600)
    path.write_text("too short\n")
    with pytest.raises(ConfigError, match="has 9 characters; it must have at least 32") as caught:
        read_token_file(path)
    assert "too short" not in str(caught.value)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(ConfigError, match="cannot be read: it is no text"):
        read_token_file(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token_file(tmp_path / "none")


# --- who gets in -----------------------------------------------------------------------------------------------------


def test_who_has_the_keys_gets_through(eventually: Callable[..., Any]) -> None:
    with keyed(KEYS) as ours, keyed(KEYS.for_peers()) as theirs:
        pull = ours.socket(zmq.PULL)
        address = bind_tcp(pull, LOOPBACK)
        server = ControlServer(ours, "inproc://control", network=LOOPBACK)
        client = ControlClient(theirs, server.tcp_address)
        client.send(b"hello")
        assert server.wait([], 10) == set()
        sender, frames = server.receive() or (b"", [])
        assert frames == [b"hello"]
        server.send(sender, b"answer")
        assert client.receive() == b"answer"
        assert address != server.tcp_address
        assert ours.refused == {"wrong key": 0, "no handshake": 0}
        client.close()


OTHER_CLIENT = {
    "CURVE_PUBLICKEY": OTHERS.client_public.encode(),
    "CURVE_SECRETKEY": OTHERS.client_secret.encode(),
}
RIGHT_CLIENT = {
    "CURVE_PUBLICKEY": KEYS.client_public.encode(),
    "CURVE_SECRETKEY": KEYS.client_secret.encode(),
}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "no handshake"),
        ({"CURVE_SERVERKEY": OTHERS.server_public.encode(), **RIGHT_CLIENT}, "no handshake"),
        ({"CURVE_SERVERKEY": KEYS.server_public.encode(), **OTHER_CLIENT}, "wrong key"),
        ({"PLAIN_USERNAME": b"outboard", "PLAIN_PASSWORD": KEYS.client_public.encode()}, "no handshake"),
    ],
    ids=["no key", "another listener's key", "another client's key", "a password"],
)
def test_who_has_not_gets_nothing_and_is_counted(
    options: dict[str, bytes], why: str, eventually: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with keyed(KEYS) as ours:
        server = ControlServer(ours, "inproc://control", network=LOOPBACK)
        for count in (1, 2):
            with knocking(server.tcp_address, **options) as stranger:
                expected = {"wrong key": 0, "no handshake": 0} | {why: count}
                eventually(lambda expected=expected: ours.refused == expected)
                assert not stranger.poll(0)
        assert server.receive() is None
    (record,) = [record for record in caplog.records if record.name == "outboard.transport"]
    assert f"refused a connection to {server.tcp_address}, which " in record.getMessage()
    assert ("has not the session's key" in record.getMessage()) == (why == "wrong key")
    assert record.levelno == logging.WARNING


def test_those_refused_by_a_socket_that_was_closed_still_count(eventually: Callable[..., Any]) -> None:
    with keyed(KEYS) as ours:
        for count in (1, 2):
            server = ControlServer(ours, f"inproc://control-{count}", network=LOOPBACK)
            visit(server.tcp_address, REQUEST)
            eventually(lambda count=count: ours.refused["no handshake"] == count)
            server.close()
            eventually(lambda: not ours.guard()._watches)
            assert ours.refused == {"wrong key": 0, "no handshake": count}


def test_who_only_connects_cannot_listen() -> None:
    with keyed(KEYS.for_peers()) as theirs, pytest.raises(ConfigError, match="needs the session's server key"):
        ControlServer(theirs, "inproc://control", network=LOOPBACK)


def test_without_keys_there_is_no_tcp() -> None:
    context = make_context()
    with pytest.raises(ConfigError, match="TCP, which needs the session's keys, and this process has none"):
        ControlClient(context, "tcp://127.0.0.1:9")
    with pytest.raises(ConfigError, match="TCP, which needs the session's keys, and this process has none"):
        ControlServer(context, "inproc://control", network=LOOPBACK)
    with pytest.raises(ConfigError, match="this process has none"):
        Spoke(context, "tcp://127.0.0.1:9")
    with pytest.raises(ConfigError, match="this process has none"):
        connect_control(context, "tcp://127.0.0.1:9")
    with pytest.raises(ConfigError, match="this process has none"):
        ZmqInputReceiver(context, "tcp://127.0.0.1:9", b"x", TransportConfig())
    with pytest.raises(ConfigError, match="this process has none"):
        ZmqSender(context, "tcp://127.0.0.1:9", TransportConfig())
    context.term()  # no socket is left


def test_nobody_is_let_in_where_nobody_can_be_asked(eventually: Callable[..., Any]) -> None:
    """A listener whose guard is gone refuses: ZeroMQ by itself would let in everybody who encrypts."""
    keys = SessionKeys.make()
    with keyed(keys) as ours:
        ours._guard = _NoGuard()  # type: ignore[assignment]
        server = ControlServer(ours, "inproc://control", network=LOOPBACK)
        with keyed(keys.for_peers()) as theirs:
            client = ControlClient(theirs, server.tcp_address)
            client.send(b"hello")
            server.wait([], 0.3)
            assert server.receive() is None


class _NoGuard:
    def watch(self, *_: Any) -> Any:
        class Watch:
            lost = -1
            address = ""

        return Watch()


# --- what is not shown, and what is not left -------------------------------------------------------------------------


def test_no_key_is_shown(caplog: pytest.LogCaptureFixture, eventually: Callable[..., Any]) -> None:
    caplog.set_level(logging.DEBUG)
    shown = [repr(KEYS), str(KEYS), f"{KEYS}", repr({"keys": KEYS})]
    out = io.StringIO()
    Console(file=out, width=1000).print(KEYS)
    shown.append(out.getvalue())
    for wrong in (b"\x93\x01", msgspec.msgpack.encode({**msgspec.to_builtins(KEYS), "server_public": 1})):
        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.msgpack.decode(wrong, type=SessionKeys)
        shown.append("".join(traceback.format_exception(caught.value)))
    with keyed(KEYS) as ours:
        shown.append(repr(ours))
        server = ControlServer(ours, "inproc://control", network=LOOPBACK)
        with keyed(KEYS.for_peers()) as theirs:
            client = ControlClient(theirs, server.tcp_address)
            client.send(b"hello")
            server.wait([], 10)
        with knocking(server.tcp_address, CURVE_SERVERKEY=KEYS.server_public.encode(), **OTHER_CLIENT):
            eventually(lambda: ours.refused["wrong key"] == 1)
    shown.append(caplog.text)
    for key in (*parts(KEYS), *parts(OTHERS)):
        assert not any(key in text for text in shown)


@pytest.mark.parametrize("how", ["term", "destroy"])
def test_a_context_leaves_nothing(how: str, nothing_left: None) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(20):
        context = make_context(KEYS)
        assert isinstance(context, KeyedContext)
        server = ControlServer(context, "inproc://control", network=LOOPBACK)
        thread = context.guard()._thread
        assert thread.is_alive()
        if how == "term":
            server.close()
            ending = threading.Thread(target=context.term, daemon=True)
            ending.start()
            ending.join(10)
            assert not ending.is_alive()
        else:
            context.destroy(linger=0)
        thread.join(10)
        assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208
    with pytest.raises(zmq.ZMQError):
        context.socket(zmq.PULL)
