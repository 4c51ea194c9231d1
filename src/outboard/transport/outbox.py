"""What a client sends to one engine core, in order, without ever blocking."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from outboard.protocol.tensors import Buffer
from outboard.transport.inputs import InputSender

__all__ = ["Outbox"]


class Outbox:
    """Sends, or holds what is not taken; so one stopped engine core delays no other.

    Args:
        sender: to the engine core.
        give_back: told of the body of each message that is not going to be sent, for the shared memory it refers to.

    Attributes:
        sent: messages that were taken.
    """

    def __init__(self, sender: InputSender, give_back: Callable[[Buffer], None] = lambda body: None) -> None:
        self._sender = sender
        self._send = sender.send
        self._give_back = give_back
        self._held: deque[tuple[int | None, Sequence[Buffer]]] = deque()
        self.sent = 0

    def __len__(self) -> int:
        """Messages held here because they were not taken."""
        return len(self._held)

    @property
    def in_use(self) -> list[tuple[object, Sequence[Buffer]]]:
        """(tracker, frames) of messages whose buffers are still in use: sent or held; see `InputSender.tracked`."""
        return [*self._sender.tracked, *((None, frames) for _, frames in self._held)]

    def send(self, frames: Sequence[Buffer], key: int | None = None) -> None:
        """Sends a message (type byte, body, auxiliary frames), or holds it behind those held already.

        Args:
            frames: auxiliary frames are not copied: they must not change before they have left.
            key: names the message for `take_back`.
        """
        if not self._held and self._send(frames):
            self.sent += 1
            return
        self._held.append((key, frames))
        if len(self._held) == 1:
            self._sender.call_when_writable(self._retry)

    def take_back(self, key: int) -> bool:
        """Removes a message that is still held here; False if it has been sent."""
        for position, (held_key, frames) in enumerate(self._held):
            if held_key == key:
                del self._held[position]
                self._give_back(frames[1])
                return True
        return False

    def clear(self) -> None:
        """Forgets what is held; the peer is gone."""
        self._held.clear()

    def _retry(self) -> None:
        while self._held:
            if not self._send(self._held[0][1]):
                self._sender.call_when_writable(self._retry)
                return
            self._held.popleft()
            self.sent += 1
