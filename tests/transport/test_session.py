"""The private directory of a client's sockets."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from outboard.config import TransportConfig
from outboard.errors import ConfigError
from outboard.transport import session as module
from outboard.transport.session import SessionDirectory
from outboard.transport.sockets import ZmqContext, bind_output


@pytest.fixture
def long_tmp(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory whose path is too long for a Unix socket."""
    path = short_tmp / ("long" * 25)
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_it_is_private_whatever_the_umask(short_tmp: Path) -> None:
    before = os.umask(0)
    try:
        session = SessionDirectory()
    finally:
        os.umask(before)
    assert session.path.parent == short_tmp
    assert stat.S_IMODE(session.path.stat().st_mode) == 0o700
    assert session.path.stat().st_uid == os.geteuid()


def test_each_has_its_own_path_and_token(short_tmp: Path) -> None:
    sessions = [SessionDirectory() for _ in range(20)]
    assert len({session.path for session in sessions}) == 20
    assert len({session.token for session in sessions}) == 20
    assert all(len(session.token) >= 32 for session in sessions)
    assert not any(session.token in str(session.path) for session in sessions)


def test_a_socket_can_be_bound_at_its_addresses(short_tmp: Path, context: ZmqContext) -> None:
    session = SessionDirectory()
    for name in ("output", "output-4294967295"):
        socket = bind_output(context, session.address(name), TransportConfig())
        assert (session.path / name).is_socket()
        socket.close()


def test_the_longest_path_that_is_accepted_can_be_bound(
    short_tmp: Path, context: ZmqContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = ""
    for length in range(1, 100):
        parent = short_tmp / ("x" * length)
        parent.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        session = SessionDirectory()
        if session.path.parent != parent:
            session.remove()
            break
        fits = session.address("output-4294967295")
    assert len(fits) == len("ipc://") + 107
    bind_output(context, fits, TransportConfig()).close()


def test_too_long_a_path_falls_back_to_tmp(long_tmp: Path) -> None:
    session = SessionDirectory()
    assert session.path.parent == Path("/tmp")
    assert list(long_tmp.iterdir()) == []  # nothing of the attempt is left
    session.remove()


def test_a_directory_that_is_not_there_falls_back_to_tmp(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_tmp / "nothing"))
    session = SessionDirectory()
    assert session.path.parent == Path("/tmp")
    session.remove()


def test_with_no_directory_at_all_the_error_says_what_to_do(long_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkdtemp

    def mkdtemp(prefix: str, dir: str) -> str:
        if dir == "/tmp":
            raise PermissionError(13, "Permission denied")
        return make(prefix=prefix, dir=dir)

    monkeypatch.setattr(module.tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(ConfigError, match="set TMPDIR to a short path") as caught:
        SessionDirectory()
    assert f"{long_tmp}: too long a path, a Unix socket may have 107 bytes" in str(caught.value)
    assert "/tmp: Permission denied" in str(caught.value)


def test_a_system_with_no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def gettempdir() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/var/tmp', '/usr/tmp', '/']")

    def mkdtemp(prefix: str, dir: str) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(module.tempfile, "gettempdir", gettempdir)
    monkeypatch.setattr(module.tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(ConfigError, match="TMPDIR"):
        SessionDirectory()


def test_remove_takes_everything_and_never_raises(short_tmp: Path) -> None:
    session = SessionDirectory()
    (session.path / "output").touch()
    (session.path / "deeper").mkdir()
    (session.path / "deeper" / "file").touch()
    session.remove()
    assert list(short_tmp.iterdir()) == []
    session.remove()
