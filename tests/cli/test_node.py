"""`outboard node`, and what `outboard serve` has to do with it: arguments and files. What runs is in tests/failure."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outboard.cli.app import app
from outboard.cli.network import head_address, head_network
from outboard.config import NetworkConfig
from outboard.errors import ConfigError


def outboard(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    assert outboard("node", "--new-token", str(path)).exit_code == 0
    return path


def test_a_new_token_is_for_its_owner_alone_and_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "token"
    result = outboard("node", "--new-token", str(path))
    assert result.exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = path.read_text().strip()
    assert len(secret) >= 32
    assert secret not in result.output
    again = outboard("node", "--new-token", str(path))
    assert again.exit_code == 2
    assert path.read_text().strip() == secret


@pytest.mark.parametrize(
    ("join", "address"),
    [
        ("head", "tcp://head:5570"),
        ("head:1", "tcp://head:1"),
        ("10.0.0.1:65535", "tcp://10.0.0.1:65535"),
        ("[fd00::1]", "tcp://[fd00::1]:5570"),
        ("[fd00::1]:7", "tcp://[fd00::1]:7"),
    ],
)
def test_where_the_head_is(join: str, address: str) -> None:
    assert head_address(join) == address


@pytest.mark.parametrize(
    "join", ["", ":1", "head:", "head:x", "head:0", "head:65536", "fd00::1", "tcp://head", "a/b:1"]
)
def test_what_is_no_head(join: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(join))):
        head_address(join)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "a node needs --join"),
        (["--join", "head"], "--token-file is missing: `outboard node --new-token outboard.token` makes one"),
        (["--join", "head", "--token-file", "no-such-file"], "`outboard node --new-token no-such-file` makes one"),
        (["--join", "head", "--token-file", "TOKEN", "--ranks", "0"], "--ranks must be at least 1"),
        (["--join", "head", "--token-file", "TOKEN", "--option", "a=b"], "--engine names: give both"),
        (["--join", "head", "--token-file", "TOKEN", "--engine", "nonsense"], "no engine 'nonsense'"),
        (["--join", "head:x", "--token-file", "TOKEN"], "--join takes HEAD"),
    ],
)
def test_a_node_that_cannot_be(token: Path, args: list[str], named: str) -> None:
    result = outboard("node", *(str(token) if arg == "TOKEN" else arg for arg in args))
    assert result.exit_code == 2
    assert named in result.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--local-ranks", "1"], "options for nodes need --listen"),
        (["--join-port", "1"], "options for nodes need --listen"),
        (["--token-file", "TOKEN"], "options for nodes need --listen"),
        (["--listen", "lo"], "`outboard node --new-token outboard.token` makes one"),
        (["--listen", "lo", "--token-file", "TOKEN", "--ports", "9-1"], "first-last"),
    ],
)
def test_a_server_that_cannot_let_nodes_join(token: Path, args: list[str], named: str) -> None:
    result = outboard("serve", "echo", "--port", "0", *(str(token) if arg == "TOKEN" else arg for arg in args))
    assert result.exit_code == 2
    assert named in result.stderr


def test_what_the_options_of_a_server_mean(token: Path) -> None:
    assert head_network(None, None, None, None, None, None, None) is None
    assert head_network("lo", None, None, None, token, None, None) == NetworkConfig(listen="lo", token_file=str(token))
    assert head_network("lo", "head.example", 1, "2-3", token, 0, 30.0) == NetworkConfig(
        listen="lo",
        advertise="head.example",
        port=1,
        ports="2-3",
        token_file=str(token),
        local_ranks=0,
        patience=30.0,
    )
