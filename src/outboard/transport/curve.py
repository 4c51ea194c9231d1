"""The keys by which processes on several machines know each other, and the contexts whose sockets use them.

Whatever travels by TCP is encrypted by CURVE. Whoever connects must know the listener's public key, and have the
session's one client key; the listener looks at that by ZAP (`transport/guard.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import zmq
from zmq.utils import z85

from outboard.errors import ConfigError

if TYPE_CHECKING:
    from outboard.transport.guard import Guard

__all__ = ["CURVE_BYTES", "DOMAIN", "KeyedContext", "SessionKeys", "new_token_file", "read_token_file"]

# Of ZAP: which sockets a question is about; the same for all.
DOMAIN = b"outboard"
# What CURVE adds to a frame: "\x07MESSAGE", a nonce, the flags and the authenticator (rfc.zeromq.org/spec/26).
CURVE_BYTES = 8 + 8 + 1 + 16

# For which end a secret is made into a key, at most 16 bytes.
_SERVER = b"outboard server"
_CLIENT = b"outboard client"
# Characters; of hexadecimal digits so many are 128 bits.
_LEAST_SECRET = 32


class SessionKeys(msgspec.Struct, frozen=True):
    """Keys of all TCP sockets of a session, each 40 characters of Z85. No `repr`, error or log shows them.

    They travel in the environment, in messages that are encrypted themselves, or in a file of mode 0600.

    Attributes:
        server_public: of whoever listens; those who connect must know it.
        server_secret: of whoever listens; "" with those who only connect.
        client_public: of whoever connects; the only one that is let in.
        client_secret: of whoever connects.
    """

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def make(cls) -> Self:
        """Random ones."""
        return cls(*_pair(os.urandom(32)), *_pair(os.urandom(32)))

    @classmethod
    def from_secret(cls, secret: str | bytes) -> Self:
        """Those that belong to a secret: the same on every machine that knows it.

        Args:
            secret: at least 32 characters; white space around them does not count.

        Raises:
            ConfigError: it is too short.
        """
        raw = (secret.encode() if isinstance(secret, str) else secret).strip()
        if len(raw) < _LEAST_SECRET:
            raise ConfigError(f"the shared secret has {len(raw)} characters; it must have at least {_LEAST_SECRET}")
        seeds = [hashlib.blake2b(raw, digest_size=32, person=end).digest() for end in (_SERVER, _CLIENT)]
        return cls(*(key for seed in seeds for key in _pair(seed)))

    def for_peers(self) -> Self:
        """Those of somebody who only connects."""
        return msgspec.structs.replace(self, server_secret="")

    def lets_in(self, client_public: bytes) -> bool:
        """Whether this is the key of the session's peers."""
        return hmac.compare_digest(client_public, self.client_public.encode())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


def _pair(secret: bytes) -> tuple[str, str]:
    """Public and secret key, of 32 bytes."""
    encoded: bytes = z85.encode(secret)
    return zmq.curve_public(encoded).decode(), encoded.decode()


class KeyedContext(zmq.Context["zmq.Socket[bytes]"]):
    """A ZeroMQ context whose TCP sockets use a session's keys.

    Attributes:
        keys: the session's.
    """

    keys: SessionKeys
    _guard: Guard | None

    def __init__(self, keys: SessionKeys) -> None:
        super().__init__(io_threads=1)  # one, so that what a socket's monitor tells is in order
        self.keys = keys
        self._guard = None

    def guard(self) -> Guard:
        """What decides who is let in; made by the first call, which must come before a TCP socket is bound.

        Sockets that listen are made in one thread at a time.
        """
        if self._guard is None:
            from outboard.transport.guard import Guard

            self._guard = Guard(self, self.keys)
        return self._guard

    @property
    def refused(self) -> dict[str, int]:
        """How many connections to the sockets that listen were turned away so far.

        "wrong key": of another session, or of somebody who knows the listener's key alone; "no handshake": all else,
        such as a scan of ports, a browser, a peer that does not encrypt, or encrypts for another listener.
        """
        return {"wrong key": 0, "no handshake": 0} if self._guard is None else self._guard.refused()


def new_token_file(path: str | os.PathLike[str]) -> None:
    """Makes a file with a new random secret, of mode 0600.

    Raises:
        ConfigError: it exists, or cannot be made.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"the token file {os.fspath(path)!r} cannot be made: {error.strerror}") from None
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


def read_token_file(path: str | os.PathLike[str]) -> str:
    """The secret in a token file.

    Raises:
        ConfigError: it cannot be read, others than its owner may read or write it, or the secret is too short.
    """
    name = os.fspath(path)
    try:
        with Path(path).open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the token file {name!r} cannot be read: {why}") from None
    if mode & 0o077:
        raise ConfigError(f"the token file {name!r} has mode {mode:04o}, others may use it: chmod 600 {name}")
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"the secret in the token file {name!r} has {len(secret)} characters; it must have at least {_LEAST_SECRET}"
        )
    return secret
