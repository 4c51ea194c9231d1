"""The input thread: reads the control channel and what all clients send, decodes it, and hands it to the busy loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import msgspec

from outboard.config import TransportConfig
from outboard.dp.messages import ListenAsRank
from outboard.engine.coordination import CoordinatorEar
from outboard.engine.events import ClientJoined, ClientLeft, CoordinatorJoined, Writable
from outboard.engine.incoming import Drops, Incoming
from outboard.engine.mailbox import Mailbox
from outboard.engine.port import SocketPort
from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackDecoder, MsgpackEncoder
from outboard.protocol.control import (
    AttachClient,
    ClientAttached,
    CoordinatorAt,
    DetachClient,
)
from outboard.protocol.messages import Init
from outboard.protocol.progress import MAX_SLOTS
from outboard.protocol.scaling import (
    DrainRank,
    Quiesce,
    Reconfigure,
    ResumeRank,
)
from outboard.protocol.shm_pair import SharedMemory
from outboard.transport.inputs import InputReceiver, connect_inputs
from outboard.transport.outputs import connect_outputs
from outboard.transport.poller import SocketPoller
from outboard.transport.sockets import (
    ContextTerminated,
    ControlClient,
    ZmqContext,
    check_descriptors,
)

__all__ = ["InputThread"]

logger = logging.getLogger("outboard.engine")

# How many messages of one client are taken before others get their turn.
_MAX_MESSAGES = 64
# File descriptors that a client takes, two a socket and its shared memory, and some to spare.
_DESCRIPTORS = 8


@dataclass(slots=True, frozen=True)
class _Link:
    """One client's way in."""

    epoch: int
    receiver: InputReceiver


class InputThread(threading.Thread):
    """Lets clients come and go as the launcher says. Runs until the context is terminated.

    Args:
        context: of all sockets.
        control: the control channel; this thread's from now on, which closes it.
        inbox: the busy loop's queue.
        init: the limits of the sockets.
        session_token: to be shown to the launcher.
        mailbox: what the busy loop has to say to the launcher.
    """

    def __init__(
        self,
        context: ZmqContext,
        control: ControlClient,
        inbox: SimpleQueue[Any],
        init: Init,
        session_token: str,
        mailbox: Mailbox,
    ) -> None:
        super().__init__(name="outboard-input", daemon=True)
        self._context = context
        self._control = control
        self._inbox = inbox
        self._init = init
        self._limits = TransportConfig(high_water_mark=init.high_water_mark, max_message_bytes=init.max_message_bytes)
        self._token = session_token
        self._links: dict[int, _Link] = {}  # by client index
        self._drops = Drops()
        self._mailbox = mailbox
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(
            AttachClient | DetachClient | CoordinatorAt | Quiesce | Reconfigure | ResumeRank | DrainRank
        )
        who = ListenAsRank(session_token, init.rank, init.incarnation)
        self._coordinator = CoordinatorEar(context, who, inbox, self._drops)
        self._poller = SocketPoller()
        self._poller.add(control.fd, self._read_control)
        self._poller.add(mailbox.fd, self._send_mail)

    def run(self) -> None:
        try:
            while True:
                self._poller.turn()
        except ContextTerminated:  # the busy loop has ended
            self._close()

    def _close(self) -> None:
        for link in self._links.values():
            link.receiver.close()
        self._control.close()
        self._coordinator.close()
        while not self._inbox.empty():
            event = self._inbox.get_nowait()
            if isinstance(event, ClientJoined):  # a port that the busy loop never came to take
                event.port.close(0)
            elif isinstance(event, CoordinatorJoined):
                event.mouth.close()
        self._poller.close()

    # --- the control channel ---

    def _read_control(self) -> bool:
        while (frames := self._control.receive_now()) is not None:
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"{len(frames)} frames; a control message has one")
                message = self._decoder.decode(frames[0])
            except ProtocolError as error:
                self._drops.note("control", error)
                continue
            if isinstance(message, AttachClient):
                self._attach(message)
            elif isinstance(message, CoordinatorAt):
                self._follow(message)
            elif not isinstance(message, DetachClient):
                self._inbox.put(message)
            elif (link := self._links.get(message.client_index)) is not None and link.epoch == message.epoch:
                self._detach(message.client_index)
        return False

    def _send_mail(self) -> bool:
        for message in self._mailbox.take():
            self._control.send(msgspec.msgpack.encode(message))
        return self._read_control()  # sending may have taken the edge of what came

    def _follow(self, place: CoordinatorAt) -> None:
        earlier = self._coordinator.spoke
        spoke = self._coordinator.follow(place)
        if spoke is not None:
            if earlier is not None:
                self._poller.remove(earlier.fd)
                earlier.close()
            self._poller.add(spoke.fd, self._coordinator.read)

    def _attach(self, who: AttachClient) -> None:
        self._detach(who.client_index)
        refused = ""
        try:
            self._connect(who)
        except Exception as error:  # whatever it is, it must not end this thread
            refused = str(error)
            logger.warning("cannot serve client %d: %s", who.client_index, refused)
        # Only now, that its arrival is in the queue: whatever it sends comes behind that.
        answer = ClientAttached(self._token, who.client_index, who.epoch, refused)
        self._control.send(msgspec.msgpack.encode(answer))

    def _connect(self, who: AttachClient) -> None:
        if not 0 <= who.slot < MAX_SLOTS:
            raise ValueError(f"slot {who.slot} is not one of the {MAX_SLOTS} that there are")
        if any(link.epoch == who.epoch for link in self._links.values()):
            raise ValueError(f"another client has epoch {who.epoch:x}")
        check_descriptors(_DESCRIPTORS, "an engine core's client")
        init = self._init
        memory = SharedMemory.join(who.arena)
        receiver = connect_inputs(self._context, who.input_address, who.epoch, who.identity, self._limits)
        try:
            sender = connect_outputs(
                self._context, who.output_address, who.epoch, self._limits, self._poller, self._tell_writable
            )
        except BaseException:
            receiver.close()
            raise
        encoder = MsgpackEncoder(init.inline_bytes, init.shared_memory_bytes, memory.pool)
        port = SocketPort(sender, encoder, memory, init.max_message_bytes)
        self._inbox.put(ClientJoined(who.epoch, who.slot, port, who.client_index))
        self._links[who.client_index] = _Link(who.epoch, receiver)
        self._poller.add(receiver.fd, self._reader(who.epoch, receiver, Incoming(who.epoch, memory.reader)))

    def _tell_writable(self) -> None:
        self._inbox.put(Writable())

    def _detach(self, client_index: int) -> None:
        link = self._links.pop(client_index, None)
        if link is not None:
            if not link.receiver.ended:
                self._poller.remove(link.receiver.fd)
            link.receiver.close()
            self._inbox.put(ClientLeft(link.epoch))

    # --- what clients send ---

    def _reader(self, epoch: int, receiver: InputReceiver, incoming: Incoming) -> Callable[[], bool]:
        put, receive, pending, decode = self._inbox.put, receiver.receive, receiver.pending, incoming.decode

        def read() -> bool:
            items: list[Any] = []
            try:
                for _ in range(_MAX_MESSAGES):
                    frames = receive()
                    if frames is None:
                        break
                    items.append(decode(frames))
                    if not pending():
                        break
                else:
                    return True
            except ProtocolError as error:
                self._drops.note("broken connection", error)
            finally:
                if items:  # the busy loop is woken once for all of them
                    put((epoch, items))
            if receiver.ended:  # the client is gone, which the launcher tells, or finds its connection closed
                self._poller.remove(receiver.fd)
                receiver.close()
            return False

        return read
