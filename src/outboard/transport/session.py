"""The private directory that holds a client's sockets.

Its owner removes it, or else a warden does (`launch/warden.py`). Where neither was left to do so, the next front end
does that makes one in the same place: the owner holds a lock on its directory, which ends with the owner however that
ends, and across containers that share the place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

from outboard.errors import ConfigError

__all__ = ["SessionDirectory", "front_end_socket"]

# sun_path of a Unix socket holds 108 bytes with its terminating zero (unix(7)).
_MAX_SOCKET_PATH = 107
_LONGEST_NAME = "out-3fffff-012345"

_PREFIX = "outboard-"
_NAME_LENGTH = len(_PREFIX) + 8  # what mkdtemp makes of it
_UNLOCKED_FOR = 60.0  # seconds that a directory may need from its creation to its lock


class SessionDirectory:
    """A directory with mode 0700 for socket files, and the token that its peers must know.

    Attributes:
        path: the directory.
        token: a random secret; an engine core gets it by its environment and shows it in the handshake.
    """

    def __init__(self) -> None:
        """Makes the directory.

        Raises:
            ConfigError: no directory can be made, its path is too long for a Unix socket, or it takes no sockets; says
                what to do.
            OSError: no file descriptor is left.
        """
        self.token = secrets.token_hex(16)
        self.path, lock = _make_directory()
        self._locks = [lock]  # `pop` hands the descriptor to exactly one closer, with no lock
        _remove_abandoned(self.path.parent)

    def address(self, name: str) -> str:
        """The ZeroMQ address of a socket file in this directory."""
        return f"ipc://{self.path / name}"

    def remove_sockets_of(self, pid: int) -> None:
        """Removes the sockets that a front end left whose process is gone. Never raises."""
        for path in self.path.glob(f"*-{pid:x}-*"):
            try:
                path.unlink()
            except OSError:
                pass

    def remove(self) -> None:
        """Removes the directory and what is in it; does nothing where it is gone. Never raises."""
        try:
            self.path.rmdir()  # enough where start-up failed early; needs no file descriptor, of which none may be left
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
        try:
            os.close(self._locks.pop())
        except IndexError:
            pass


def front_end_socket(directory: str, kind: str) -> str:
    """A path in a session's directory for a socket of this process, never used before; `kind` is "in" or "out"."""
    return f"{directory}/{kind}-{os.getpid():x}-{secrets.token_hex(3)}"


def _make_directory() -> tuple[Path, int]:
    """A directory that a socket can be bound in, and its lock."""
    try:
        wanted = tempfile.gettempdir()
    except OSError:  # it found none that can be written to; say what was tried below
        wanted = "/tmp"
    candidates = [wanted, "/tmp"] if wanted != "/tmp" else [wanted]
    failures = []
    for parent in candidates:
        try:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
        except OSError as error:
            failures.append(f"{parent}: {error.strerror or error}")
            continue
        try:
            _try_socket(path / _LONGEST_NAME)
            return path, _locked(path)
        except OSError as error:
            _remove_empty(path)
            if error.errno in (errno.EMFILE, errno.ENFILE):  # another directory would not help
                raise
            failures.append(f"{parent}: {error.strerror or error}")
    raise ConfigError(
        "no directory for sockets can be made; set TMPDIR to a short path of a directory on a local file system that "
        "can be written to and has room. Tried " + "; ".join(failures)
    )


def _remove_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        pass


def _try_socket(path: Path) -> None:
    """Raises OSError where a socket cannot be bound: not every file system has them, or has room for one."""
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise OSError(0, f"too long a path, a Unix socket may have {_MAX_SOCKET_PATH} bytes")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(str(path))
        except OSError as error:
            raise OSError(error.errno, f"no socket can be made there: {error.strerror or error}") from None
    path.unlink()


def _locked(path: Path) -> int:
    """The directory's descriptor, locked. Where the file system has no locks it is not, and nobody else can lock it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass
    return fd


def _remove_abandoned(parent: Path) -> None:
    """Removes the directories of ours here whose owners are gone."""
    try:
        names = os.listdir(parent)  # noqa: PTH208 - only the names
    except OSError:
        return
    for name in names:
        if name.startswith(_PREFIX) and len(name) == _NAME_LENGTH:
            try:
                fd = os.open(parent / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                if _abandoned(fd):
                    (parent / name).rmdir()
            except OSError:  # in use, or it holds more than sockets: then it is none of ours
                pass
            finally:
                os.close(fd)


def _abandoned(fd: int) -> bool:
    """Whether nobody has this directory locked; then it is emptied. Of files it removes only sockets, and dead ones."""
    facts = os.fstat(fd)
    private = facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) == 0o700
    if not private or time.time() - facts.st_mtime < _UNLOCKED_FOR:
        return False
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for name in os.listdir(fd):
        path = Path(f"/proc/self/fd/{fd}/{name}")
        if not path.is_socket() or _listens(path):
            return False
        path.unlink()
    return True


def _listens(path: Path) -> bool:
    """Whether somebody listens on a socket file. A lock is not seen by all who share some file systems."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED
