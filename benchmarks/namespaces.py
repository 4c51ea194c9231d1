"""Two network namespaces with a link between them that can be slow, lossy or cut; needs root, `ip` and TUN devices."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.netlink_relay import DIRECTIONS

_RELAY = Path(__file__).with_name("netlink_relay.py")
TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
DEVICE = "link0"
_count = itertools.count()


def why_not() -> str:
    """Why namespaces cannot be made here; "": they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program `ip` (iproute2)"
    if not Path(TUN).exists():
        return f"the link between the namespaces needs {TUN}"
    name = f"ob-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"this root may not make network namespaces: {made.stderr.strip()}"
    try:
        with _tun_device() as fd:
            _move(_device_of(fd), name)
    except OSError as error:
        return f"this root may not make TUN devices: {error}"
    except subprocess.CalledProcessError as error:
        return f"a TUN device cannot be moved to a namespace: {error.stderr}"
    finally:
        _ip("netns", "delete", name)
    return ""


class Side:
    """One of the namespaces.

    Attributes:
        name: of the namespace.
        address: of its end of the link.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    @contextmanager
    def entered(self) -> Iterator[None]:
        """While it is entered, this thread is in the namespace, and so are threads and processes that it starts."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            inside = os.open(f"/run/netns/{self.name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _enter(inside)
            finally:
                os.close(inside)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Starts a program in the namespace; its pid is the program's."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], **options)


class Network:
    """Both namespaces and the link. `close` it, or use it in a `with` statement.

    Args:
        ipv6: whether its addresses are of IPv6.
        delay: seconds that a packet takes, in each direction.
        loss: share of packets that get lost.
        mtu: bytes of the longest packet.

    Attributes:
        near, far: the namespaces.
    """

    def __init__(self, *, ipv6: bool = False, delay: float = 0.0, loss: float = 0.0, mtu: int = 1500) -> None:
        name = f"ob{os.getpid()}-{next(_count)}"
        addresses = ("fd00:77::1", "fd00:77::2") if ipv6 else ("10.77.0.1", "10.77.0.2")
        self.near, self.far = (
            Side(f"{name}-{end}", address) for end, address in zip(("near", "far"), addresses, strict=True)
        )
        with ExitStack() as undo:
            fds = []
            for side in (self.near, self.far):
                _ip("netns", "add", side.name)
                undo.callback(_ip, "netns", "delete", side.name)
                fds.append(undo.enter_context(_tun_device()))
                device = _device_of(fds[-1])
                _move(device, side.name)
                prefix = "64" if ipv6 else "24"
                _ip("-n", side.name, "link", "set", device, "name", DEVICE)
                _ip("-n", side.name, "address", "add", f"{side.address}/{prefix}", "dev", DEVICE, *["nodad"] * ipv6)
                _ip("-n", side.name, "link", "set", DEVICE, "mtu", str(mtu), "up")
                _ip("-n", side.name, "link", "set", "lo", "up")
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(10)
            self._control = undo.enter_context(ours)
            with theirs:
                fds.append(theirs.fileno())
                command = [sys.executable, "-I", "-S", str(_RELAY), *map(str, fds)]
                self.relay = subprocess.Popen(command, pass_fds=fds)
            undo.callback(self._end_relay)
            self._undo = undo.pop_all()
        self.set(delay=delay, loss=loss)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the relay, and removes devices and namespaces. Idempotent."""
        self._undo.close()

    def set(self, *ways: str, **what: Any) -> None:
        """Changes delay, loss or cut of directions, "out" from near to far and "in"; by default of both."""
        self._ask(ways=ways or DIRECTIONS, set=what)

    def cut(self, *ways: str) -> None:
        """Lets nothing through in these directions; by default in both."""
        self.set(*ways, cut=True)

    def heal(self) -> None:
        """Ends all cuts."""
        self.set(cut=False)

    def record(self, path: Path) -> None:
        """Writes all packets from now on to a file that tcpdump can read."""
        self._ask(record=str(path))

    def counts(self) -> dict[str, dict[str, int]]:
        """How many packets each direction has carried and dropped; all that is recorded is in its file then."""
        counts: dict[str, dict[str, int]] = self._ask()
        return counts

    def _ask(self, **command: Any) -> Any:
        self._control.send(json.dumps(command).encode())
        return json.loads(self._control.recv(65536))

    def _end_relay(self) -> None:
        self._control.close()
        try:
            self.relay.wait(10)
        except subprocess.TimeoutExpired:
            self.relay.kill()
            self.relay.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def _tun_device() -> Iterator[int]:
    """The descriptor of a new device, which is gone when that is closed everywhere."""
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        name = f"ob{os.getpid()}x{next(_count)}"[:15].encode()
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name, _IFF_TUN | _IFF_NO_PI))
        yield fd
    finally:
        os.close(fd)


def _device_of(fd: int) -> str:
    """The name of the device behind a descriptor."""
    answer = fcntl.ioctl(fd, 0x800454D2, struct.pack("16sH", b"", 0) + bytes(24))  # TUNGETIFF
    return answer[:16].rstrip(b"\0").decode()


def _move(device: str, namespace: str) -> None:
    _ip("link", "set", device, "netns", namespace)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
