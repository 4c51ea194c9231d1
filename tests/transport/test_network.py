"""Where to listen: interfaces, addresses, names, ports, and what is wrong with them."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import zmq

from outboard.config import EngineConfig, NetworkConfig
from outboard.errors import ConfigError
from outboard.transport.curve import KeyedContext, SessionKeys
from outboard.transport.network import bind_tcp, local_address
from outboard.transport.sockets import ControlClient, ControlServer
from strangers import keyed, place

KEYS = SessionKeys.make()
HAS_IPV6 = any(one.address == "::1" for addresses in psutil.net_if_addrs().values() for one in addresses)
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="there is no IPv6 here")


@pytest.fixture
def ours() -> Iterator[KeyedContext]:
    with keyed(KEYS) as context:
        yield context


@contextlib.contextmanager
def taken(count: int) -> Iterator[range]:
    """A range of ports, each of which somebody listens at."""
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            ports = range(first, first + count)
            try:
                for port in ports[1:]:
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            yield ports
            return
    raise RuntimeError("no range of free ports was found")


def exchange(ours: KeyedContext, network: NetworkConfig) -> str:
    """A message goes both ways; where it went."""
    server = ControlServer(ours, "inproc://exchange", network=network)
    with keyed(KEYS.for_peers()) as theirs:
        client = ControlClient(theirs, server.tcp_address)
        client.send(b"hello")
        assert server.wait([], 10) == set()
        sender, frames = server.receive() or (b"", [])
        assert frames == [b"hello"]
        server.send(sender, b"answer")
        assert client.receive() == b"answer"
        client.close()
    server.close()
    return server.tcp_address


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("lo", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        pytest.param("::1", "::1", marks=needs_ipv6),
        pytest.param("[::1]", "::1", marks=needs_ipv6),
    ],
)
def test_messages_go_both_ways(ours: KeyedContext, listen: str, host: str) -> None:
    address = exchange(ours, NetworkConfig(listen=listen))
    assert place(address)[0] == host


def test_what_is_advertised_is_not_what_is_bound(ours: KeyedContext) -> None:
    address = exchange(ours, NetworkConfig(listen="127.0.0.1", advertise="localhost"))
    assert place(address)[0] == "localhost"
    pull = ours.socket(zmq.PULL)
    network = NetworkConfig(listen="127.0.0.1", advertise="2001:db8::7")
    assert re.fullmatch(r"tcp://\[2001:db8::7\]:\d+", bind_tcp(pull, network))


def test_nothing_else_is_bound(ours: KeyedContext) -> None:
    pull = ours.socket(zmq.PULL)
    _, port = place(bind_tcp(pull, NetworkConfig(listen="lo")))
    (bound,) = [one for one in psutil.Process().net_connections("tcp") if one.laddr.port == port]
    assert bound.laddr.ip == "127.0.0.1"


def test_a_wildcard_is_bound_where_it_is_given(ours: KeyedContext) -> None:
    assert local_address(NetworkConfig(listen="0.0.0.0", advertise="head")) == "0.0.0.0"
    assert local_address(NetworkConfig(listen="*", advertise="head")) == "0.0.0.0"
    assert local_address(NetworkConfig(listen="::", advertise="head")) == "::"


@pytest.mark.parametrize("listen", ["eth77", "no.such.host.invalid", "a b", "x" * 70 + ".example"])
def test_an_unknown_interface_names_those_there_are(listen: str) -> None:
    known = rf"{re.escape(repr(listen))} is no network interface, address or host name. There are: .*lo \(127.0.0.1"
    with pytest.raises(ConfigError, match=known):
        local_address(NetworkConfig(listen=listen))


def test_an_address_of_somebody_else_names_those_of_this_host() -> None:
    with pytest.raises(ConfigError, match=r"'192.0.2.77' is not an address of this host .*There are: .*127.0.0.1"):
        local_address(NetworkConfig(listen="192.0.2.77"))


def test_an_interface_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": psutil.net_if_addrs()["lo"], "dummy0": []})
    real = {"lo": ["127.0.0.1"], "dummy0": []}
    monkeypatch.setattr("outboard.transport.network._interfaces", lambda: real)
    with pytest.raises(ConfigError, match=r"'dummy0' has no address. There are: lo \(127.0.0.1\)"):
        local_address(NetworkConfig(listen="dummy0"))


# --- ports -----------------------------------------------------------------------------------------------------------


def test_taken_ports_are_passed_over(ours: KeyedContext) -> None:
    with taken(4) as ports:
        with socket.create_server(("127.0.0.1", 0)) as server:
            free = server.getsockname()[1]
        network = NetworkConfig(listen="lo", ports=f"{min(free, ports[0])}-{max(free, ports[-1])}")
        for _ in range(20):
            port = place(bind_tcp(ours.socket(zmq.PULL), network))[1]
            assert port in (network.port_range or ())
            assert port not in ports


def test_no_port_is_free(ours: KeyedContext) -> None:
    with taken(3) as ports:
        network = NetworkConfig(listen="lo", ports=f"{ports[0]}-{ports[-1]}")
        message = (
            rf"all ports from {ports[0]} to {ports[-1]} of 127.0.0.1 are taken; NetworkConfig.ports must have more"
        )
        with pytest.raises(OSError, match=message):
            ControlServer(ours, "inproc://control", network=network)
        with pytest.raises(OSError, match=rf"port {ports[0]} of 127.0.0.1 is taken; choose another"):
            ControlServer(ours, "inproc://again", network=network, port=ports[0])


def test_each_socket_has_a_port_of_its_own_until_the_range_is_used_up(ours: KeyedContext) -> None:
    with taken(3) as ports:
        pass
    network = NetworkConfig(listen="lo", ports=f"{ports[0]}-{ports[-1]}")
    bound = [place(bind_tcp(ours.socket(zmq.PULL), network))[1] for _ in ports]
    assert sorted(bound) == list(ports)
    with pytest.raises(OSError, match="all ports from"):
        bind_tcp(ours.socket(zmq.PULL), network)


def test_the_port_that_is_asked_for(ours: KeyedContext) -> None:
    with taken(1) as ports:
        pass
    server = ControlServer(ours, "inproc://control", network=NetworkConfig(listen="lo"), port=ports[0])
    assert place(server.tcp_address)[1] == ports[0]


# --- the configuration -----------------------------------------------------------------------------------------------


def test_defaults() -> None:
    network = NetworkConfig(listen="eth0")
    assert (network.port, network.port_range, network.heartbeat_interval, network.patience) == (5570, None, 1.0, 10.0)
    assert network.local_ranks == 1
    assert EngineConfig(engine="echo").network is None
    assert NetworkConfig(listen="eth0", ports="6000-6000").port_range == range(6000, 6001)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"listen": ""}, "listen must be a network interface, an address or a host name"),
        ({"listen": "tcp://eth0"}, "listen must be a network interface"),
        ({"listen": "0.0.0.0"}, "every address there is: say which one to advertise"),
        ({"listen": "[::]"}, "say which one to advertise"),
        ({"listen": "*"}, "say which one to advertise"),
        ({"advertise": ""}, "advertise must be an address or a host name"),
        ({"advertise": "::"}, "advertise must be an address"),
        ({"port": 65536}, "port must be at least 0 and at most 65535"),
        ({"port": -1}, "port must be at least 0"),
        ({"ports": "5600"}, "ports must be 'first-last'"),
        ({"ports": "5600-5599"}, "ports must be 'first-last'"),
        ({"ports": "0-5599"}, "ports must be 'first-last'"),
        ({"ports": "5600-65536"}, "ports must be 'first-last'"),
        ({"ports": "-"}, "ports must be 'first-last'"),
        ({"heartbeat_interval": 10.0}, "heartbeat_interval must be at least 0.01 s and less than patience"),
        ({"heartbeat_interval": 0.0}, "heartbeat_interval must be at least 0.01 s and less than patience"),
        ({"patience": 61.0}, "patience must be at least 0.1 and at most 60 s"),
        ({"patience": 0.09, "heartbeat_interval": 0.01}, "patience must be at least 0.1 and at most 60 s"),
        ({"patience": float("nan")}, "patience must be at least 0.1 and at most 60 s"),
        ({"heartbeat_interval": float("nan")}, "heartbeat_interval must be at least 0.01 s"),
        ({"local_ranks": -1}, "local_ranks must be at least 0"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_work(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        NetworkConfig(**{"listen": "lo"} | wrong)


def test_sockets_have_the_options(ours: KeyedContext, eventually: Callable[..., Any]) -> None:
    network = NetworkConfig(listen="lo", heartbeat_interval=0.5, patience=3.0)
    pull = ours.socket(zmq.PULL)
    pull.setsockopt(zmq.MAXMSGSIZE, 1000)
    bind_tcp(pull, network)
    got = [pull.getsockopt(one) for one in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL)]
    assert got == [500, 3000, 3000]
    assert pull.getsockopt(zmq.MECHANISM) == zmq.CURVE
    assert pull.getsockopt(zmq.HANDSHAKE_IVL) == 10_000
    assert pull.getsockopt(zmq.MAXMSGSIZE) == 1033
