"""The busy loop's way out to one client."""

from __future__ import annotations

from collections.abc import Sequence

from outboard.protocol.codec import MsgpackEncoder, check_size
from outboard.protocol.messages import EngineCoreDead, EngineCoreOutputs
from outboard.protocol.shm_pair import SharedMemory
from outboard.protocol.tensors import Buffer
from outboard.transport.outputs import OutputSender

__all__ = ["SocketPort"]


class SocketPort:
    """Encoder and sender. What is encoded and not sent is encoded again later.

    Args:
        sender: to the client.
        encoder: for this client.
        memory: shared with it; closed with the port, so let the client's input be closed first.
        max_message_bytes: the client would drop a larger frame, and the connection.
    """

    def __init__(
        self, sender: OutputSender, encoder: MsgpackEncoder, memory: SharedMemory, max_message_bytes: int
    ) -> None:
        self._sender = sender
        self._encoder = encoder
        self._memory = memory
        self._max_message_bytes = max_message_bytes
        self._unsent: Buffer | None = None
        self.writable = sender.writable
        self.flush = sender.flush

    def encode(self, message: EngineCoreOutputs | EngineCoreDead) -> Sequence[Buffer]:
        if self._unsent is not None:
            self._encoder.give_back(self._unsent)
            self._unsent = None
        frames = self._encoder.encode(message)
        self._unsent = frames[0]
        if len(frames) > 1 or len(frames[0]) > self._max_message_bytes:
            check_size(frames, self._max_message_bytes)
        return frames

    def send(self, frames: Sequence[Buffer], more: bool = False) -> bool:
        if not self._sender.send(frames, more):
            return False
        self._unsent = None
        return True

    def close(self, linger_ms: int) -> None:
        self._sender.close(linger_ms)
        self._memory.close()
