"""A head that does by hand what the real one does, for a real node and real engine cores."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from outboard.config import NetworkConfig
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.messages import Failed, Hello, Init, Ready
from outboard.protocol.nodes import FromNode, HeadPing, NodeHello, NodePing, NodeWelcome, StartRank
from outboard.transport.curve import SessionKeys, new_token_file, read_token_file
from outboard.transport.node_server import NodeServer
from outboard.transport.sockets import ControlServer, make_context

__all__ = ["BOUND", "INTERVAL", "PATIENCE", "FakeHead", "NodeProcess", "all_gone", "eventually", "free_port"]

BOUND = 20.0  # seconds; whatever is waited for here comes in a fraction of it
INTERVAL, PATIENCE = 0.1, 1.0


def eventually(condition: Callable[[], Any], bound: float = BOUND) -> Any:
    """Waits until a condition holds; its value."""
    deadline = time.monotonic() + bound
    while not (value := condition()):
        assert time.monotonic() < deadline, "this did not happen in time"
        time.sleep(0.01)
    return value


def all_gone(processes: list[psutil.Process], bound: float) -> bool:
    """Whether these end within so many seconds."""
    deadline = time.monotonic() + bound
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def free_port() -> int:
    """The first of 16 ports that nobody uses; of those that the system gives to nobody who asks for any.

    Each process begins elsewhere, so that tests of several at once do not meet.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    begin = 20_000 + os.getpid() * 16 % 8_000
    for port in range(begin, first - 16, 16):
        if all(map(_is_free, range(port, port + 16))):
            return port
    raise AssertionError("no port is free")


def _is_free(port: int) -> bool:
    for address in ("127.0.0.1", "127.0.0.2"):
        try:
            socket.create_server((address, port)).close()
        except OSError:
            return False
    return True


class NodeProcess:
    """`outboard node`, as a program.

    Args:
        address: of the head, "tcp://host:port".
        token: the token file.
        more: arguments.
    """

    def __init__(self, address: str, token: Path, *more: str, cwd: Path | None = None) -> None:
        command = [sys.executable, "-c", "from outboard.cli.main import run; run()", "node"]
        command += ["--join", address.removeprefix("tcp://"), "--token-file", str(token), *more]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=cwd)
        self.pid = self.process.pid

    def family(self) -> list[psutil.Process]:
        """It, and what it has started."""
        me = psutil.Process(self.pid)
        return [me, *me.children(recursive=True)]

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, bound: float = BOUND) -> tuple[int, str]:
        """Its exit status, and all that it wrote to stderr."""
        _, stderr = self.process.communicate(timeout=bound)
        return self.process.returncode, stderr

    def close(self) -> None:
        """Ends it, if it has not ended, such that it takes all with it."""
        if self.process.poll() is None:
            for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGTERM):
                self.process.send_signal(number)
        self.process.communicate(timeout=BOUND)


class FakeHead:
    """Listens, and says what the test wants; answers pings while `take` or `hear` runs.

    Args:
        directory: for sockets and the token file.
        port: where nodes join; 0: any.
    """

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.token = directory / "token"
        if not self.token.exists():
            new_token_file(self.token)
        network = NetworkConfig(listen="127.0.0.1", port=port, heartbeat_interval=INTERVAL, patience=PATIENCE)
        self.server = NodeServer(read_token_file(self.token), network)
        self.address = self.server.address
        self.keys = SessionKeys.make()
        self._context = make_context(self.keys)
        self.control = ControlServer(self._context, f"ipc://{directory}/control-{time.monotonic_ns()}", network=network)
        self.heard: list[Any] = []
        self.hellos: list[NodeHello] = []
        self.ready: dict[tuple[int, int], tuple[Hello, Ready | Failed]] = {}  # by rank and incarnation
        self.peer = b""
        self.node_id = ""
        self.pings = True
        self._engines: dict[bytes, Hello] = {}
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(FromNode)
        self._control_decoder: MsgpackDecoder[Any] = MsgpackDecoder(Hello | Ready | Failed)
        self._pinged = 0.0

    def tell(self, *messages: Any) -> None:
        for message in messages:
            self.server.send(self.peer, msgspec.msgpack.encode(message))

    def take(self) -> None:
        """Takes all that is there; welcomes nodes, tells engine cores what to run."""
        while (found := self.server.receive()) is not None:
            peer, [body] = found
            message = self._decoder.decode(body)
            self.heard.append(message)
            if isinstance(message, NodePing) and message.node_id == self.node_id:
                self.peer = peer  # its connection may be a new one
            elif isinstance(message, NodeHello):
                self.hellos.append(message)
                self.peer, self.node_id = peer, message.node_id
                keys = json.loads(msgspec.json.encode(self.keys.for_peers()))
                address = self.control.tcp_address
                self.tell(
                    NodeWelcome(message.node_id, address, "session", json.dumps(keys), INTERVAL, PATIENCE, 5.0, 1.0)
                )
        while (found := self.control.receive()) is not None:
            self._take_control(*found)
        if self.pings and self.peer and time.monotonic() > self._pinged + INTERVAL:
            self._pinged = time.monotonic()
            self.tell(HeadPing(self.node_id))

    def hear(self, kind: Any, bound: float = BOUND) -> Any:
        """Waits for a message of a kind; all before it are forgotten."""

        def look() -> Any:
            self.take()
            found = next((one for one in self.heard if isinstance(one, kind)), None)
            if found is not None:
                del self.heard[: self.heard.index(found) + 1]
            return found

        return eventually(look, bound)

    def start(self, rank: int, engine: str = "outboard.engines.mock:MockEngine", **options: Any) -> tuple[Hello, Any]:
        """Has an engine core started; what it says of itself."""
        self.inits = Init(engine, options, [], rank, 0, 1000, 1 << 30, 1000)
        self.tell(StartRank(rank, 0, {"OUTBOARD_TEST_VARIABLE": "of its own"}))
        return eventually(lambda: self.take() or self.ready.get((rank, 0)))

    def _take_control(self, peer: bytes, frames: list[bytes]) -> None:
        message = self._control_decoder.decode(frames[0])
        assert message.session_token == "session"
        if isinstance(message, Hello):
            self._engines[peer] = message
            self.control.send(peer, msgspec.msgpack.encode(msgspec.structs.replace(self.inits, rank=message.rank)))
        else:
            hello = self._engines[peer]
            self.ready[hello.rank, hello.incarnation] = (hello, message)

    def close(self) -> None:
        self.server.close()
        self.control.close()
        self._context.term()
