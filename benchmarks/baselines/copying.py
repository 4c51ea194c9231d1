"""The plain way to move arrays over ZeroMQ: `send(array)` and `recv()`, which copy on both sides.

One process gives and takes arrays, over a PUSH and a PULL each way:

    give    -> the array           take, the array -> ok
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np
import zmq

__all__ = ["CopyingClient"]


class CopyingClient:
    """Starts the other process and asks it.

    Attributes:
        pid: the other process's.
    """

    def __init__(self, size: int) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._context = zmq.Context()
        self._out, self._in = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._out.bind(f"ipc://{self._directory.name}/requests")
        self._in.bind(f"ipc://{self._directory.name}/outputs")
        command = [sys.executable, "-m", __name__, self._directory.name, str(size)]
        self._process = subprocess.Popen(command)
        self.pid = self._process.pid
        self._in.recv()

    def give(self) -> np.ndarray[Any, Any]:
        """An array from over there."""
        self._out.send(b"give")
        return np.frombuffer(self._in.recv(), np.uint8)

    def take(self, array: np.ndarray[Any, Any]) -> None:
        """Sends an array; returns when it is over there."""
        self._out.send(b"take", zmq.SNDMORE)
        self._out.send(array.data)
        self._in.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.send(b"stop")
        self._process.wait(10)
        self._context.destroy(linger=0)
        self._directory.cleanup()


def main() -> None:
    directory, size = Path(sys.argv[1]), int(sys.argv[2])
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(f"ipc://{directory}/requests")
    outbox.connect(f"ipc://{directory}/outputs")
    array = np.full(size, 1, np.uint8)
    outbox.send(b"ready")
    while (frames := inbox.recv_multipart())[0] != b"stop":
        if frames[0] == b"give":
            outbox.send(array.data)
        else:
            np.frombuffer(frames[1], np.uint8)[::4096].sum()
            outbox.send(b"ok")
        del frames
    context.destroy(linger=1000)


if __name__ == "__main__":
    main()
