"""A client's connection to one incarnation of one engine core: epoch, sockets, shared memory, codecs."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from outboard.client.driver import Driver, Timer
from outboard.client.pending import PendingTable
from outboard.client.receiver import Counters, Listener, Receiver
from outboard.client.sender import Sender
from outboard.client.stall import StallWatch
from outboard.config import EngineConfig
from outboard.protocol.codec import MsgpackEncoder
from outboard.protocol.control import Attach, EngineStatus, identity_of
from outboard.protocol.shm_pair import SharedMemory
from outboard.transport.outbox import Outbox
from outboard.transport.reader import SocketReader
from outboard.transport.session import front_end_socket
from outboard.transport.sockets import ZmqContext, ZmqSocket, bind_output, remove_socket_file

__all__ = ["LONGEST", "QUIET", "Link"]

logger = logging.getLogger("outboard.client")

# What a dead engine core had sent may still be on its way: wait until its socket is quiet for 20 ms, at most 200 ms.
QUIET = 0.020
LONGEST = 0.200


class Link:
    """Made when an engine core is ready, of use once it has answered `Attach`, closed when it is dead.

    Args:
        status: of the engine core.
        slot: the client's place on progress pages.
        client_index: of the client.
        config: transport limits, and how long a stall is none.
        context, directory: for the output socket, whose file gets a name that is never used again: what a dead peer
            still holds for an old name must not reach a new socket.
        input_socket: the client's, shared by all links.
        pending, listener, counters: the client's.
        call_later: calls a function after a delay in the client's thread.

    Attributes:
        status: of the engine core when this was made.
        epoch: a random number that all messages carry, both ways.
        attached: whether the engine core has answered.
    """

    def __init__(
        self,
        status: EngineStatus,
        slot: int,
        client_index: int,
        config: EngineConfig,
        context: ZmqContext,
        directory: str,
        input_socket: ZmqSocket,
        pending: PendingTable,
        listener: Listener,
        counters: Counters,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        transport = config.transport
        self.status = status
        self.epoch = secrets.randbits(64)
        self.attached = False
        self._slot = slot
        self._stall_timeout = config.faults.stall_timeout
        self._pending = pending
        self._listener = listener
        self._counters = counters
        self._address = front_end_socket(directory, "out")
        self._socket = bind_output(context, self._address, transport)
        self._memory = SharedMemory.offer(transport.shared_memory_limit)
        encoder = MsgpackEncoder(transport.inline_bytes, transport.shared_memory_bytes, self._memory.pool)
        identity = identity_of(status.rank, status.incarnation)
        self.outbox = Outbox(input_socket, identity, call_later, encoder.give_back)
        self.sender = Sender(
            self.epoch,
            client_index,
            pending,
            encoder,
            self.outbox.send,
            self.outbox.take_back,
            transport.max_message_bytes,
            status.rank,
        )
        self.receiver = Receiver(pending, status.rank, self.epoch, listener, counters)
        self._reader = SocketReader(self._socket, self.receiver.on_message)
        self._driver: Driver | None = None
        self._timer: Timer | None = None
        self._deadline = 0.0
        self._done: Callable[[], None] | None = None
        self.stall: StallWatch | None = None

    def invitation(self, input_address: str) -> Attach:
        """What the launcher is asked to tell the engine core."""
        status = self.status
        return Attach(status.rank, status.incarnation, self.epoch, input_address, self._address, self._memory.address)

    def on_attached(self) -> None:
        """The engine core has connected; nothing has been sent to it yet."""
        assert self.status.pid is not None  # it is ready
        self._memory.attach(self.status.pid)
        self.receiver.set_reader(self._memory.reader)
        try:
            self.stall = StallWatch(self.status, self._slot, self._stall_timeout)
        except (OSError, ValueError) as error:  # it is dying just now, or hides its descriptors
            logger.info("engine core rank %d cannot be watched for stalls: %s", self.status.rank, error)
        self.attached = True

    def read_on(self, driver: Driver) -> None:
        """Takes messages from now on."""
        self._driver = driver
        self._reader.attach(driver)

    def end(self, done: Callable[[], None]) -> None:
        """The engine core has ended: takes what it had sent until its socket is quiet, then calls `done`, once."""
        self._done = done
        if self._driver is None:
            self.end_now()
            return
        self._deadline = self._driver.time() + LONGEST
        self._wait_for_quiet(self._driver)

    def end_now(self) -> None:
        """As `end`, with whatever is there now."""
        while not self.receiver.ended and self._reader.drain(1):
            pass
        done, self._done = self._done, None
        if done is not None:
            done()

    @property
    def usable(self) -> bool:
        """Whether requests may be sent."""
        return self.attached and self._done is None

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, as far as can be seen from here."""
        return self.stall is not None and self.stall.is_dead

    @property
    def ending(self) -> bool:
        """Whether the engine core has ended, and what it had sent is being taken."""
        return self._done is not None

    def close(self) -> None:
        """Ends the epoch: closes what is the link's own. Idempotent. Call it in the thread that reads."""
        self.receiver.end()
        if self._timer is not None:
            self._timer.cancel()
        self._reader.detach()
        self.outbox.clear()
        self._memory.close()
        if self.stall is not None:
            self.stall.close()
            self.stall = None

    def close_socket(self) -> None:
        """Closes the socket, which nobody may be using. Idempotent."""
        self._socket.close(linger=0)
        remove_socket_file(self._address)

    def _wait_for_quiet(self, driver: Driver) -> None:
        self._timer = driver.call_later(QUIET, self._look_again, driver, self._counters.received)

    def _look_again(self, driver: Driver, before: int) -> None:
        if self._counters.received != before and driver.time() < self._deadline:
            self._wait_for_quiet(driver)
        else:
            self.end_now()
