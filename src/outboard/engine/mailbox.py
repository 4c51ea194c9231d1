"""What the busy loop has to say to the launcher: the input thread, whose socket the control channel is, sends it."""

from __future__ import annotations

import os
from queue import SimpleQueue
from typing import Any

__all__ = ["Mailbox"]


class Mailbox:
    """Filled by one thread, emptied by another.

    Attributes:
        fd: readable while something may be there.
    """

    def __init__(self) -> None:
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def put(self, message: Any) -> None:
        """Has a message sent."""
        self._messages.put(message)
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[Any]:
        """All that is there."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        messages = []
        while not self._messages.empty():
            messages.append(self._messages.get_nowait())
        return messages
