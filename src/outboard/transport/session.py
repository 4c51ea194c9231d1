"""The private directory that holds a client's sockets."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

from outboard.errors import ConfigError

__all__ = ["SessionDirectory"]

# sun_path of a Unix socket holds 108 bytes with its terminating zero (unix(7)).
_MAX_SOCKET_PATH = 107
_LONGEST_NAME = len("/output-4294967295")


class SessionDirectory:
    """A directory with mode 0700 for socket files, and the token that its peers must know.

    Attributes:
        path: the directory.
        token: a random secret; an engine core gets it by its environment and shows it in the handshake.
    """

    def __init__(self) -> None:
        """Makes the directory.

        Raises:
            ConfigError: no directory can be made, or its path is too long for a Unix socket; says what to do.
        """
        self.token = secrets.token_hex(16)
        self.path = _make_directory()

    def address(self, name: str) -> str:
        """The ZeroMQ address of a socket file in this directory."""
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        """Removes the directory and what is in it; does nothing where it is gone. Never raises."""
        try:
            self.path.rmdir()  # enough where start-up failed early; needs no file descriptor, of which none may be left
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)


def _make_directory() -> Path:
    try:
        wanted = tempfile.gettempdir()
    except OSError:  # it found none that can be written to; say what was tried below
        wanted = "/tmp"
    candidates = [wanted, "/tmp"] if wanted != "/tmp" else [wanted]
    failures = []
    for parent in candidates:
        try:
            path = tempfile.mkdtemp(prefix="outboard-", dir=parent)  # mode 0700
        except OSError as error:
            failures.append(f"{parent}: {error.strerror or error}")
            continue
        if len(path.encode()) + _LONGEST_NAME <= _MAX_SOCKET_PATH:
            return Path(path)
        Path(path).rmdir()
        failures.append(f"{parent}: too long a path, a Unix socket may have {_MAX_SOCKET_PATH} bytes")
    raise ConfigError(
        "no directory for sockets can be made; set TMPDIR to a short path of a directory that can be written to. Tried "
        + "; ".join(failures)
    )
