"""Calls and answers over Outboard's kinds of sockets, as simple as can be: what utility calls are measured against.

The client's ROUTER sends calls to the DEALER of a child process, the child's PUSH sends answers to the client's PULL.

    raw     both ends block in their one thread
    bare    client: a reader on the event loop, one future
            child:  input thread -> SimpleQueue -> main thread, which sends
    plain   the plain design, for many calls at once; client: zmq.asyncio both ways, a receive task, futures by call id
            child:  input thread -> Queue -> busy loop -> Queue -> output thread
"""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

__all__ = ["BareClient", "Child", "PlainClient", "RawClient"]

# Plain ints: arithmetic on ZeroMQ's enums costs 1 us.
_SNDMORE = int(zmq.SNDMORE)
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


class Call(msgspec.Struct, array_like=True):
    """Calls a method of the engine."""

    call_id: int
    method: str


class Answer(msgspec.Struct, array_like=True):
    """What it returned."""

    call_id: int
    result: Any


# --- the child's process ---------------------------------------------------------------------------------------------


class Engine:
    """What is called."""

    def is_paused(self) -> bool:
        return False


class ChildEnd:
    """The child's sockets and engine, and the three ways to serve calls; none returns."""

    def __init__(self, calls_address: str, answers_address: str) -> None:
        context = zmq.Context()
        self._calls = context.socket(zmq.DEALER)
        self._calls.connect(calls_address)
        self._calls.send(b"")  # the client learns the identity
        self._answers = context.socket(zmq.PUSH)
        self._answers.connect(answers_address)
        self._engine = Engine()
        self._decode = msgspec.msgpack.Decoder(Call).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def raw(self) -> None:
        while True:
            self._answers.send(self._encode(self._answer(self._decode(self._calls.recv()))))

    def bare(self) -> None:
        inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()

        def receive() -> None:
            while True:
                inbox.put(self._decode(self._calls.recv()))

        threading.Thread(target=receive, daemon=True).start()
        while True:
            self._answers.send(self._encode(self._answer(inbox.get())))

    def plain(self) -> None:
        inbox: queue.Queue[Call] = queue.Queue()
        outbox: queue.Queue[Answer] = queue.Queue()

        def receive() -> None:
            while True:
                frames = self._calls.recv_multipart(copy=False)
                inbox.put_nowait(self._decode(frames[0].buffer))

        def send() -> None:
            while True:
                self._answers.send(self._encode(outbox.get()))

        threading.Thread(target=receive, daemon=True).start()
        threading.Thread(target=send, daemon=True).start()
        while True:
            outbox.put_nowait(self._answer(inbox.get()))
            while not inbox.empty():
                outbox.put_nowait(self._answer(inbox.get_nowait()))

    def _answer(self, call: Call) -> Answer:
        return Answer(call.call_id, getattr(self._engine, call.method)())


# --- the client ------------------------------------------------------------------------------------------------------


class Child:
    """A child process and the sockets to it. A context manager; ready when entered.

    Attributes:
        pid: process id of the child.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Answer).decode

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory()
        self._context = zmq.Context()
        self._calls = self._context.socket(zmq.ROUTER)
        self._calls.bind(f"ipc://{self._directory.name}/calls")
        self._answers = self._context.socket(zmq.PULL)
        self._answers.bind(f"ipc://{self._directory.name}/answers")
        addresses = [f"ipc://{self._directory.name}/{name}" for name in ("calls", "answers")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._kind, *addresses], cwd=Path(__file__).parents[2]
        )
        self.pid = self._process.pid
        self._identity, _ = self._calls.recv_multipart()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._context.destroy(linger=0)
        self._directory.cleanup()


class RawClient(Child):
    """Blocks for each answer."""

    def __init__(self) -> None:
        super().__init__("raw")

    def call(self, method: str) -> Any:
        self._calls.send(self._identity, _SNDMORE)
        self._calls.send(self._encode(Call(0, method)))
        return self._decode(self._answers.recv()).result


class BareClient(Child):
    """Reads on the event loop; one call at a time. To be entered on the loop."""

    def __init__(self) -> None:
        super().__init__("bare")

    def __enter__(self) -> Self:
        super().__enter__()
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._answers.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.remove_reader(self._fd)
        super().__exit__(*exception)

    async def call(self, method: str) -> Any:
        future = self._future = self._loop.create_future()
        self._calls.send(self._identity, _SNDMORE)
        self._calls.send(self._encode(Call(0, method)))
        return await future

    def _on_readable(self) -> None:
        while int(self._answers.getsockopt(_EVENTS)) & _POLLIN:
            self._future.set_result(self._decode(self._answers.recv(_NOBLOCK)).result)


class PlainClient(Child):
    """The plain design; any number of calls at once. To be entered on the loop."""

    def __init__(self) -> None:
        super().__init__("plain")
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0

    def __enter__(self) -> Self:
        super().__enter__()
        self._sender = zmq.asyncio.Socket.from_socket(self._calls)
        self._receiver = zmq.asyncio.Socket.from_socket(self._answers)
        self._task = asyncio.get_running_loop().create_task(self._receive())
        return self

    def __exit__(self, *exception: object) -> None:
        self._task.cancel()
        self._sender.close()
        self._receiver.close()
        super().__exit__(*exception)

    async def call(self, method: str) -> Any:
        call_id = self._next_id
        self._next_id += 1
        future = self._futures[call_id] = asyncio.get_running_loop().create_future()
        await self._sender.send_multipart([self._identity, self._encode(Call(call_id, method))])
        return await future

    async def _receive(self) -> None:
        while True:
            frames = await self._receiver.recv_multipart(copy=False)
            answer = self._decode(frames[0].buffer)
            self._futures.pop(answer.call_id).set_result(answer.result)


if __name__ == "__main__":
    kind, *addresses = sys.argv[1:]
    child = ChildEnd(*addresses)
    {"raw": child.raw, "bare": child.bare, "plain": child.plain}[kind]()
