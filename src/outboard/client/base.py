"""What all clients have in common, and what those with an engine core in another process share: start and end."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from outboard.client.connect import CoreEngine, connect
from outboard.client.pending import CallFuture, PendingTable
from outboard.client.receiver import Receiver
from outboard.client.sender import Sender
from outboard.config import EngineConfig
from outboard.engine.calls import convert, return_type
from outboard.engine.core import EngineCore
from outboard.engine.loader import load_engine_class
from outboard.engines.registry import resolve_engine
from outboard.errors import ClientClosedError, ConfigError, UtilityError
from outboard.protocol.codec import MsgpackEncoder
from outboard.protocol.messages import EngineInfo, SchedulerStats
from outboard.transport.outbox import Outbox

__all__ = ["CoreEngine", "EngineCoreClient", "MPClient"]

logger = logging.getLogger("outboard.client")


class EngineCoreClient(ABC):
    """Drives an engine core; the kinds differ in where it runs and in how one waits for it.

    Attributes:
        config: the whole configuration.
        client_index: index of this front end.
        core_engines: the engine cores.
    """

    config: EngineConfig
    client_index: int
    core_engines: list[CoreEngine]
    _pending: PendingTable
    _sender: Sender
    _receiver: Receiver

    @staticmethod
    def make_client(
        multiprocess_mode: bool, asyncio_mode: bool, config: EngineConfig | str | type[Any]
    ) -> EngineCoreClient:
        """The kind of client that fits: `InprocClient`, `SyncMPClient` or `AsyncMPClient`.

        Raises:
            ConfigError: asyncio without a process of its own for the engine: steps would block the event loop.
        """
        from outboard.client.async_mp import AsyncMPClient
        from outboard.client.inproc import InprocClient
        from outboard.client.sync_mp import SyncMPClient

        if multiprocess_mode:
            return AsyncMPClient(config) if asyncio_mode else SyncMPClient(config)
        if asyncio_mode:
            raise ConfigError("asyncio_mode needs multiprocess_mode: in one process, steps would block the event loop")
        return InprocClient(config)

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Stops the engine core and frees everything. Idempotent and bounded.

        Args:
            timeout: seconds that the engine core gets to stop by itself; default `FaultConfig.shutdown_timeout`.
        """

    def validate_alive(self) -> None:
        """Raises `EngineDeadError`, an instance of its own, if the engine core is gone."""
        if self._receiver.failure is not None:
            raise self._receiver.failure.copy()

    @property
    def engine_info(self) -> EngineInfo:
        """What the engine core reported of itself when it was ready."""
        return self.core_engines[0].info

    @property
    def scheduler_stats(self) -> SchedulerStats:
        """The latest load that the engine core reported."""
        return self._receiver.scheduler_stats

    @property
    def utility_results(self) -> dict[int, CallFuture]:
        """Utility calls that wait: call id -> future."""
        return self._pending.utility_results

    def stats(self) -> dict[str, Any]:
        """Counters: messages received, messages dropped by reason, requests and utility calls in flight."""
        return {
            "received": self._receiver.received,
            "dropped": dict(self._receiver.dropped),
            "requests": len(self._pending.request_ids),
            "utility_calls": len(self._pending.utility_results),
        }

    @functools.cached_property
    def _engine_class(self) -> type[EngineCore] | None:
        """The engine's class, for the annotations of its utilities; None where it cannot be imported here."""
        try:
            return load_engine_class(resolve_engine(self.config.engine))
        except Exception:
            logger.info("the engine's class cannot be imported here: results keep their wire types", exc_info=True)
            return None

    def _check_rank(self, rank: int | None) -> None:
        ranks = [engine.rank for engine in self.core_engines]
        if rank is not None and rank not in ranks:
            raise ValueError(f"no engine core of rank {rank}; there is rank {', '.join(map(str, ranks))}")

    def _typed(self, method: str, result: Any) -> Any:
        """A utility call's result as the type that the method's annotation names."""
        if method not in self.core_engines[0].typed_utilities or self._engine_class is None:
            return result
        try:
            return convert(result, return_type(getattr(self._engine_class, method)))
        except msgspec.ValidationError as error:
            raise UtilityError(f"the result of {method!r} is not what its annotation says: {error}") from error


class MPClient(EngineCoreClient):
    """A client whose engine core runs in a process of its own, which it starts and owns.

    The constructor blocks until the engine core is ready.

    Args:
        config: what to run; a bare engine name, reference or class stands for `EngineConfig(engine=...)`.
        client_index: index of this front end.
        cancel_fd: a file descriptor that becomes readable when start-up is to be given up.

    Raises:
        ConfigError: the engine, an option or a model file is wrong; a subclass says which.
        EngineStartupError: the engine core died or failed before it was ready, or was too slow
            (`EngineStartupTimeout`); says how and why. Whatever had been started is gone.

    """

    def __init__(
        self, config: EngineConfig | str | type[Any], *, client_index: int = 0, cancel_fd: int | None = None
    ) -> None:
        self.config = config if isinstance(config, EngineConfig) else EngineConfig(engine=config)
        self.client_index = client_index
        self._epoch = secrets.randbits(64)
        self._resources, self._input_socket, self._output_socket, engine = connect(
            self.config, client_index, self._epoch, cancel_fd
        )
        self.core_engines = [engine]
        self._pending = PendingTable()
        resources, transport = self._resources, self.config.transport
        encoder = MsgpackEncoder(transport.inline_bytes, transport.shared_memory_bytes, resources.memory.pool)
        self._outbox = resources.outbox = Outbox(
            self._input_socket, engine.identity, resources.call_later, encoder.give_back
        )
        self._sender = Sender(
            self._epoch,
            client_index,
            self._pending,
            encoder,
            self._outbox.send,
            self._outbox.take_back,
            self.config.transport.max_message_bytes,
        )
        self._shutdown_lock = threading.Lock()
        self._closed = False
        # The finalizer must not reach the client, or it would never run.
        self._finalizer = weakref.finalize(self, self._resources.abandon)

    @property
    def pending_messages(self) -> Sequence[tuple[Any, Any]]:
        """(tracker, frames) of messages whose buffers ZeroMQ has not let go of."""
        self._outbox.free_sent()
        return self._outbox.tracked

    def stats(self) -> dict[str, Any]:
        """Counters: messages received, messages dropped by reason, requests and utility calls in flight, messages held
        in the outbox."""
        return {**super().stats(), "outbox": len(self._outbox)}

    def shutdown(self, timeout: float | None = None) -> None:
        """Stops the engine core and frees everything: process, sockets, files.

        Idempotent; bounded by `timeout` and a moment to kill; callable from any thread, also after the event loop has
        closed. Whatever still waits ends with `ClientClosedError`. Blocks: on an event loop, prefer a thread
        (`await asyncio.to_thread(client.shutdown)`).

        Args:
            timeout: seconds that the engine core gets to stop by itself before it is killed; default
                `FaultConfig.shutdown_timeout`. 0 kills it, also while another call waits for it to stop.
        """
        if os.getpid() != self._resources.creator:
            return  # a forked copy owns nothing
        # Before the lock: who holds it may be waiting for the loop that calls this.
        self._stop_reading()
        if timeout == 0 and not self._closed:
            self._resources.process.kill()  # before the lock, too: who holds it may have more patience
        with self._shutdown_lock:
            if self._closed:
                return
            # An interrupt in here, such as Ctrl-C, leaves all that is needed to call again.
            self._resources.close(self.config.faults.shutdown_timeout if timeout is None else timeout)
            self._finalizer.detach()
            self._closed = True

    @abstractmethod
    def _stop_reading(self) -> None:
        """Ends what waits, and takes the sockets out of use; called by `shutdown`, in its thread."""

    def _closed_error(self) -> ClientClosedError:
        engine = self.core_engines[0]
        return ClientClosedError("the client was shut down", rank=engine.rank, pid=engine.pid, phase="stopping")
