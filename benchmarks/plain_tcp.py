"""TCP that is not encrypted, to measure encryption against. Outboard has no such sockets, and no switch for them.

Whatever else makes a TCP socket stays: heartbeats, limits, the watch over its connections. Only the data channel is
plain. A front end makes its ends of it while `plain_tcp` is entered, an engine core after its engine was made.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import zmq

from outboard.engines.mock import MockEngine
from outboard.transport.curve import KeyedContext

__all__ = ["PlainMock", "plain_tcp"]

_CURVE = (
    zmq.CURVE_SERVER,
    zmq.CURVE_SERVERKEY,
    zmq.CURVE_PUBLICKEY,
    zmq.CURVE_SECRETKEY,
    zmq.ZAP_DOMAIN,
    zmq.ZAP_ENFORCE_DOMAIN,
)


class _PlainSocket(zmq.Socket[bytes]):
    """Does not hear of keys."""

    def setsockopt(self, option: int, value: Any) -> None:
        if option not in _CURVE:
            super().setsockopt(option, value)


_plain_socket = functools.partialmethod(zmq.Context.socket, socket_class=_PlainSocket)


def plain_tcp() -> AbstractContextManager[Any]:
    """While it is entered, all TCP sockets that this process makes are plain."""
    return patch.object(KeyedContext, "socket", _plain_socket)


class PlainMock(MockEngine):
    """`mock`, in an engine core whose data channel is plain: it is made later than the engine."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        plain_tcp().__enter__()  # until the process ends
