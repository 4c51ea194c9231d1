"""How a client reaches an engine core, and sees how it goes on: one on this host, or one on a node.

Nothing above this package knows which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from outboard.config import EngineConfig
from outboard.launch.nodes.stall import NewsStallWatch
from outboard.launch.stall import PageStallWatch
from outboard.protocol.control import EngineProgress, EngineStatus, StallReport, identity_of
from outboard.protocol.shm_pair import SharedMemory
from outboard.transport.inputs import InputSender, listen_for_inputs
from outboard.transport.outputs import OutputReader, listen_for_outputs
from outboard.transport.reader import OnMessage
from outboard.transport.sockets import ZmqContext
from outboard.transport.tcp import listen_by_tcp

__all__ = ["ChannelUse", "Reach", "StallWatch", "reach"]


class StallWatch(Protocol):
    """Judges one engine core, each time it is asked to."""

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, as far as can be seen from here."""
        ...

    def note(self, news: EngineProgress) -> None:
        """The launcher tells how it goes on."""
        ...

    def age(self, sent: int) -> float:
        """For how long it has made no progress that it should have made, seconds; 0 where all is well.

        Args:
            sent: messages that have been sent to it.
        """
        ...

    def progress(self) -> tuple[int, float]:
        """Steps that it has taken, and seconds since its last sign of life."""
        ...

    def ask_for_stack(self) -> None:
        """Has it dump its Python stack, where that can be; `report` finds it a moment later."""
        ...

    def report(self, sent: int) -> StallReport:
        """All that can be told of it."""
        ...

    def close(self) -> None:
        """Releases what it holds. Idempotent."""
        ...


class ChannelUse(NamedTuple):
    """What a client's ends of a data channel are made with.

    Attributes:
        context, directory: for the sockets.
        epoch: of the client and the engine core.
        call_later: calls a function after a delay in seconds, in the client's thread.
        on_message: see `OutputReader`.
        on_end: called if no more will come, perhaps once for each direction: with what is wrong, or with nothing where
            the other end was closed.
        on_drop: told the kind and the detail of what comes and is not the engine core's, or is no message.
    """

    context: ZmqContext
    directory: str
    epoch: int
    call_later: Callable[[float, Callable[[], None]], object]
    on_message: OnMessage
    on_end: Callable[[str], None]
    on_drop: Callable[[str, str], None]


class Reach(Protocol):
    """One engine core, as its clients reach it.

    Attributes:
        breaks_alone: whether a connection to it can break while both ends are well. The next incarnation has another.
        unexplained_end: what to say where its connection was closed, and nobody tells why.
    """

    breaks_alone: bool
    unexplained_end: str

    def offer_memory(self, limit: int) -> SharedMemory:
        """Memory to share with it, up to `limit` bytes each way; none where that cannot be."""
        ...

    def listen(self, use: ChannelUse) -> tuple[InputSender, OutputReader]:
        """A client's ends of both directions.

        Raises:
            ConfigError: there is no such network interface or address, or no key to listen with.
            OSError: a path cannot be used, no port is free, or no file descriptor is left.
        """
        ...

    def watch(self, slot: int, timeout: float) -> StallWatch:
        """A watch over it; `close` it.

        Args:
            slot: the client's place on progress pages.
            timeout: `FaultConfig.stall_timeout`, seconds.

        Raises:
            OSError, ValueError: it cannot be watched; it is dying just now, or hides its descriptors.
        """
        ...


class _Here:
    """An engine core on this host: Unix sockets or ZeroMQ's over them, shared memory, its progress page."""

    breaks_alone = False
    unexplained_end = "the engine core has closed its connection, and goes on"

    def __init__(self, status: EngineStatus, config: EngineConfig) -> None:
        self._status = status
        self._transport = config.transport

    def offer_memory(self, limit: int) -> SharedMemory:
        return SharedMemory.offer(limit)

    def listen(self, use: ChannelUse) -> tuple[InputSender, OutputReader]:
        transport, on_stranger = self._transport, partial(use.on_drop, "stranger")
        identity = identity_of(self._status.rank, self._status.incarnation)

        def on_outputs_end(wrong: str) -> None:
            if wrong:
                use.on_drop("broken connection", wrong)
                wrong = f"the engine core sent what is no message: {wrong}"
            use.on_end(wrong)

        outputs = listen_for_outputs(
            use.context, use.directory, use.epoch, transport, use.on_message, on_outputs_end, on_stranger
        )
        try:
            inputs = listen_for_inputs(
                use.context,
                use.directory,
                use.epoch,
                identity,
                transport,
                use.call_later,
                partial(use.on_end, ""),
                on_stranger,
            )
        except BaseException:
            outputs.close()
            raise
        return inputs, outputs

    def watch(self, slot: int, timeout: float) -> PageStallWatch:
        return PageStallWatch(self._status, slot, timeout)


class _OnNode:
    """An engine core on a node: encrypted TCP, what its node tells of it, and no memory to share."""

    breaks_alone = True

    def __init__(self, status: EngineStatus, config: EngineConfig) -> None:
        self._status = status
        self._config = config
        self.unexplained_end = (
            f"the connection to the engine core on node {status.node} has ended, and nobody tells why"
        )

    def offer_memory(self, limit: int) -> SharedMemory:
        return SharedMemory()

    def listen(self, use: ChannelUse) -> tuple[InputSender, OutputReader]:
        network, transport = self._config.network, self._config.transport
        assert network is not None  # or there would be no nodes
        identity = identity_of(self._status.rank, self._status.incarnation)
        return listen_by_tcp(use.context, network, transport, identity, use.call_later, use.on_message, use.on_end)

    def watch(self, slot: int, timeout: float) -> NewsStallWatch:
        return NewsStallWatch(self._status)


def reach(status: EngineStatus, config: EngineConfig) -> Reach:
    """How an engine core that is ready is reached."""
    return (_OnNode if status.node else _Here)(status, config)
