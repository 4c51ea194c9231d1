"""The blocking clients' side of a receiver: a queue."""

from __future__ import annotations

import queue
from collections.abc import Callable

from outboard.client.pending import PendingTable
from outboard.client.receiver import Receiver
from outboard.errors import EngineDeadError
from outboard.protocol.messages import EngineCoreOutputs, ErrorReport
from outboard.protocol.shm import SlotReader

__all__ = ["QueueReceiver"]


class QueueReceiver(Receiver):
    """Puts messages into a queue, and `None` behind the last.

    Args:
        outputs_queue: where they go.
        pending, epoch, on_dead, give_up, reader: as `Receiver`.
    """

    def __init__(
        self,
        outputs_queue: queue.Queue[EngineCoreOutputs | None],
        pending: PendingTable,
        epoch: int,
        engine: tuple[int, int, int],
        on_dead: Callable[[ErrorReport], None],
        give_up: Callable[[], None],
        reader: SlotReader | None = None,
    ) -> None:
        super().__init__(pending, epoch, engine, on_dead, give_up, reader)
        self._queue = outputs_queue

    def _deliver(self, message: EngineCoreOutputs) -> None:
        self._queue.put(message)

    def _deliver_end(self, cause: EngineDeadError) -> None:
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
            assert self.failure is not None  # it put the None there
            raise self.failure.copy()
        return message
