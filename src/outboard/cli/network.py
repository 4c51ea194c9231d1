"""What commands share about nodes: addresses, token files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outboard.config import NetworkConfig
from outboard.errors import ConfigError
from outboard.transport.curve import read_token_file

__all__ = ["DEFAULT_PORT", "head_address", "head_network", "secret_of"]

DEFAULT_PORT = NetworkConfig(listen="lo").port


def head_address(join: str) -> str:
    """The ZeroMQ address of "HEAD", "HEAD:PORT", "[IPV6]" or "[IPV6]:PORT".

    Raises:
        ConfigError: it is none of these.
    """
    host, colon, port = join.rpartition(":")
    if not colon or join.endswith("]"):
        host, port = join, str(DEFAULT_PORT)
    bare = not host.startswith("[") and ":" in host
    if not host or bare or "/" in join or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--join takes HEAD[:PORT], such as head-0.local:{DEFAULT_PORT} or [fd00::1], not {join!r}")
    return f"tcp://{host}:{port}"


def secret_of(token_file: Path | None) -> str:
    """The secret in a token file.

    Raises:
        ConfigError: there is none, or it cannot be used; says how to make one.
    """
    if token_file is None or not token_file.exists():
        which = "--token-file is missing" if token_file is None else f"there is no token file {token_file}"
        made = token_file or "outboard.token"
        raise ConfigError(
            f"{which}: `outboard node --new-token {made}` makes one, which the head and all nodes must have"
        )
    return read_token_file(token_file)


def head_network(
    listen: str | None,
    advertise: str | None,
    join_port: int | None,
    ports: str | None,
    token_file: Path | None,
    local_ranks: int | None,
    patience: float | None,
    *,
    with_token: bool = True,
) -> NetworkConfig | None:
    """Where a head listens; None: nowhere.

    Args:
        with_token: whether there must be a token file; else there may be one.
        listen, advertise, join_port, ports, token_file, local_ranks, patience: as in `NetworkConfig`.

    Raises:
        ConfigError: an option is wrong, or of no use without --listen.
    """
    given: dict[str, Any] = {
        "advertise": advertise,
        "port": join_port,
        "ports": ports,
        "local_ranks": local_ranks,
        "patience": patience,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if listen is None:
        if given or token_file is not None:
            raise ConfigError("options for nodes need --listen, the network interface or address where nodes join")
        return None
    if with_token or token_file is not None:
        secret_of(token_file)  # what is wrong with it is said before anything is started
        given["token_file"] = str(token_file)
    return NetworkConfig(listen=listen, **given)
