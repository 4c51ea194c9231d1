"""Another host, as far as packets are concerned: a network namespace at the other end of a pair of virtual cables."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec

__all__ = ["Far", "NoNamespaceError", "far_host"]

# For benchmarks between networks, and nothing else (RFC 2544).
_HERE = "198.18.7.1"
_THERE = "198.18.7.2"
# Packets that the delay may hold; beyond them it drops.
_LIMIT = 100_000


class NoNamespaceError(Exception):
    """This process may not make one; says what failed."""


class Far(msgspec.Struct, frozen=True):
    """The other host.

    Attributes:
        interface: of this host, at which the other one can be reached.
        command: what to put before a command for it to run there.
        no_delay: why packets have no delay; "": they have.
    """

    interface: str
    command: list[str]
    no_delay: str = ""


@contextmanager
def far_host(delay_ms: float) -> Iterator[Far]:
    """A namespace whose packets take `delay_ms` each way, where the kernel can do that; it is removed afterwards.

    Raises:
        NoNamespaceError: it cannot be made.
    """
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"
    ip, tc = (shutil.which(program, path=path) for program in ("ip", "tc"))
    if ip is None or tc is None:
        raise NoNamespaceError("there is no ip or no tc (iproute2)")
    name = f"ob-bench-{os.getpid()}"
    here, there = f"obh{os.getpid()}", f"obt{os.getpid()}"
    inside = [ip, "netns", "exec", name]
    with ExitStack() as undo:
        _run(ip, "netns", "add", name)
        undo.callback(_run, ip, "netns", "delete", name)
        _run(ip, "link", "add", here, "type", "veth", "peer", "name", there)
        undo.callback(_run, ip, "link", "delete", here)
        _run(ip, "link", "set", there, "netns", name)
        _run(ip, "address", "add", f"{_HERE}/30", "dev", here)
        _run(ip, "link", "set", here, "up")
        _run(*inside, ip, "address", "add", f"{_THERE}/30", "dev", there)
        _run(*inside, ip, "link", "set", there, "up")
        delay = ["root", "netem", "delay", f"{delay_ms:g}ms", "limit", str(_LIMIT)]
        no_delay = ""
        try:
            _run(tc, "qdisc", "add", "dev", here, *delay)
            _run(*inside, tc, "qdisc", "add", "dev", there, *delay)
        except NoNamespaceError as error:  # a kernel without netem
            no_delay = str(error)
        yield Far(here, inside, no_delay)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise NoNamespaceError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
