"""A client's connection to one incarnation of one engine core: epoch, sockets, shared memory, codecs."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from outboard.client.driver import Driver, Timer
from outboard.client.pending import PendingTable
from outboard.client.receiver import Counters, Listener, Receiver
from outboard.client.sender import Sender
from outboard.config import EngineConfig
from outboard.launch.reach import ChannelUse, StallWatch, reach
from outboard.protocol.codec import MsgpackEncoder
from outboard.protocol.control import Attach, EngineStatus
from outboard.transport.outbox import Outbox
from outboard.transport.sockets import ZmqContext

__all__ = ["LONGEST", "QUIET", "Link"]

logger = logging.getLogger("outboard.client")

# What a dead engine core had sent may still be on its way: wait until its socket is quiet for 20 ms, at most 200 ms.
QUIET = 0.020
LONGEST = 0.200
# An engine core closes its connection when it ends, which is told by others; if nobody tells, it is broken.
_END_TOLD = 5.0


class Link:
    """Made when an engine core is ready, of use once it has answered `Attach`, closed when it is dead.

    Args:
        status: of the engine core.
        slot: the client's place on progress pages.
        client_index: of the client.
        config: transport limits, and how long a stall is none.
        context, directory: for the sockets.
        pending, listener, counters: the client's.
        call_later: calls a function after a delay in the client's thread.

    Attributes:
        status: of the engine core when this was made.
        epoch: a random number that all messages carry, both ways.
        attached: whether the engine core has answered.
        left: whether the engine core has been told that it gets no more.
        inputs: the way to the engine core.
        outbox: what is sent by it.

    Raises:
        OSError: no file descriptor is left.
    """

    def __init__(
        self,
        status: EngineStatus,
        slot: int,
        client_index: int,
        config: EngineConfig,
        context: ZmqContext,
        directory: str,
        pending: PendingTable,
        listener: Listener,
        counters: Counters,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        transport = config.transport
        self.status = status
        self.epoch = secrets.randbits(64)
        self.attached = False
        self.left = False
        self._slot = slot
        self._stall_timeout = config.faults.stall_timeout
        self._pending = pending
        self._listener = listener
        self._counters = counters
        self._reach = reach(status, config)
        self._memory = self._reach.offer_memory(transport.shared_memory_limit)
        encoder = MsgpackEncoder(transport.inline_bytes, transport.shared_memory_bytes, self._memory.pool)
        self.receiver = Receiver(pending, status.rank, self.epoch, listener, counters)
        try:
            self.inputs, self._outputs = self._reach.listen(
                ChannelUse(
                    context, directory, self.epoch, call_later, self.receiver.on_message, self._on_end, counters.drop
                )
            )
        except BaseException:
            self._memory.close()
            raise
        self.outbox = Outbox(self.inputs, encoder.give_back)
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
        self._driver: Driver | None = None
        self._timer: Timer | None = None
        self._end_timer: Timer | None = None
        self._deadline = 0.0
        self._done: Callable[[], None] | None = None
        self.stall: StallWatch | None = None

    def invitation(self) -> Attach:
        """What the launcher is asked to tell the engine core."""
        status, inputs, outputs = self.status, self.inputs.address, self._outputs.address
        return Attach(status.rank, status.incarnation, self.epoch, inputs, outputs, self._memory.address)

    def on_attached(self) -> bool:
        """The engine core has connected; nothing has been sent to it yet. False if its connection is not there."""
        assert self.status.pid is not None  # it is ready
        try:
            connected = self._outputs.accept() and self.inputs.accept()
        except OSError as error:
            self.receiver.give_up(f"the engine core's connection cannot be taken: {error}")
            return False
        if not connected:
            self.receiver.give_up("the engine core said that it had connected, and had not")
            return False
        self._memory.attach(self.status.pid)
        self.receiver.set_reader(self._memory.reader)
        try:
            self.stall = self._reach.watch(self._slot, self._stall_timeout)
        except (OSError, ValueError) as error:  # it is dying just now, or hides its descriptors
            logger.info("engine core rank %d cannot be watched for stalls: %s", self.status.rank, error)
        self.attached = True
        return True

    def read_on(self, driver: Driver) -> None:
        """Takes messages, and sends, from now on."""
        self._driver = driver
        self._outputs.attach(driver)
        self.inputs.attach(driver)

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
        while not self.receiver.ended and self._outputs.drain(1):
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
    def breaks_alone(self) -> bool:
        """Whether its connection can break while both ends are well."""
        return self._reach.breaks_alone

    @property
    def ending(self) -> bool:
        """Whether the engine core has ended, and what it had sent is being taken."""
        return self._done is not None

    def close(self) -> None:
        """Ends the epoch: closes what is the link's own. Idempotent. Call it in the thread that reads."""
        self.receiver.end()
        for timer in (self._timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        self._outputs.stop()
        self.inputs.stop()
        self.outbox.clear()
        self._memory.close()
        if self.stall is not None:
            self.stall.close()
            self.stall = None

    def close_socket(self) -> None:
        """Closes the sockets, which nobody may be using. Idempotent."""
        self._outputs.close()
        self.inputs.close()

    def _on_end(self, wrong: str) -> None:
        if wrong:
            self.receiver.give_up(wrong)
        elif self._driver is not None and not self.ending and self._end_timer is None:
            self._end_timer = self._driver.call_later(_END_TOLD, self._end_not_told)

    def _end_not_told(self) -> None:
        if not self.ending and not self.receiver.ended:
            self.receiver.give_up(self._reach.unexplained_end)

    def _wait_for_quiet(self, driver: Driver) -> None:
        self._timer = driver.call_later(QUIET, self._look_again, driver, self._counters.received)

    def _look_again(self, driver: Driver, before: int) -> None:
        if self._counters.received != before and driver.time() < self._deadline:
            self._wait_for_quiet(driver)
        else:
            self.end_now()
