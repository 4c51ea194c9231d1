"""`SyncMPClient`: drives an engine core in another process without asyncio."""

from __future__ import annotations

import concurrent.futures
import queue
from collections.abc import Sequence
from typing import Any

from outboard.client.base import MPClient
from outboard.client.delivery import Delivery
from outboard.client.queue_delivery import QueueDelivery
from outboard.client.sync_client import Outbound, SyncClient
from outboard.client.thread_loop import ThreadLoop
from outboard.config import EngineConfig
from outboard.launch.group import EngineAddresses
from outboard.protocol.messages import EngineCoreOutputs

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
        self,
        config: EngineConfig | str | type[Any] | None = None,
        *,
        addresses: EngineAddresses | None = None,
        client_index: int = 0,
        cancel_fd: int | None = None,
    ) -> None:
        SyncClient.__init__(self)
        self.outputs_queue: queue.Queue[EngineCoreOutputs | None] = queue.Queue()
        MPClient.__init__(self, config, addresses=addresses, client_index=client_index, cancel_fd=cancel_fd)
        self._loop = ThreadLoop(self._lock)
        self._resources.stop_thread = self._loop.stop
        with self._lock:
            self._membership.attach(self._loop)

    def _make_delivery(self) -> Delivery:
        self._delivery = QueueDelivery(self.outputs_queue)
        return self._delivery

    @property
    def _outbound(self) -> Outbound:
        return self._membership.traffic

    @property
    def pending_messages(self) -> Sequence[tuple[Any, Any]]:
        with self._lock:  # the thread sends what is held
            return super().pending_messages

    def get_output(self, timeout: float | None = None) -> EngineCoreOutputs:
        """The next message with outputs or scheduler stats; waits for it.

        Args, raises: as `SyncClient.get_output`.
        """
        return self._delivery.next(timeout)

    def _wait_for(self, future: concurrent.futures.Future[Any], timeout: float | None) -> Any:
        return future.result(timeout)

    def _stop_reading(self) -> None:
        with self._lock:
            self._membership.fail(self._closed_error())
        self._loop.stop()
        self._loop.join(_JOIN_TIMEOUT)
        with self._lock:
            self._membership.stop_reading()
