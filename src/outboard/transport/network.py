"""TCP: from an interface, an address or a name to a socket that listens, or is connected, with a session's keys."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket as _socket
from collections.abc import Iterable

import zmq
from zmq.utils import z85

from outboard.config import NetworkConfig, is_wildcard
from outboard.errors import ConfigError
from outboard.transport.curve import CURVE_BYTES, DOMAIN, KeyedContext

__all__ = ["bind_tcp", "bind_tcp_for_one", "connect", "is_tcp", "local_address"]

# Seconds that a handshake may take, of some round trips; so long somebody without a key can hold a descriptor.
_HANDSHAKE = 10.0
_SLACK = 2.0  # seconds that the guard may learn of it later
# Whoever listens tells its patience by its heartbeats. One that ends before its first is found out by these, seconds.
_OWN_INTERVAL = 10.0
_OWN_PATIENCE = 60.0
# A SYN that is lost is sent again by the system after 1, 3, 7 s and so on; ZeroMQ tries anew, milliseconds.
_CONNECT_TIMEOUT_MS = 3000
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000


def is_tcp(address: str) -> bool:
    """Whether this address is another machine's, or may be."""
    return address.startswith("tcp://")


def connect(socket: zmq.Socket[bytes], address: str) -> None:
    """Connects, by TCP with the keys of the socket's context. All other options of the socket are set before.

    A listener that has a server key of its own has it in its address, in hexadecimal digits behind a "#".

    Raises:
        ConfigError: the address is one of TCP, and the context has no keys.
        zmq.ZMQError: the address is none.
    """
    if is_tcp(address):
        keys = _context_of(socket, address).keys
        address, _, own_key = address.partition("#")
        socket.setsockopt(zmq.CURVE_SERVERKEY, _from_hex(own_key) if own_key else keys.server_public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret.encode())
        socket.setsockopt(zmq.IPV6, int(_needs_ipv6(address)))
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        _set_common(socket, _OWN_INTERVAL, _OWN_PATIENCE)
    socket.connect(address)


def bind_tcp(socket: zmq.Socket[bytes], network: NetworkConfig, port: int | None = None) -> str:
    """Lets a socket listen, by CURVE, to whoever has the session's keys. All its other options are set before.

    Args:
        socket: of a context with the keys of whoever listens.
        network: where, and how patient.
        port: which one; 0: any free one; None: one of `network.ports`.

    Returns:
        The address for others to connect to.

    Raises:
        ConfigError: the context has no keys, or there is no such interface, address or name.
        OSError: the port, or each one of the range, is taken; or too few file descriptors are left.
    """
    secret = _context_of(socket, network.listen).keys.server_secret
    if not secret:
        raise ConfigError(f"to listen at {network.listen!r} needs the session's server key, which this process has not")
    return _bind(socket, network, secret.encode(), port, 0.0)[0]


def bind_tcp_for_one(socket: zmq.Socket[bytes], network: NetworkConfig, within: float) -> tuple[str, int]:
    """As `bind_tcp`, for the connection of a single peer.

    A message that is lost with a connection is not sent again, so a peer that comes back is as bad as one that is gone.
    The socket has a server key of its own, which is a part of its address: peers of an earlier socket, which may come
    back to the same port at any time, are strangers.

    Args:
        socket, network: as of `bind_tcp`.
        within: seconds that the peer has to connect.

    Returns:
        The address, and the end of a pipe, which the caller must close. It becomes readable when the connection has
        ended or did not come, and then holds what is wrong, or nothing.
    """
    public, secret = zmq.curve_keypair()
    address, lost = _bind(socket, network, secret, None, within)
    return f"{address}#{z85.decode(public).hex()}", lost


def local_address(network: NetworkConfig) -> str:
    """The IP address that `network.listen` stands for; of an interface IPv4 first. No address of one link alone.

    Raises:
        ConfigError: there is none; says which interfaces there are.
    """
    listen = network.listen.strip("[]")
    if is_wildcard(listen):
        return "0.0.0.0" if listen == "*" else listen
    interfaces = _interfaces()
    if listen in interfaces:
        if not interfaces[listen]:
            raise ConfigError(f"the network interface {listen!r} has no address. {_known(interfaces)}")
        return interfaces[listen][0]
    local = {address for addresses in interfaces.values() for address in addresses}
    try:
        found = [str(ipaddress.ip_address(listen))]
    except ValueError:
        try:
            found = [str(info[4][0]) for info in _socket.getaddrinfo(listen, None, type=_socket.SOCK_STREAM)]
        except (OSError, UnicodeError):
            raise ConfigError(
                f"{listen!r} is no network interface, address or host name. {_known(interfaces)}"
            ) from None
    for address in found:
        if address in local or ipaddress.ip_address(address).is_loopback:
            return address
    raise ConfigError(f"{listen!r} is not an address of this host ({', '.join(found)}). {_known(interfaces)}")


def _bind(
    socket: zmq.Socket[bytes], network: NetworkConfig, secret: bytes, port: int | None, one_peer_within: float
) -> tuple[str, int]:
    guard = _context_of(socket, network.listen).guard()  # before anybody can come
    host = local_address(network)
    advertised = (network.advertise or host).strip("[]")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # with nobody to ask, nobody is let in
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.HEARTBEAT_TTL, int(network.patience * 1000))
    _set_common(socket, network.heartbeat_interval, network.patience)
    watch = guard.watch(socket, _HANDSHAKE + _SLACK, one_peer_within)
    ports = (port,) if port is not None else network.port_range
    try:
        chosen = _bind_to_one_of(socket, host, ports or (0,))
    except BaseException:
        if watch.lost >= 0:
            os.close(watch.lost)
        raise
    watch.address = f"tcp://{_bracketed(advertised)}:{chosen}"
    return watch.address, watch.lost


def _bind_to_one_of(socket: zmq.Socket[bytes], host: str, ports: Iterable[int]) -> int:
    """Binds to the first free one, from a random one on; which it is."""
    candidates = list(ports)
    start = random.randrange(len(candidates))
    for port in candidates[start:] + candidates[:start]:
        try:
            socket.bind(f"tcp://{_bracketed(host)}:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(
                    error.errno, f"cannot listen at port {port or 'any'} of {host}: {error.strerror}"
                ) from None
        else:
            return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2].rstrip("\0"))
    if len(candidates) == 1:
        raise OSError(errno.EADDRINUSE, f"port {candidates[0]} of {host} is taken; choose another in NetworkConfig")
    raise OSError(
        errno.EADDRINUSE,
        f"all ports from {candidates[0]} to {candidates[-1]} of {host} are taken; NetworkConfig.ports must have more",
    )


def _set_common(socket: zmq.Socket[bytes], interval: float, patience: float) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(interval * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(patience * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE * 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    most = int(socket.getsockopt(zmq.MAXMSGSIZE))
    if most >= 0:  # ZeroMQ counts what it receives, which is encrypted
        socket.setsockopt(zmq.MAXMSGSIZE, most + CURVE_BYTES)


def _context_of(socket: zmq.Socket[bytes], where: str) -> KeyedContext:
    context = socket.context
    if not isinstance(context, KeyedContext):
        raise ConfigError(f"{where} is for TCP, which needs the session's keys, and this process has none")
    return context


def _interfaces() -> dict[str, list[str]]:
    """Addresses by interface, IPv4 first, without those that only mean something on one link."""
    import psutil  # takes a while to import, and most have no network

    return {
        name: [
            one.address
            for family in (_socket.AF_INET, _socket.AF_INET6)
            for one in addresses
            if one.family == family and not ipaddress.ip_address(one.address).is_link_local
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }


def _known(interfaces: dict[str, list[str]]) -> str:
    there = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in interfaces.items() if addresses)
    return f"There are: {there}"


def _needs_ipv6(address: str) -> bool:
    """Whether a host has no address of IPv4."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if host.startswith("["):
        return True
    try:
        _socket.getaddrinfo(host, None, _socket.AF_INET)
    except (OSError, UnicodeError):
        return True
    return False


def _from_hex(key: str) -> bytes:
    try:
        return bytes.fromhex(key)
    except ValueError:
        raise zmq.ZMQError(errno.EINVAL) from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
