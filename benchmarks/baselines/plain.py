"""The plain design of an engine client, as an honest model: what Outboard's hot path is measured against.

The engine runs in a process of its own and sends, each step, one msgpack object a request over PUSH. The client has

    zmq.asyncio receive task -> asyncio.Queue -> output task -> one event collector a request -> async generator

The output task delivers in chunks and lets the loop run in between; a collector merges what its reader has not taken.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from outboard.frontend.outputs import CompletionOutput, RequestOutput
from outboard.protocol.sampling import FinishReason

__all__ = ["PlainClient"]

_CHUNK = 128


class Request(msgspec.Struct, array_like=True):
    """What the client sends for each request."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int


class StepOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one request got in one step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None


class StepOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step produced."""

    engine_index: int
    outputs: list[StepOutput]
    timestamp: float


class EngineOptions(msgspec.Struct):
    """What the engine process is told on its command line. The options have the `mock` engine's meaning."""

    input_address: str
    output_address: str
    start_after: int
    step_ms: float = 0.0
    window: int = 0
    ack_path: str = ""


# --- the engine's process --------------------------------------------------------------------------------------------


class PlainEngine:
    """Gives every request one token a step until it has `max_tokens`."""

    def __init__(self, options: EngineOptions) -> None:
        context = zmq.Context()
        self._input = context.socket(zmq.PULL)
        self._input.connect(options.input_address)
        self._output = context.socket(zmq.PUSH)
        self._output.sndhwm = 0
        self._output.connect(options.output_address)
        self._decode = msgspec.msgpack.Decoder(Request).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._start_after = options.start_after
        self._step_seconds = options.step_ms / 1000
        self._ack_fd = os.open(options.ack_path, os.O_RDWR) if options.window else -1
        self._credit = options.window
        self._left: dict[str, int] = {}

    def run(self) -> None:
        """Waits for all requests, works them off, and waits for the next ones."""
        while True:
            for _ in range(self._start_after):
                request = self._decode(self._input.recv())
                self._left[request.request_id] = request.max_tokens
            deadline = time.monotonic()
            step = 0
            while self._left:
                if self._ack_fd >= 0:
                    if not self._credit:
                        self._credit = len(os.read(self._ack_fd, 65536))
                    self._credit -= 1
                deadline += self._step_seconds
                if (wait := deadline - time.monotonic()) > 0:
                    time.sleep(wait)
                self._output.send(
                    self._encode(StepOutputs(0, self._step(97 + step % 26), time.monotonic())), copy=False
                )
                step += 1

    def _step(self, token: int) -> list[StepOutput]:
        outputs = []
        ended = []
        for request_id, left in self._left.items():
            self._left[request_id] = left - 1
            outputs.append(StepOutput(request_id, [token], "length" if left == 1 else None))
            if left == 1:
                ended.append(request_id)
        for request_id in ended:
            del self._left[request_id]
        return outputs


# --- the client ------------------------------------------------------------------------------------------------------


class Collector:
    """Holds one request's output until its reader takes it; merges what comes before that."""

    def __init__(self) -> None:
        self._output: RequestOutput | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        held = self._output
        if held is None:
            self._output = output
            self._ready.set()
        else:
            held.outputs[0].token_ids += output.outputs[0].token_ids
            held.outputs[0].finish_reason = output.outputs[0].finish_reason
            held.finished |= output.finished

    async def get(self) -> RequestOutput:
        while (output := self._output) is None:
            await self._ready.wait()
        self._output = None
        self._ready.clear()
        return output

    def get_nowait(self) -> RequestOutput | None:
        output = self._output
        if output is not None:
            self._output = None
            self._ready.clear()
        return output


class PlainClient:
    """Starts the engine's process and reads from it. An async context manager.

    Args:
        start_after: how many requests the engine waits for before its first step.
        step_ms, window, ack_path: as the `mock` engine's options.
    """

    def __init__(self, start_after: int, step_ms: float = 0.0, window: int = 0, ack_path: str = "") -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._options = EngineOptions(
            f"ipc://{self._directory.name}/in",
            f"ipc://{self._directory.name}/out",
            start_after,
            step_ms,
            window,
            ack_path,
        )
        self._collectors: dict[str, Collector] = {}
        self._queue: asyncio.Queue[StepOutputs] = asyncio.Queue()
        self._decode = msgspec.msgpack.Decoder(StepOutputs).decode
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._input.bind(self._options.input_address)
        self._output = self._context.socket(zmq.PULL)
        self._output.rcvhwm = 0
        self._output.bind(self._options.output_address)
        options = json.dumps(msgspec.to_builtins(self._options))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, options, cwd=Path(__file__).parents[2]
        )
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._handle_outputs())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._process.send_signal(signal.SIGTERM)
        await self._process.wait()
        self._context.destroy(linger=0)
        self._directory.cleanup()

    async def generate(self, prompt_token_ids: Sequence[int], max_tokens: int) -> AsyncIterator[RequestOutput]:
        """Yields what is new of one request, until it has ended."""
        request_id = f"cmpl-{uuid.uuid4().hex}-0"
        collector = self._collectors[request_id] = Collector()
        try:
            await self._input.send(self._encode(Request(request_id, list(prompt_token_ids), max_tokens)))
            finished = False
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output
        finally:
            del self._collectors[request_id]

    async def _receive(self) -> None:
        while True:
            frames = await self._output.recv_multipart(copy=False)
            self._queue.put_nowait(self._decode(frames[0].buffer))

    async def _handle_outputs(self) -> None:
        while True:
            outputs = (await self._queue.get()).outputs
            for start in range(0, len(outputs), _CHUNK):
                if start:
                    await asyncio.sleep(0)
                for output in outputs[start : start + _CHUNK]:
                    collector = self._collectors.get(output.request_id)
                    if collector is not None:
                        collector.put(_request_output(output))


def _request_output(output: StepOutput) -> RequestOutput:
    completion = CompletionOutput(0, "", output.new_token_ids, output.finish_reason)
    return RequestOutput(output.request_id, [completion], output.finish_reason is not None)


if __name__ == "__main__":
    PlainEngine(msgspec.json.decode(sys.argv[1], type=EngineOptions)).run()
