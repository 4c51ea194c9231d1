"""`SyncMPClient`: drives an engine core in another process without asyncio."""

from __future__ import annotations

import concurrent.futures
import queue
from typing import Any

from outboard.client.base import MPClient
from outboard.client.output_thread import OutputThread
from outboard.client.queue_receiver import QueueReceiver
from outboard.client.sync_client import SyncClient
from outboard.config import EngineConfig
from outboard.protocol.messages import EngineCoreOutputs
from outboard.transport.reader import SocketReader

__all__ = ["SyncMPClient"]

_JOIN_TIMEOUT = 5.0  # seconds for the thread to end; it waits for nothing


class SyncMPClient(SyncClient, MPClient):
    """Drives an engine core in a process of its own by calls that block; a daemon thread reads its outputs.

    Its methods may be called from several threads. After an engine's death every call raises `EngineDeadError`, for
    ever.

    Args, raises: as `MPClient`.

    Attributes:
        outputs_queue: messages that `get_output` will return.
    """

    def __init__(
        self, config: EngineConfig | str | type[Any], *, client_index: int = 0, cancel_fd: int | None = None
    ) -> None:
        SyncClient.__init__(self)
        MPClient.__init__(self, config, client_index=client_index, cancel_fd=cancel_fd)
        resources = self._resources
        engine = self.core_engines[0]
        self.outputs_queue: queue.Queue[EngineCoreOutputs | None] = queue.Queue()
        self._receiver: QueueReceiver = QueueReceiver(
            self.outputs_queue,
            self._pending,
            self._epoch,
            (engine.rank, engine.incarnation, engine.pid),
            resources.on_engine_dead,
            resources.process.kill,
            resources.memory.reader,
        )
        reader = SocketReader(self._output_socket, self._receiver.on_message)
        self._thread = OutputThread(
            self._output_socket, reader, self._receiver, self._lock, resources.process, engine.rank, engine.incarnation
        )
        resources.timer = self._thread.call_later
        resources.stop_thread = self._thread.stop
        resources.on_dead = self._thread.on_dead
        self._thread.start()

    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        """The next message with outputs or scheduler stats; waits for it.

        Args, raises: as `SyncClient.get_output`.
        """
        return self._receiver.next(timeout)

    def _wait_for(self, future: concurrent.futures.Future[Any], timeout: float | None) -> Any:
        return future.result(timeout)

    def _stop_reading(self) -> None:
        with self._lock:
            self._receiver.fail(self._closed_error())
        self._thread.stop()
        self._thread.join(_JOIN_TIMEOUT)
        self._resources.stop_reading()
