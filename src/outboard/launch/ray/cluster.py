"""This process's connection to a Ray cluster."""

from __future__ import annotations

import ctypes
import importlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outboard.config import RayPlacement
from outboard.errors import ConfigError

__all__ = ["RayCluster"]


class _Uses:
    """Ray has one connection a process, so this is one a process too: how many use the one that we have made."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0


_USES = _Uses()


class RayCluster:
    """Connects, unless this process is connected already; then that connection is used, and left as it is.

    Args:
        placement: says to which cluster. Where none is named and none runs, one of this host alone is started.

    Attributes:
        ray: the module.
        host: address of this host, by which the cluster knows it.
        has_runtime_env: whether all that this process starts there has the placement's `runtime_env` already. Only so
            can it name directories of this host.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster. Ray itself takes up to a minute to tell.
    """

    def __init__(self, placement: RayPlacement) -> None:
        self._ours = self.has_runtime_env = False
        if placement.address.startswith("ray://"):
            raise ConfigError(
                "the head must be in the Ray cluster, ray:// only reaches in from outside: run it there, with "
                "RayPlacement(address='auto')"
            )
        self.ray = ray = _import()
        with _USES.lock:
            if _USES.count or not ray.is_initialized():
                if not ray.is_initialized():
                    _connect(ray, placement)
                    self.has_runtime_env = True
                    _USES.count = 0  # whoever had one has been disconnected by somebody else
                _USES.count += 1
                self._ours = True
        self.host = str(ray.util.get_node_ip_address())

    def close(self) -> None:
        """Ends a connection that was made here once nobody uses it, and a cluster that was. Idempotent."""
        with _USES.lock:
            ours, self._ours = self._ours, False
            if ours and _USES.count:
                _USES.count -= 1
                if not _USES.count:
                    self.ray.shutdown()


def _import() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("backend='ray' needs Ray: install it with pip install 'outboard[ray]'") from None


def _connect(ray: Any, placement: RayPlacement) -> None:
    address = placement.address
    try:
        with _sigterm_as_it_is():
            ray.init(address=address or None, include_dashboard=False, runtime_env=dict(placement.runtime_env) or None)
    except (ConnectionError, ValueError, RuntimeError) as error:
        what = f"the Ray cluster {address!r}" if address else "Ray"
        hint = "; start one with `ray start --head`" if isinstance(error, ConnectionError) else ""
        raise ConfigError(f"cannot connect to {what}: {error}{hint}") from error


@contextmanager
def _sigterm_as_it_is() -> Iterator[None]:
    """Ray takes SIGTERM for itself: to exit at once in Python, and below it to print stacks. Here others handle it."""
    libc = ctypes.CDLL(None)
    system = ctypes.create_string_buffer(1024)  # more than any `struct sigaction`
    libc.sigaction(signal.SIGTERM, None, system)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and signal.getsignal(signal.SIGTERM) is not handler:  # by the main thread, so this one
            signal.signal(signal.SIGTERM, handler)
        libc.sigaction(signal.SIGTERM, system, None)
