"""What a client hears of the coordinator, and what it tells it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf

import msgspec

from outboard.client.driver import Driver, Timer
from outboard.client.receiver import Counters
from outboard.dp.client_waves import ClientWaves
from outboard.dp.coordinator_state import Publication
from outboard.dp.messages import JoinAsFrontEnd
from outboard.dp.waves import FirstRequest
from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.control import CoordinatorAt
from outboard.protocol.tensors import Buffer
from outboard.transport.reader import SocketReader
from outboard.transport.sockets import ZmqContext, ZmqSocket
from outboard.transport.spoke import Spoke

__all__ = ["Coordination"]


class Coordination:
    """Follows the coordinator from one incarnation to the next. Belongs to the client's thread.

    Args:
        context: of the sockets.
        token: the session's secret.
        client_index: of the client.
        on_publication: gets what is published.
        counters: of messages.

    Attributes:
        waves: what is known of a lockstep group's wave.
        incarnation: of the coordinator; -1: there has been none.
    """

    def __init__(
        self,
        context: ZmqContext,
        token: str,
        client_index: int,
        on_publication: Callable[[Publication], object],
        counters: Counters,
    ) -> None:
        self._context = context
        self._hello = JoinAsFrontEnd(token, client_index)
        self._on_publication = on_publication
        self._counters = counters
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: MsgpackDecoder[Publication] = MsgpackDecoder(Publication)
        self._driver: Driver | None = None
        self._timer: Timer | None = None
        self._spoke: Spoke | None = None
        self._reader: SocketReader | None = None
        self.waves = ClientWaves()
        self.incarnation = -1

    @property
    def socket(self) -> ZmqSocket | None:
        """The socket to the coordinator."""
        return self._spoke.socket if self._spoke is not None else None

    def follow(self, place: CoordinatorAt) -> None:
        """The coordinator is there now."""
        if place.incarnation <= self.incarnation:
            return
        self._leave()
        self.incarnation = place.incarnation
        self._spoke = spoke = Spoke(self._context, place.address)
        self._reader = SocketReader(spoke.socket, self._on_message)
        spoke.send(self._encode(self._hello))
        if self._driver is not None:
            self._reader.attach(self._driver)

    def attach(self, driver: Driver) -> None:
        """Reads on, in `driver`'s thread."""
        self._driver = driver
        if self._reader is not None:
            self._reader.attach(driver)

    def request_sent(self) -> None:
        """A request has been sent to some rank; where the group rests, the coordinator is told, so that it wakes."""
        waves = self.waves
        if waves.group >= 0 and not waves.engines_running and waves.next_due == inf:
            self._tell(waves.request_sent(time.monotonic()))

    def detach(self) -> None:
        """Reads no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reader is not None:
            self._reader.detach()
        self._driver = None

    def close(self) -> None:
        """Closes the socket, which nobody may be using. Idempotent."""
        if self._spoke is not None:
            self._spoke.close()

    def _leave(self) -> None:
        if self._reader is not None:
            self._reader.detach()
        self.close()

    def _tell(self, notice: FirstRequest | None) -> None:
        if notice is not None and self._spoke is not None and self._reader is not None:
            self._spoke.send(self._encode(notice))
            self._reader.look_again()
        if self.waves.next_due < inf and self._timer is None and self._driver is not None:
            delay = max(0.0, self.waves.next_due - time.monotonic())
            self._timer = self._driver.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._tell(self.waves.due(time.monotonic()))

    def _on_message(self, body: Buffer, aux: Sequence[Buffer]) -> None:
        try:
            publication = self._decoder.decode(body, aux)
        except ProtocolError as error:
            self._counters.drop("undecodable publication", str(error))
            return
        self._on_publication(publication)
        if publication.wave is not None:
            self.waves.published(publication.version, publication.wave)
