"""A link between two TUN devices: `python netlink_relay.py NEAR_FD FAR_FD CONTROL_FD`, a program of its own.

It carries packets from either device to the other after a delay, loses some at random, and all of a direction that is
cut. Commands come by a SEQPACKET socket, each answered with how many packets each direction has carried and dropped.
Every packet that a side sends is recorded, also those that get lost. The standard library is enough for it.
"""

from __future__ import annotations

import errno
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, BinaryIO

LONGEST_PACKET = 65536
# Packets that are taken from a device before the others get their turn.
BURST = 64
RAW_IP = 101  # how a capture says that packets begin with their IP header
DIRECTIONS = ("out", "in")  # from near to far, and from far to near


@dataclass(slots=True)
class Direction:
    """One way through the link."""

    source: int
    sink: int
    delay: float = 0.0
    loss: float = 0.0
    cut: bool = False
    carried: int = 0
    dropped: int = 0
    on_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, chance: random.Random, record: Record | None) -> None:
        """Takes what the source has sent."""
        for _ in range(BURST):
            try:
                packet = os.read(self.source, LONGEST_PACKET)
            except BlockingIOError:
                return
            if record is not None:
                record.write(packet)
            if self.cut or chance.random() < self.loss:
                self.dropped += 1
            else:
                self.on_way.append((time.monotonic() + self.delay, packet))

    def deliver(self, now: float) -> None:
        """Hands on what has been on its way for long enough."""
        while self.on_way and self.on_way[0][0] <= now:
            _, packet = self.on_way.popleft()
            try:
                os.write(self.sink, packet)
                self.carried += 1
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EIO, errno.EINVAL, errno.ENOBUFS):
                    raise
                self.dropped += 1

    def set(self, delay: float | None = None, loss: float | None = None, cut: bool | None = None) -> None:
        """Changes what is given. What is on its way to a side that is cut off gets lost."""
        self.delay = self.delay if delay is None else delay
        self.loss = self.loss if loss is None else loss
        self.cut = self.cut if cut is None else cut
        if self.cut:
            self.dropped += len(self.on_way)
            self.on_way.clear()


class Record:
    """A capture that tcpdump can read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        file.write(struct.pack("=IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, LONGEST_PACKET, RAW_IP))

    def write(self, packet: bytes) -> None:
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        self._file.write(struct.pack("=IIII", seconds, nanoseconds // 1000, len(packet), len(packet)))
        self._file.write(packet)


def serve(near: int, far: int, control: socket.socket) -> None:
    """Carries packets until the other end of `control` is closed."""
    ways = dict(zip(DIRECTIONS, (Direction(near, far), Direction(far, near)), strict=True))
    chance = random.Random(1)
    poll = select.poll()
    for fd in (near, far, control.fileno()):
        poll.register(fd, select.POLLIN)
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123
        file: BinaryIO = nothing
        record: Record | None = None
        while True:
            dues = [way.on_way[0][0] for way in ways.values() if way.on_way]
            wait = max(0.0, min(dues) - time.monotonic()) * 1000 if dues else None
            ready = {fd for fd, _ in poll.poll(wait)}
            for way in ways.values():
                if way.source in ready:
                    way.take(chance, record)
                way.deliver(time.monotonic())
            if control.fileno() in ready:
                message = control.recv(65536)
                if not message:
                    file.close()
                    return
                command: dict[str, Any] = json.loads(message)
                for name in command.get("ways", []):
                    ways[name].set(**command["set"])
                if "record" in command:
                    file = open(command["record"], "wb")  # noqa: PTH123, SIM115 - until the end, or the next
                    record = Record(file)
                file.flush()
                counts = {name: {"carried": way.carried, "dropped": way.dropped} for name, way in ways.items()}
                control.send(json.dumps(counts).encode())


if __name__ == "__main__":
    near_fd, far_fd, control_fd = map(int, sys.argv[1:])
    serve(near_fd, far_fd, socket.socket(fileno=control_fd))
