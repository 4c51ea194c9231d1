"""A busy loop with a small engine, ports that refuse on command, and no process.

The inbox never blocks: where the loop would sleep until something arrives, it raises `Asleep`; where it would wait for
a time, it notes how long and goes on at once.
"""

from __future__ import annotations

import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from outboard import EngineCore, EngineCoreRequest, OutputBatch, utility
from outboard.engine.events import ClientJoined, ClientLeft
from outboard.engine.loop import BusyLoop
from outboard.protocol.codec import MsgpackDecoder, MsgpackEncoder
from outboard.protocol.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreDead,
    EngineCoreOutputs,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
)
from outboard.protocol.progress import Progress, ProgressPage, ProgressReader
from outboard.protocol.sampling import SamplingParams

__all__ = ["EPOCH", "RANK", "Asleep", "Core", "Engine", "Inbox", "Peer", "Port"]

EPOCH = 0xABC
RANK = 3


class Asleep(Exception):
    """The loop has nothing to do and would sleep until something arrives."""


class Inbox(SimpleQueue):  # type: ignore[type-arg]
    """Notes for how long the loop would have waited."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self.empty():
            return super().get_nowait()
        if timeout is None:
            raise Asleep
        self.waits.append(timeout)
        raise Empty


class Port:
    """Keeps what is sent, as a client decodes it.

    Attributes:
        open: whether it takes anything.
        refuse_sends: how many messages `send` refuses although `writable` said yes.
        unfinished: how often `flush` must be called until all has left.
    """

    def __init__(self) -> None:
        self.messages: list[EngineCoreOutputs] = []
        self.dead: list[EngineCoreDead] = []
        self.open = True
        self.lingers: list[int] = []  # one entry a close
        self.more: list[bool] = []  # of each message: whether another follows at once
        self.refuse_sends = 0
        self.unfinished = 0
        self.encoded = 0
        self.asked = 0
        self._encode = MsgpackEncoder(inline_bytes=64).encode
        self._decoder: MsgpackDecoder[EngineCoreOutputs | EngineCoreDead] = MsgpackDecoder(
            EngineCoreOutputs | EngineCoreDead
        )

    def encode(self, message: EngineCoreOutputs | EngineCoreDead) -> Sequence[Any]:
        assert not self.lingers, "used after its end"
        self.encoded += 1
        return self._encode(message)

    def writable(self) -> bool:
        self.asked += 1
        return self.open

    def send(self, frames: Sequence[Any], more: bool = False) -> bool:
        if self.refuse_sends or not self.open:
            self.refuse_sends = max(0, self.refuse_sends - 1)
            return False
        message = self._decoder.decode(frames[0], frames[1:])
        if isinstance(message, EngineCoreDead):
            self.dead.append(message)
        else:
            self.messages.append(message)
        self.more.append(more)
        return True

    def flush(self) -> bool:
        self.unfinished = max(0, self.unfinished - 1)
        return not self.unfinished

    def close(self, linger_ms: int) -> None:
        self.lingers.append(linger_ms)


class Engine(EngineCore):
    """Returns each request's prompt, one token a step, then stops; `sampling_params.seed` counts as stop reason."""

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}
        self.events: list[Any] = []
        self.refuse: Exception | None = None
        self.on_step: Callable[[OutputBatch], None] | None = None
        self.stats: SchedulerStats | None = None
        self.futures: list[Future[Any]] = []
        self.on_look: Callable[[], Any] = lambda: None

    def add_request(self, request: EngineCoreRequest) -> None:
        self.events.append(("add", request.external_req_id))
        if self.refuse is not None:
            raise self.refuse
        assert request.request_id not in self.requests
        assert isinstance(request.prompt_token_ids, array)
        self.requests[request.request_id] = list(request.prompt_token_ids)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.events.append(("abort", len(request_ids)))
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self, outputs: OutputBatch) -> None:
        self.events.append("step")
        if self.on_step is not None:
            self.on_step(outputs)
        outputs.extend(list(self.requests), [tokens.pop(0) for tokens in self.requests.values()])
        for request_id in [request_id for request_id, tokens in self.requests.items() if not tokens]:
            del self.requests[request_id]
            outputs.add(request_id, finish_reason="stop", stop_reason=1)

    def scheduler_stats(self) -> SchedulerStats | None:
        return self.stats

    @utility
    def echo(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append(("echo", *args))
        return [list(args), kwargs]

    @utility
    def look(self) -> None:
        self.events.append(self.on_look())

    @utility
    def boom(self) -> None:
        raise self.refuse or LookupError("no such thing")

    @utility
    def later(self) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]

    @utility
    def set_stats(self, waiting: int) -> None:
        self.stats = SchedulerStats(waiting=waiting)

    @utility
    def unsendable(self) -> Any:
        return {"deep": object()}

    def secret(self) -> None:
        raise AssertionError("called from outside")


class Peer:
    """A client of a core: what it says, and what it is told.

    Attributes:
        epoch, slot: of this client.
        port: where the loop sends.
    """

    def __init__(self, inbox: Inbox, epoch: int = EPOCH, slot: int = 0) -> None:
        self.inbox = inbox
        self.epoch = epoch
        self.slot = slot
        self.port = Port()
        inbox.put(ClientJoined(epoch, slot, self.port))

    def send(self, item: Any) -> None:
        self.inbox.put((self.epoch, [item]))

    def add(self, handle: int, tokens: Sequence[int] = (1, 2, 3), request_id: str = "") -> None:
        prompt = array("i", tokens).tobytes()
        self.send(AddRequest(self.epoch, handle, request_id or f"r{handle}", prompt, SamplingParams()))

    def abort(self, *handles: int) -> None:
        self.send(AbortRequests(self.epoch, list(handles)))

    def call(self, call_id: int, method: str, *args: Any, **kwargs: Any) -> None:
        self.send(UtilityCall(self.epoch, call_id, method, list(args), kwargs))

    def leave(self) -> None:
        self.inbox.put(ClientLeft(self.epoch))

    # --- what it sees ---

    def sent(self) -> dict[int, list[Any]]:
        """All that was sent, by handle: tokens, and at the end the finish reason. Checks the messages."""
        found: dict[int, list[Any]] = defaultdict(list)
        for number, message in enumerate(self.port.messages):
            assert (message.sequence, message.epoch, message.engine_index) == (number, self.epoch, RANK)
            message.request_ids = [str(handle) for handle in message.handles]
            for output in message.outputs:
                handle = int(output.request_id)
                assert not (found[handle] and isinstance(found[handle][-1], str)), "an output behind the end"
                found[handle] += output.new_token_ids
                if output.finish_reason is not None:
                    found[handle].append(output.finish_reason)
        return dict(found)

    def answers(self) -> list[UtilityOutput]:
        return [message.utility_output for message in self.port.messages if message.utility_output is not None]

    def errors(self) -> dict[int, str]:
        return {
            message.handles[position]: text
            for message in self.port.messages
            if message.extras is not None
            for position, text in message.extras.errors.items()
        }

    def stats(self) -> list[SchedulerStats]:
        return [message.scheduler_stats for message in self.port.messages if message.scheduler_stats is not None]


class Core(Peer):
    """A loop with all that belongs to it, and its first client."""

    def __init__(self) -> None:
        super().__init__(Inbox())
        self.engine = Engine()
        self.page = ProgressPage()
        self.told: list[Any] = []  # what the launcher was told
        self.loop = BusyLoop(self.engine, self.inbox, self.page, rank=RANK, say=self.told.append, token="secret")
        self.loop.turn()  # takes the client in

    def join(self, epoch: int = 0xDEF, slot: int = 1) -> Peer:
        return Peer(self.inbox, epoch, slot)

    def settle(self, limit: int = 200) -> None:
        """Turns until the loop would sleep."""
        for _ in range(limit):
            try:
                self.loop.turn()
            except Asleep:
                return
        raise AssertionError("the loop does not come to rest")

    def progress(self, slot: int = 0) -> Progress:
        """What a front end reads on the page."""
        reader = ProgressReader(os.getpid(), self.page.fd, slot)
        try:
            return reader.read()
        finally:
            reader.close()
