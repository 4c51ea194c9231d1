"""The launcher's desk: what comes in over the control channel, and what goes out to front ends.

It routes the handshakes, lets front ends join, introduces them to engine cores, publishes states, and hears what front
ends have to say of engine cores. No thread, no waiting; its launcher calls it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from outboard.config import FaultConfig
from outboard.errors import EngineDeadError, ProtocolError
from outboard.launch.coordinator import CoordinatorKeeper
from outboard.launch.frontends import FrontEnd, FrontEnds
from outboard.launch.rank import EngineRank
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.control import (
    Acknowledge,
    Attach,
    AttachClient,
    Attached,
    ClientAttached,
    CoordinatorReady,
    CoordinatorRefused,
    DetachClient,
    EngineDeath,
    EngineProgress,
    EngineState,
    EngineStatus,
    Join,
    KillEngine,
    Leave,
    ReportProgress,
    ReportStall,
    Welcome,
    identity_of,
)
from outboard.protocol.messages import Failed, Hello, Ready, Refused
from outboard.protocol.nodes import RankProgress
from outboard.protocol.scaling import (
    AbortScale,
    CommitScale,
    Drained,
    Members,
    Quiet,
    Reconfigured,
    Scale,
)
from outboard.transport.sockets import ControlServer

__all__ = ["ControlDesk"]

logger = logging.getLogger("outboard.launch")

_Message = (
    Hello
    | Ready
    | Failed
    | ClientAttached
    | Join
    | Attach
    | Acknowledge
    | Leave
    | ReportStall
    | ReportProgress
    | KillEngine
    | CoordinatorReady
    | CoordinatorRefused
    | Scale
    | CommitScale
    | AbortScale
    | Quiet
    | Reconfigured
    | Drained
)


class ControlDesk:
    """Belongs to the launcher's thread, but for `statuses` and `wait_for`.

    Args:
        control: the bound socket.
        token: the session's secret.
        ranks: the engine cores.
        faults: what to do about a stall.
        coordinator: where it is.

    Attributes:
        front_ends: those that have joined.
        members: how many ranks get requests; those from there on are on their way in or out.
        coordinator_acknowledged: the last announcement of these that the coordinator has taken note of.
        on_join, on_detach: called when a front end has been welcomed, and when it is gone.
        dropped: how many messages were dropped, by reason.
    """

    def __init__(
        self,
        control: ControlServer,
        token: str,
        ranks: list[EngineRank],
        faults: FaultConfig,
        coordinator: CoordinatorKeeper,
    ) -> None:
        self._coordinator = coordinator
        self._control = control
        self._token = token
        self._ranks = ranks
        self._faults = faults
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(_Message)
        self._encode = msgspec.msgpack.Encoder().encode
        self._version = 0
        self._changed = threading.Condition()  # guards the next
        self._statuses = [rank.status(0) for rank in ranks]
        self._announced = 0  # version of `members`
        self._coordinator_peer = b""
        self.members = len(ranks)
        self.coordinator_acknowledged = 0
        self.on_join: Callable[[FrontEnd], None] = lambda front_end: None
        self.on_detach: Callable[[FrontEnd], None] = lambda front_end: None
        self.front_ends = FrontEnds(token)
        self.dropped: Counter[str] = Counter()
        self._handlers: dict[type, Callable[[bytes, Any], None]] = {
            Join: self._on_join,
            Attach: self._on_attach,
            ClientAttached: self._on_client_attached,
            Acknowledge: self._on_acknowledge,
            Leave: self._on_leave,
            ReportStall: self._on_stall,
            ReportProgress: self._on_progress,
            KillEngine: self._on_kill,
            CoordinatorReady: self._on_coordinator_ready,
            CoordinatorRefused: self._on_coordinator_refused,
        }

    # --- for any thread ---

    @property
    def statuses(self) -> list[EngineStatus]:
        """The state of every engine core, by rank."""
        with self._changed:
            return list(self._statuses)

    def wait_for(self, predicate: Callable[[list[EngineStatus]], bool], timeout: float | None) -> bool:
        """Blocks until the states fulfil this, or for `timeout` seconds; whether they do."""
        with self._changed:
            return self._changed.wait_for(lambda: predicate(self._statuses), timeout)

    # --- for the launcher ---

    def handle(self, kind: type, handler: Callable[[bytes, Any], None]) -> None:
        """Has messages of a kind given to `handler(sender, message)`."""
        self._handlers[kind] = handler

    def tell(self, front_end: FrontEnd, message: Any) -> None:
        """Sends a message to a front end."""
        self._control.send(front_end.peer, self._encode(message))

    def tell_all(self, message: Any) -> None:
        """Sends a message to all front ends."""
        body = self._encode(message)
        for front_end in self.front_ends:
            self._control.send(front_end.peer, body)

    def tell_rank(self, rank: EngineRank, message: Any) -> None:
        """Sends a message to an engine core; one that has not said HELLO, or has ended, is no error."""
        if rank.peer:
            self._control.send(rank.peer, self._encode(message))

    def is_rank(self, sender: bytes, number: int, token: str) -> bool:
        """Whether this peer is the engine core that it says it is."""
        if token == self._token and 0 <= number < len(self._ranks) and self._ranks[number].peer == sender:
            return True
        self._drop("stranger", f"an answer for rank {number} of a peer that is not that rank")
        return False

    def announce(self, members: int) -> int:
        """Tells all front ends, and the coordinator, how many ranks get requests from now on; version of that."""
        self.members = members
        self._version += 1
        self._announced = self._version
        self.tell_all(Members(self._announced, members))
        self.tell_coordinator(Members(self._announced, members))
        for rank in self._ranks:
            self._introduce(rank)
        return self._announced

    def forget_above(self, size: int) -> None:
        """Ranks from this on have gone."""
        for front_end in self.front_ends:
            front_end.reported = {rank for rank in front_end.reported if rank < size}
            front_end.attached = {rank: attach for rank, attach in front_end.attached.items() if rank < size}
        with self._changed:
            del self._statuses[size:]
            self._changed.notify_all()

    def take_all(self, now: float) -> None:
        """Takes all messages that are there."""
        while (message := self._control.receive()) is not None:
            self._take(*message, now)

    def publish(self, rank: EngineRank) -> EngineStatus:
        """Tells all front ends, and those who wait here, of a rank's state; the state."""
        self._version += 1
        status = rank.status(self._version)
        if status.state is not EngineState.STALLED:
            for front_end in self.front_ends:
                front_end.reported.discard(rank.rank)
        with self._changed:
            for new in self._ranks[len(self._statuses) : rank.rank]:  # ranks get ready in any order
                self._statuses.append(new.status(0))
            self._statuses[rank.rank : rank.rank + 1] = [status]
            self._changed.notify_all()
        self.tell_all(status)
        return status

    def publish_progress(self, progress: RankProgress) -> None:
        """Tells all front ends how an engine core goes on that runs on a node."""
        for front_end in self.front_ends:
            message = EngineProgress(
                progress.rank,
                progress.incarnation,
                progress.steps,
                progress.age,
                progress.activity,
                progress.taken.get(front_end.slot, 0),
                progress.process,
                progress.cpu,
                progress.stack,
            )
            self.tell(front_end, message)

    def publish_end(self, reason: str) -> None:
        """Tells front ends that no engine core is left, and that nobody will start one."""
        for rank in self._ranks:
            self._version += 1
            death = EngineDeath.of(EngineDeadError(reason, rank=rank.rank))
            incarnation = rank.supervisor.incarnation
            self.tell_all(EngineStatus(self._version, rank.rank, incarnation, EngineState.DEAD, death=death))

    def detach(self, front_end: FrontEnd) -> None:
        """A front end is gone, or has been replaced: no engine core works for it any more."""
        for number, attach in front_end.attached.items():
            rank = self._ranks[number]
            if rank.peer and rank.supervisor.incarnation == attach.incarnation:
                self._control.send(rank.peer, self._encode(DetachClient(front_end.client_index, attach.epoch)))
        for number in list(front_end.reported):
            self._withdraw(front_end, self._ranks[number])
        self.front_ends.remove(front_end)
        self.on_detach(front_end)

    def close(self) -> None:
        """Forgets all front ends, and closes the socket. Idempotent."""
        for front_end in self.front_ends:
            self.front_ends.remove(front_end)
        self._control.close()

    def tell_coordinator(self, message: Any) -> None:
        """Sends a message to the coordinator, if there is one."""
        if self._coordinator.place is not None:
            self._control.send(self._coordinator_peer, self._encode(message))

    # --- messages ---

    def _take(self, sender: bytes, frames: list[bytes], now: float) -> None:
        try:
            message = self._decode(frames)
        except ProtocolError as error:
            message = None
            self._drop("undecodable", str(error))
        if message is None or isinstance(message, (Hello, Ready, Failed)):
            self._shake_hands(sender, frames, message, now)
        else:
            self._handlers[type(message)](sender, message)

    def _decode(self, frames: list[bytes]) -> Any:
        if len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames; a message on the control channel has one")
        return self._decoder.decode(frames[0])

    def _shake_hands(
        self, sender: bytes, frames: list[bytes], message: Hello | Ready | Failed | None, now: float
    ) -> None:
        rank = next((rank for rank in self._ranks if rank.peer == sender), None)
        if rank is None and isinstance(message, Hello) and 0 <= message.rank < len(self._ranks):
            rank = self._ranks[message.rank]
        if rank is None:
            if message is not None:
                self._drop("handshake of nobody", f"{type(message).__name__} from an unknown peer")
            return
        state = rank.supervisor.state
        answer = rank.receive(sender, frames, now)
        if answer is not None:
            self._control.send(sender, answer)
        if rank.supervisor.state is not state:
            self._on_state(rank)

    def _on_state(self, rank: EngineRank) -> None:
        """An engine core has become ready. One that steps together with others is of use only when they are, too."""
        ready = [rank]
        if rank.lockstep and not rank.joining:
            group = self._ranks[: self.members]
            ready = group if all(one.is_ready for one in group) else []
        for one in ready:
            self._introduce(one)
            self.publish(one)

    def _on_join(self, sender: bytes, join: Join) -> None:
        refusal = self.front_ends.refusal(join)
        if refusal:
            self._drop("refused", refusal)
            self._control.send(sender, self._encode(Refused(refusal)))
            return
        earlier = self.front_ends.with_index(join.client_index)
        if earlier is not None:
            self._control.send(earlier.peer, self._encode(Refused(f"another front end has index {join.client_index}")))
            earlier.remove_files()
            self.detach(earlier)
        front_end = self.front_ends.add(sender, join)
        if front_end is not None:
            with self._changed:
                statuses = list(self._statuses)
            self._control.send(sender, self._encode(Welcome(front_end.slot, statuses, self.members)))
            if self._announced:
                self.tell(front_end, Members(self._announced, self.members))
            if self._coordinator.place is not None:
                self._control.send(sender, self._encode(self._coordinator.place))
            self.on_join(front_end)

    def _on_attach(self, sender: bytes, attach: Attach) -> None:
        front_end = self.front_ends.get(sender)
        if front_end is None:
            self._drop("stranger", "Attach of a peer that has not joined")
            return
        rank = self._ranks[attach.rank] if 0 <= attach.rank < len(self._ranks) else None
        if rank is None or not rank.peer or rank.supervisor.incarnation != attach.incarnation:
            return  # it has just ended: the news of that is on its way
        front_end.attached[attach.rank] = attach
        message = AttachClient(
            front_end.client_index,
            attach.epoch,
            front_end.slot,
            front_end.pid,
            attach.input_address,
            attach.output_address,
            identity_of(attach.rank, attach.incarnation),
            attach.arena,
        )
        self._control.send(rank.peer, self._encode(message))

    def _on_client_attached(self, sender: bytes, answer: ClientAttached) -> None:
        rank = next((rank for rank in self._ranks if rank.peer == sender), None)
        front_end = self.front_ends.with_index(answer.client_index)
        if rank is None or answer.session_token != self._token:
            self._drop("stranger", "ClientAttached of a peer that is no engine core")
        elif front_end is not None:
            if not answer.refused:
                front_end.confirmed.add(answer.epoch)
            message = Attached(rank.rank, rank.supervisor.incarnation, answer.epoch, answer.refused)
            self._control.send(front_end.peer, self._encode(message))

    def _on_acknowledge(self, sender: bytes, message: Acknowledge) -> None:
        if sender == self._coordinator_peer:
            self.coordinator_acknowledged = max(self.coordinator_acknowledged, message.version)
        front_end = self.front_ends.get(sender)
        if front_end is not None:
            front_end.acknowledged = max(front_end.acknowledged, message.version)

    def _on_leave(self, sender: bytes, message: Leave) -> None:
        front_end = self.front_ends.get(sender)
        if front_end is not None:
            self.detach(front_end)

    def _on_stall(self, sender: bytes, message: ReportStall) -> None:
        front_end, rank = self._named(sender, message)
        if front_end is None or rank is None:
            return
        front_end.reported.add(rank.rank)
        if not rank.stall(message.report):
            return
        report = message.report
        name = f"engine core rank {rank.rank} (pid {rank.pid})"
        what = (
            f"has made no progress for {report.age:.1f} s, after {report.steps} steps; its process is {report.process}"
        )
        logger.warning("%s %s\n%s", name, what, report.stack)
        self.publish(rank)
        if self._faults.stall_action == "restart":
            rank.kill(time.monotonic(), f"{name[0].upper()}{name[1:]} {what}; it has been killed.")

    def _on_progress(self, sender: bytes, message: ReportProgress) -> None:
        front_end, rank = self._named(sender, message)
        if front_end is not None and rank is not None:
            self._withdraw(front_end, rank)

    def _withdraw(self, front_end: FrontEnd, rank: EngineRank) -> None:
        """A front end waits no more for this rank; once none does, it counts as working."""
        front_end.reported.discard(rank.rank)
        if not self.front_ends.any_reports(rank.rank) and rank.progressed():
            self.publish(rank)

    def _on_kill(self, sender: bytes, message: KillEngine) -> None:
        _, rank = self._named(sender, message)
        if rank is not None:
            rank.kill(time.monotonic(), message.reason, message.report)

    def _on_coordinator_ready(self, sender: bytes, message: CoordinatorReady) -> None:
        if message.session_token != self._token:
            self._drop("stranger", "CoordinatorReady with another token than this session's")
        elif (place := self._coordinator.ready(message)) is not None:
            self._coordinator_peer = sender
            self.coordinator_acknowledged = 0
            if self._announced:
                self.tell_coordinator(Members(self._announced, self.members))
            for front_end in self.front_ends:
                self._control.send(front_end.peer, self._encode(place))
            for rank in self._ranks:
                self._introduce(rank)

    def _on_coordinator_refused(self, sender: bytes, message: CoordinatorRefused) -> None:
        if message.session_token != self._token:
            self._drop("stranger", "CoordinatorRefused with another token than this session's")
        else:
            self._coordinator.told(message)

    def _introduce(self, rank: EngineRank) -> None:
        """Tells an engine core that is ready where the coordinator is; one of a lockstep group, once all are ready."""
        place = self._coordinator.far_place if rank.node else self._coordinator.place
        ready = rank.is_ready
        if rank.lockstep:  # one that joins is told when its group is
            ready = not rank.joining and all(one.is_ready for one in self._ranks[: self.members])
        if place is not None and rank.peer and ready:
            self._control.send(rank.peer, self._encode(place))

    def _named(
        self, sender: bytes, message: ReportStall | ReportProgress | KillEngine
    ) -> tuple[FrontEnd | None, EngineRank | None]:
        """The front end, and the rank that it speaks of, if that incarnation still runs."""
        front_end = self.front_ends.get(sender)
        if front_end is None:
            self._drop("stranger", f"{type(message).__name__} of a peer that has not joined")
            return None, None
        rank = self._ranks[message.rank] if 0 <= message.rank < len(self._ranks) else None
        current = rank is not None and rank.process is not None and message.incarnation == rank.supervisor.incarnation
        return front_end, rank if current else None

    def _drop(self, reason: str, detail: str) -> None:
        if not self.dropped[reason]:
            logger.warning("dropped a message on the control channel (%s): %s; more are only counted", reason, detail)
        self.dropped[reason] += 1
