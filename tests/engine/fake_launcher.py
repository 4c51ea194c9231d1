"""A launcher and front ends that do by hand what the real ones do, for a real engine-core process."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outboard.config import TransportConfig
from outboard.protocol.codec import MsgpackDecoder, MsgpackEncoder
from outboard.protocol.control import AttachClient, ClientAttached, DetachClient
from outboard.protocol.environment import REPORT_FD, ChildEnvironment
from outboard.protocol.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreDead,
    EngineCoreOutputs,
    EngineCoreRequestType,
    Failed,
    Hello,
    Init,
    LeaveRank,
    Ready,
    UtilityCall,
    UtilityOutput,
)
from outboard.protocol.progress import Progress, ProgressReader
from outboard.protocol.report import ReportPage
from outboard.protocol.sampling import SamplingParams
from outboard.protocol.shm_pair import SharedMemory
from outboard.protocol.tensors import Buffer
from outboard.transport.inputs import listen_for_inputs
from outboard.transport.outputs import listen_for_outputs
from outboard.transport.sockets import ControlServer, make_context
from support import SOCKETS

__all__ = ["FakeLauncher", "FrontEnd", "eventually"]

BOUND = 20.0  # seconds; whatever is waited for here comes in a fraction of one
CONFIG = TransportConfig(sockets=SOCKETS)
SHARED = 1 << 20  # larger arrays go into shared memory


def eventually(condition: Callable[[], Any]) -> Any:
    """Waits until a condition holds; its value."""
    deadline = time.monotonic() + BOUND
    while not (value := condition()):
        assert time.monotonic() < deadline, "this did not happen in time"
        time.sleep(0.002)
    return value


class FrontEnd:
    """The sockets of one client, and what came."""

    def __init__(self, context: Any, directory: Path, index: int, epoch: int, slot: int, memory: SharedMemory) -> None:
        self.memory = memory
        self.index, self.epoch, self.slot = index, epoch, slot
        self.strangers: list[str] = []
        self.ends: list[str] = []
        self.outputs = listen_for_outputs(
            context, str(directory), epoch, CONFIG, self._take, self.ends.append, self.strangers.append
        )
        self.identity = b"engine-%d" % epoch
        self.inputs = listen_for_inputs(
            context, str(directory), epoch, self.identity, CONFIG, lambda *_: None, lambda: None, self.strangers.append
        )
        self.addresses = (self.inputs.address, self.outputs.address)
        self.messages: list[EngineCoreOutputs] = []
        self.dead: list[EngineCoreDead] = []
        self.sent = 0
        self._encode = MsgpackEncoder(1000, SHARED, memory.pool).encode
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(EngineCoreOutputs | EngineCoreDead)

    def map_memory(self, pid: int) -> None:
        """Opens the engine core's half."""
        self.memory.attach(pid)
        assert self.memory.reader is not None
        self._decoder = MsgpackDecoder(EngineCoreOutputs | EngineCoreDead, self.memory.reader)

    def send_frames(self, *frames: bytes) -> None:
        eventually(lambda: self.inputs.send(frames))
        self.sent += 1

    def add(self, handle: int, max_tokens: int, tokens: Sequence[int] = (1, 2, 3), resumed: int = 0) -> None:
        prompt = array("i", tokens).tobytes()
        params = SamplingParams(max_tokens=max_tokens)
        body = AddRequest(self.epoch, handle, f"r{handle}", prompt, params, num_output_tokens=resumed)
        self.send_frames(EngineCoreRequestType.ADD.value, *self._encode(body))

    def abort(self, *handles: int) -> None:
        self.send_frames(EngineCoreRequestType.ABORT.value, *self._encode(AbortRequests(self.epoch, list(handles))))

    def call(self, call_id: int, method: str, *args: Any) -> None:
        body = UtilityCall(self.epoch, call_id, method, list(args), {})
        self.send_frames(EngineCoreRequestType.UTILITY.value, *self._encode(body))

    def leave(self) -> None:
        """Says LEAVE."""
        self.send_frames(EngineCoreRequestType.LEAVE.value, *self._encode(LeaveRank(self.epoch)))

    def receive(self, timeout: float = BOUND) -> bool:
        """Takes one message; False if none came."""
        deadline = time.monotonic() + timeout
        while not self.outputs.drain(1):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _take(self, body: Buffer, aux: Sequence[Buffer]) -> None:
        message = self._decoder.decode(body, aux)
        assert message.epoch == self.epoch
        if isinstance(message, EngineCoreDead):
            self.dead.append(message)
        else:
            assert message.sequence == len(self.messages)
            self.messages.append(message)

    def receive_until(self, condition: Callable[[], Any]) -> Any:
        while not (value := condition()):
            assert self.receive(), "no message came"
        return value

    def tokens(self) -> dict[int, list[Any]]:
        """What has come by handle: tokens, and at the end the finish reason."""
        found: dict[int, list[Any]] = defaultdict(list)
        for message in self.messages:
            message.request_ids = [str(handle) for handle in message.handles]
            for output in message.outputs:
                found[int(output.request_id)] += output.new_token_ids
                if output.finish_reason is not None:
                    found[int(output.request_id)].append(output.finish_reason)
        return found

    def finished(self, *handles: int) -> bool:
        found = self.tokens()
        return all(found[handle] and isinstance(found[handle][-1], str) for handle in handles)

    def answers(self) -> list[UtilityOutput]:
        return [message.utility_output for message in self.messages if message.utility_output is not None]

    def close(self) -> None:
        self.memory.close()
        self.inputs.stop()
        self.inputs.close()
        self.outputs.stop()
        self.outputs.close()


class FakeLauncher:
    """Starts an engine core, with no warden, and speaks with it on the control channel.

    Args:
        directory: for sockets.
        engine: a name or a reference.
        rank: of it.
        init: more fields of INIT.
        options: of the engine.
    """

    def __init__(
        self,
        directory: Path,
        engine: str = "echo",
        *,
        rank: int = 2,
        init: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._directory = directory / f"rank{rank}"
        self._directory.mkdir(exist_ok=True)
        self._context = make_context()
        address = f"ipc://{self._directory}/control"
        self._server = ControlServer(self._context, address)
        self._epochs = itertools.count(1)
        self._front_ends: list[FrontEnd] = []
        self.report = ReportPage.create()
        who = ChildEnvironment(control_address=address, session_token="secret", rank=rank, incarnation=4)
        environ = {**os.environ, **who.to_environ(), REPORT_FD: str(self.report.fd)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "outboard.engine"],
            env=environ,
            pass_fds=[self.report.fd],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.peer = b""
        hello = self.receive(Hello)
        assert (hello.session_token, hello.rank, hello.pid) == ("secret", rank, self.process.pid)
        names = {
            "echo": "outboard.engines.echo:EchoEngine",
            "mock": "outboard.engines.mock:MockEngine",
            "lockstep_mock": "outboard.engines.lockstep_mock:LockstepMockEngine",
        }
        name = names.get(engine, engine)
        self.tell(Init(name, options, sys.path, rank, 4, 1000, 1 << 30, 1000, SHARED, **(init or {})))
        self.ready: Ready = self.receive(Ready)

    def tell(self, *messages: Any) -> None:
        for message in messages:
            self.send_body(msgspec.msgpack.encode(message))

    def send_body(self, *frames: bytes) -> None:
        self._server._sockets[self.peer[:1]].send_multipart([self.peer[1:], *frames])

    def receive(self, kind: Any) -> Any:
        deadline = time.monotonic() + BOUND
        while (found := self._server.receive()) is None:
            assert time.monotonic() < deadline, f"no {kind.__name__} came"
            assert self.process.poll() is None, f"it ended: {self.stderr()}"
            self._server.wait([], 0.05)
        self.peer, [body] = found
        return MsgpackDecoder[Any](kind if kind is Failed else kind | Failed).decode(body)

    def front_end(self, index: int = 0, slot: int = 0, shared_memory: int = 0) -> FrontEnd:
        """One that is not attached yet; with so many bytes of shared memory for each direction."""
        memory = SharedMemory.offer(shared_memory)
        front_end = FrontEnd(self._context, self._directory, index, next(self._epochs), slot, memory)
        self._front_ends.append(front_end)
        return front_end

    def attach(self, index: int = 0, slot: int = 0, shared_memory: int = 0) -> FrontEnd:
        front_end = self.front_end(index, slot, shared_memory)
        answer = self.introduce(front_end)
        assert (answer.session_token, answer.refused) == ("secret", "")
        assert (answer.client_index, answer.epoch) == (index, front_end.epoch)
        if shared_memory:
            front_end.map_memory(self.process.pid)
        return front_end

    def introduce(self, front_end: FrontEnd, **changes: Any) -> ClientAttached:
        """Sends ATTACH_CLIENT; the answer."""
        fields: dict[str, Any] = {
            "client_index": front_end.index,
            "epoch": front_end.epoch,
            "slot": front_end.slot,
            "pid": os.getpid(),
            "input_address": front_end.addresses[0],
            "output_address": front_end.addresses[1],
            "identity": front_end.identity,
            "arena": front_end.memory.address,
        }
        self.send_body(msgspec.msgpack.encode(AttachClient(**(fields | changes))))
        answer: ClientAttached = self.receive(ClientAttached)
        assert answer.refused or (front_end.outputs.accept() and front_end.inputs.accept())
        return answer

    def detach(self, front_end: FrontEnd) -> None:
        self.send_body(msgspec.msgpack.encode(DetachClient(front_end.index, front_end.epoch)))

    def progress(self, slot: int = 0) -> Progress:
        reader = ProgressReader(self.process.pid, self.ready.progress_fd, slot)
        try:
            return reader.read()
        finally:
            reader.close()

    def stacks(self) -> str:
        """Its Python stack."""
        path = Path(f"/proc/{self.process.pid}/fd/{self.ready.stack_fd}")
        os.truncate(path, 0)
        os.kill(self.process.pid, self.ready.stack_signal)
        text: str = eventually(lambda: "in main" in (found := path.read_text()) and found)
        return text

    def stderr(self) -> str:
        """All that it wrote, once it has ended."""
        assert self.process.stderr is not None
        return self.process.communicate(timeout=BOUND)[1]

    def stop(self) -> int:
        """Asks it to end; its exit status."""
        self.process.terminate()
        return self.process.wait(BOUND)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        for front_end in self._front_ends:
            front_end.close()
        self._server.close()
        self._context.term()
        self.report.close()
