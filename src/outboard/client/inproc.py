"""`InprocClient`: the engine in this process, for debugging and small tools."""

from __future__ import annotations

import concurrent.futures
import os
import queue
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from outboard.client.base import CoreEngine
from outboard.client.pending import PendingTable
from outboard.client.queue_delivery import QueueDelivery
from outboard.client.receiver import Counters, Receiver
from outboard.client.sender import Sender
from outboard.client.sync_client import Outbound, SyncClient
from outboard.config import EngineConfig
from outboard.engine.calls import has_typed_result
from outboard.engine.core import EngineCore, utility_methods
from outboard.engine.events import ClientJoined, Stop
from outboard.engine.incoming import Incoming
from outboard.engine.loader import bind_options, load_engine_class
from outboard.engine.loop import BusyLoop
from outboard.engine.outgoing import error_report
from outboard.engines.registry import resolve_engine
from outboard.errors import ClientClosedError, ConfigError, EngineDeadError, EngineStartupError
from outboard.protocol.codec import MsgpackEncoder
from outboard.protocol.messages import EngineCoreOutputs, ErrorReport, SchedulerStats
from outboard.protocol.progress import ProgressPage
from outboard.protocol.tensors import Buffer

__all__ = ["InprocClient"]


class InprocClient(SyncClient):
    """Runs the engine in this process: `get_output` and utility calls step it.

    Nothing isolates it: an engine that crashes takes this process along. Messages are encoded and decoded as if they
    crossed to another process, so that what works here works there.

    Args:
        config: what to run; a bare engine name, reference or class stands for `EngineConfig(engine=...)`.

    Raises:
        ConfigError: the engine, an option or a model file is wrong; a subclass says which.
        EngineStartupError: the engine's constructor raised; that exception is the cause.
    """

    def __init__(self, config: EngineConfig | str | type[Any]) -> None:
        super().__init__()
        self.config = config if isinstance(config, EngineConfig) else EngineConfig(engine=config)
        self.client_index = 0
        self._engine = _construct(self.config)
        self._epoch = epoch = secrets.randbits(64)
        encoder = MsgpackEncoder(self.config.transport.inline_bytes)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._incoming = Incoming(epoch)
        self._port = _Port(encoder)
        self._loop = BusyLoop(self._engine, self._inbox, ProgressPage(shared=False))
        self._inbox.put(ClientJoined(epoch, 0, self._port))
        self._pending = PendingTable()
        self._sender = Sender(
            epoch, 0, self._pending, encoder, self._post, lambda handle: False, self.config.transport.max_message_bytes
        )
        self.outputs_queue: queue.Queue[EngineCoreOutputs | None] = queue.Queue()
        self._failure: EngineDeadError | None = None
        self._delivery = _Delivery(self.outputs_queue)
        self._counters = Counters()
        self._receiver = Receiver(self._pending, 0, epoch, self._delivery, self._counters)
        typed = [name for name in utility_methods(self._engine) if has_typed_result(getattr(self._engine, name))]
        self.core_engines = [CoreEngine(0, 0, b"", os.getpid(), self._engine.info(), frozenset(typed))]

    @property
    def _outbound(self) -> Outbound:
        return self._sender

    def validate_alive(self) -> None:
        if self._failure is not None:
            raise self._failure.copy()

    @property
    def scheduler_stats(self) -> SchedulerStats:
        return self._receiver.scheduler_stats

    def stats(self) -> dict[str, Any]:
        """Counters: messages received, messages dropped by reason, requests and utility calls in flight."""
        return {
            "received": self._counters.received,
            "dropped": dict(self._counters.dropped),
            "requests": len(self._pending.request_ids),
            "utility_calls": len(self._pending.utility_results),
        }

    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        """Steps the engine until it has something to say; the message.

        With no request in flight there is nothing to wait for: the message is then empty, as in vLLM.

        Args, raises: as `SyncClient.get_output`.
        """
        deadline = _deadline(timeout)
        with self._lock:
            while self.outputs_queue.empty() and self._failure is None:
                if not self._pending.request_ids and not self._port.frames:
                    return EngineCoreOutputs(0, 0, 0, time.monotonic())
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._turn(left)
            return self._delivery.next(timeout=0)

    def shutdown(self, timeout: float | None = None) -> None:
        """Aborts what runs and frees the engine. Idempotent. A step that blocks cannot be interrupted."""
        with self._lock:
            if isinstance(self._failure, ClientClosedError):
                return
            if self._failure is None:
                self._inbox.put(Stop())
                self._turn(0)
            engine = self.core_engines[0]
            self._fail(ClientClosedError("the client was shut down", rank=0, pid=engine.pid, phase="stopping"))
            self._engine.shutdown()

    def _wait_for(self, future: concurrent.futures.Future[Any], timeout: float | None) -> Any:
        deadline = _deadline(timeout)
        with self._lock:
            while not future.done():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._turn(left)
        return future.result(timeout=0)

    def _post(self, frames: Sequence[Buffer], key: int | None) -> None:
        self._inbox.put((self._epoch, [self._incoming.decode(frames)]))

    def _fail(self, cause: EngineDeadError) -> None:
        self._failure = cause
        self._receiver.end()
        self._pending.fail_all(cause)
        self._delivery.end(cause)

    def _turn(self, timeout: float | None) -> None:
        try:
            self._loop.turn(timeout)
        except Exception as error:
            report = error_report(error)
            failure = EngineDeadError(
                f"Engine core rank 0 (in this process) died while running: {report.type}: {report.message}.",
                pid=os.getpid(),
                remote_type=report.type,
                remote_message=report.message,
                remote_traceback=report.traceback,
            )
            failure.__cause__ = error
            self._fail(failure)
        while self._port.frames:
            body, *aux = self._port.frames.popleft()
            self._receiver.on_message(body, aux)


class _Delivery(QueueDelivery):
    """The queue; an engine in this process tells of its end by an exception, and nothing it sends gets lost."""

    def on_engine_dead(self, rank: int, report: ErrorReport) -> None:
        raise AssertionError("an engine in this process sends no ENGINE_CORE_DEAD")

    def on_broken(self, rank: int, reason: str) -> None:
        self.end(EngineDeadError(reason, rank=rank, pid=os.getpid()))

    def on_notification(self, payload: tuple[str, int]) -> bool:
        return False


class _Port:
    """Where the busy loop's outputs leave: a queue."""

    def __init__(self, encoder: MsgpackEncoder) -> None:
        self.encode = encoder.encode
        self.frames: deque[Sequence[Buffer]] = deque()

    def writable(self) -> bool:
        return True

    def send(self, frames: Sequence[Buffer], more: bool = False) -> bool:
        self.frames.append(frames)
        return True

    def flush(self) -> bool:
        return True

    def close(self, linger_ms: int) -> None:
        pass


def _construct(config: EngineConfig) -> EngineCore:
    engine_class = load_engine_class(resolve_engine(config.engine))
    options = bind_options(engine_class, config.options)
    try:
        return engine_class(**options)
    except ConfigError:
        raise
    except Exception as error:
        report = error_report(error)
        raise EngineStartupError(
            f"Engine core rank 0 (in this process) died during start-up: {report.type}: {report.message}.",
            pid=os.getpid(),
            phase="start-up",
            remote_type=report.type,
            remote_message=report.message,
            remote_traceback=report.traceback,
        ) from error


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
