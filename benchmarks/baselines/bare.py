"""The floor of a stream of tokens: one process packs a list of them each step, another is called back with it.

Nothing is asked for, no request has a name, and nobody waits: what is left is a pause, a list, a system call each way,
and to be woken by it.

    engine   pause or credit -> [token] * streams -> msgpack -> one `send` on a Unix socket
    client   the loop's reader callback -> one `recv` -> list
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

__all__ = ["BareClient"]


class EngineOptions(msgspec.Struct):
    """What the engine process is told on its command line. Those of the `mock` engine have its meaning."""

    fd: int
    streams: int
    steps: int
    step_ms: float = 0.0
    window: int = 0
    ack_path: str = ""


def run_engine(options: EngineOptions) -> None:
    """Waits for a byte, then takes all steps."""
    connection = socket.socket(fileno=options.fd)
    encode = msgspec.msgpack.Encoder().encode
    acks = os.open(options.ack_path, os.O_RDWR) if options.window else -1
    credit = options.window
    connection.recv(1)
    deadline = time.monotonic()
    for step in range(options.steps):
        if acks >= 0:
            if not credit:
                credit = len(os.read(acks, 65536))
            credit -= 1
        deadline += options.step_ms / 1000
        if (wait := deadline - time.monotonic()) > 0:
            time.sleep(wait)
        body = encode([97 + step % 26] * options.streams)
        connection.sendall(len(body).to_bytes(4, "big") + body)
    connection.recv(1)  # its CPU time is to be read first


class BareClient:
    """Starts the engine, and reads from it on the running loop. A context manager.

    Args:
        streams: tokens of a step.
        steps: how many.
        step_ms, window, ack_path: as of `mock`.

    Attributes:
        pid: of the engine.
    """

    def __init__(self, streams: int, steps: int, *, step_ms: float = 0.0, window: int = 0, ack_path: str = "") -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        options = EngineOptions(theirs.fileno(), streams, steps, step_ms, window, ack_path)
        command = [sys.executable, "-m", __name__, json.dumps(msgspec.to_builtins(options))]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[2], pass_fds=[theirs.fileno()])
        theirs.close()
        self.pid = self._process.pid
        self._expected = streams * steps
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    async def read(self, took: Callable[[int], None]) -> None:
        """Lets the engine begin; calls `took` with the number of tokens of each message, until the last."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        decode = msgspec.msgpack.Decoder(list[int]).decode
        left = self._expected

        def on_readable() -> None:
            nonlocal left
            data = self._rest + self._connection.recv(1 << 18)
            start = 0
            while len(data) - start >= 4:
                end = start + 4 + int.from_bytes(data[start : start + 4], "big")
                if len(data) < end:
                    break
                tokens = len(decode(data[start + 4 : end]))
                start = end
                left -= tokens
                took(tokens)
            self._rest = data[start:]
            if not left:
                done.set_result(None)

        loop.add_reader(self._connection, on_readable)
        self._connection.send(b"\0")
        try:
            await done
        finally:
            loop.remove_reader(self._connection)


if __name__ == "__main__":
    run_engine(msgspec.json.decode(sys.argv[1], type=EngineOptions))
