"""The private directory of a client's sockets."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
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


def test_sixty_four_at_once(short_tmp: Path, context: ZmqContext) -> None:
    sessions: list[SessionDirectory] = []
    start = threading.Barrier(16)

    def make() -> None:
        start.wait(10)
        sessions.extend(SessionDirectory() for _ in range(4))

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len({session.path for session in sessions}) == 64
    sockets = [bind_output(context, session.address("output"), TransportConfig()) for session in sessions]
    for session, socket_ in zip(sessions, sockets, strict=True):
        socket_.close()
        session.remove()
    assert list(short_tmp.iterdir()) == []


def test_no_descriptor_is_left_behind(short_tmp: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    session = SessionDirectory()
    session.remove()
    session.remove()
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_with_no_descriptor_left_it_says_so(short_tmp: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            SessionDirectory()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(short_tmp.iterdir()) == []


# --- directories that take no socket ---


IN_A_SMALL_FILE_SYSTEM = """
import os, subprocess, sys, tempfile
from pathlib import Path
from outboard.transport.session import SessionDirectory
mount, only, fill, options = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=8", "none", mount], check=True)
for number in range(int(fill)):
    (Path(mount) / str(number)).touch()
if options:
    subprocess.run(["mount", "-o", options, mount], check=True)
if only:
    tempfile.tempdir = mount
try:
    session = SessionDirectory()
except Exception as error:
    print(type(error).__name__, error)
else:
    print(session.path.parent)
    session.remove()
"""


@pytest.fixture(scope="session")
def unshare() -> list[str]:
    """A command that runs another one where it may mount what nobody else sees."""
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file systems can be mounted here")
    return command


@pytest.mark.parametrize(
    ("fill", "options", "cause"),
    [
        ("0", "remount,ro", "Read-only file system"),
        ("7", "", "No space left on device"),  # no room for a directory
        ("6", "", "no socket can be made there: No space left on device"),  # room for the directory only
    ],
)
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_directory_that_is_read_only_or_full(
    unshare: list[str], short_tmp: Path, fill: str, options: str, cause: str, elsewhere: bool
) -> None:
    """With another directory to go to it is not used; with none the error says what is wrong with it."""
    mount = str(short_tmp) if elsewhere else "/tmp"
    argv = [*unshare, sys.executable, "-c", IN_A_SMALL_FILE_SYSTEM, mount, "" if elsewhere else "only", fill, options]
    env = {**os.environ, "TMPDIR": mount}
    result = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True, env=env)
    if elsewhere:
        assert result.stdout == "/tmp\n"
    else:
        assert result.stdout.startswith("ConfigError no directory for sockets can be made; set TMPDIR")
        assert f"/tmp: {cause}" in result.stdout


# --- directories that nobody was left to remove ---


OWNER = """
import os, sys
from outboard.config import TransportConfig
from outboard.transport.session import SessionDirectory
from outboard.transport.sockets import bind_output, make_context
session = SessionDirectory()
socket = bind_output(make_context(), session.address("output"), TransportConfig())
print(session.path, flush=True)
sys.stdin.read()
"""


def age(path: Path) -> None:
    """Makes it look old enough to be given up."""
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))


def test_what_a_killed_owner_has_left_goes_with_the_next_start(short_tmp: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=-1, stdout=-1, text=True) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        age(path)
        SessionDirectory().remove()
        assert (path / "output").is_socket()  # its owner lives
        owner.kill()
    SessionDirectory().remove()
    assert list(short_tmp.iterdir()) == []


def test_what_may_be_somebody_elses_stays(short_tmp: Path) -> None:
    young = short_tmp / "outboard-00000000"
    other_name = short_tmp / "outboard-notes"
    open_to_all = short_tmp / "outboard-11111111"
    with_a_file = short_tmp / "outboard-22222222"
    locked = short_tmp / "outboard-33333333"
    link = short_tmp / "outboard-44444444"
    in_use = short_tmp / "outboard-55555555"
    stays = [young, other_name, open_to_all, with_a_file, locked, in_use]
    for path in stays:
        path.mkdir(mode=0o755 if path is open_to_all else 0o700)
    link.symlink_to(other_name)
    (with_a_file / "precious").touch()
    with socket.socket(socket.AF_UNIX) as listener:  # of an owner whose lock is not seen
        listener.bind(str(in_use / "output"))
        listener.listen()
        for path in stays[1:]:
            age(path)
        fd = os.open(locked, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        SessionDirectory().remove()
        os.close(fd)
        assert set(short_tmp.iterdir()) == {*stays, link}
        assert (with_a_file / "precious").exists()
        SessionDirectory().remove()
    assert set(short_tmp.iterdir()) == {*stays, link} - {locked}
