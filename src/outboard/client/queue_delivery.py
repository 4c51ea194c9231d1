"""The blocking clients' side of delivery: a queue."""

from __future__ import annotations

import queue

from outboard.client.delivery import Delivery
from outboard.errors import EngineDeadError
from outboard.protocol.messages import EngineCoreOutputs

__all__ = ["QueueDelivery"]


class QueueDelivery(Delivery):
    """Puts messages into a queue, and `None` behind the last.

    Args:
        outputs_queue: where they go.
    """

    def __init__(self, outputs_queue: queue.Queue[EngineCoreOutputs | None]) -> None:
        self._queue = outputs_queue
        self._cause: EngineDeadError | None = None

    def deliver(self, message: EngineCoreOutputs) -> None:
        self._queue.put(message)

    def end(self, cause: EngineDeadError) -> None:
        self._cause = cause
        self._queue.put(None)

    def next(self, timeout: float | None) -> EngineCoreOutputs:
        """The next message.

        Raises:
            TimeoutError: nothing came within `timeout` seconds.
            EngineDeadError: there will be no more.
        """
        try:
            message = self._queue.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no output within {timeout:g} s") from None
        if message is None:
            self._queue.put(None)  # for whoever asks next
            assert self._cause is not None  # it put the None there
            raise self._cause.copy()
        return message
