"""The coordinator: `python -m outboard.dp.coordinator`, a process that the launcher starts beside several ranks.

A thin shell around `LoadBoard` and `WaveCoordinator`: it takes messages, gives them to these, and sends what they
answer. It holds nothing that ranks could not tell another one: if it dies, its launcher starts the next.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from outboard.config import NetworkConfig
from outboard.dp.coordinator_state import LoadBoard, LoadReport, Publication
from outboard.dp.messages import AskControl, JoinAsFrontEnd, Joined, ListenAsRank, SpeakAsRank
from outboard.dp.wave_coordinator import ToRank, WaveCoordinator
from outboard.dp.waves import FirstRequest, RankReport
from outboard.errors import ProtocolError
from outboard.protocol.codec import MsgpackDecoder
from outboard.protocol.control import Acknowledge, CoordinatorReady, CoordinatorRefused
from outboard.protocol.environment import CoordinatorEnvironment
from outboard.protocol.scaling import (
    Members,
)
from outboard.transport.curve import SessionKeys, refused_by
from outboard.transport.sockets import ControlServer, make_context
from outboard.transport.spoke import Spoke

__all__ = ["DPCoordinator", "main"]

logger = logging.getLogger("outboard.dp")

_Message = (
    ListenAsRank | SpeakAsRank | JoinAsFrontEnd | RankReport | LoadReport | AskControl | FirstRequest
)  # fmt: skip

# Messages held for a front end that does not read; each publication is complete, so losing some costs nothing.
_HIGH_WATER_MARK = 1000
# How often at least to tell how many strangers were turned away, seconds.
_TELL_INTERVAL = 1.0
# Messages taken before something is published.
_MAX_MESSAGES = 256


class DPCoordinator:
    """Gathers loads and waves, and publishes them.

    Args:
        socket: the bound ROUTER.
        token: the session's secret.
        incarnation: how often the coordinator has been started before.
        clock: seconds.
        launcher: tells how many ranks get requests.

    Attributes:
        dropped: how many messages were dropped, by reason.
    """

    def __init__(
        self,
        socket: ControlServer,
        token: str,
        incarnation: int,
        clock: Callable[[], float] = time.monotonic,
        launcher: Spoke | None = None,
    ) -> None:
        self._launcher = launcher
        self._socket = socket
        self._token = token
        self._incarnation = incarnation
        self._clock = clock
        self._board = LoadBoard(incarnation)
        self._waves = WaveCoordinator(incarnation)
        self._members: dict[int, int] = {}  # rank -> its incarnation
        self._listeners: dict[int, bytes] = {}  # rank -> where it listens
        self._speakers: dict[bytes, tuple[int, int]] = {}  # peer -> (rank, incarnation)
        self._front_ends: dict[int, bytes] = {}  # client index -> peer
        self._published: Publication | None = None
        self._decoder: MsgpackDecoder[Any] = MsgpackDecoder(_Message)
        self._encode = msgspec.msgpack.Encoder().encode
        self._from_launcher: MsgpackDecoder[Members] = MsgpackDecoder(Members)
        self.dropped: Counter[str] = Counter()
        self._handlers: dict[type, Callable[[bytes, Any], None]] = {
            ListenAsRank: self._on_listen,
            SpeakAsRank: self._on_speak,
            JoinAsFrontEnd: self._on_join,
            RankReport: self._on_report,
            LoadReport: self._on_load,
            AskControl: self._on_ask,
            FirstRequest: self._on_first_request,
        }

    def turn(self, timeout: float | None = None) -> None:
        """Waits until there is something to do, at most `timeout` seconds, and does it."""
        if self._front_ends:
            due = max(0.0, self._board.next_due - self._clock())
            timeout = due if timeout is None else min(due, timeout)
        self._hear_launcher()
        self._socket.wait([self._launcher.fd] if self._launcher is not None else [], timeout)
        self._hear_launcher()
        for _ in range(_MAX_MESSAGES):
            message = self._socket.receive()
            if message is None:
                break
            self._take(*message)
        self._publish()

    def _publish(self) -> None:
        self._board.set_wave(self._waves.state)
        publication = self._board.publish(self._clock()) if self._front_ends else None
        if publication is not None:
            self._published = publication
            body = self._encode(publication)
            for peer in self._front_ends.values():
                self._socket.send(peer, body)

    def _take(self, sender: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"{len(frames)} frames; a message to the coordinator has one")
            message = self._decoder.decode(frames[0])
        except ProtocolError as error:
            self._drop("undecodable", str(error))
            return
        if getattr(message, "session_token", self._token) != self._token:
            self._drop("token", f"{type(message).__name__} with another token than this session's")
            return
        self._handlers[type(message)](sender, message)

    # --- who is there ---

    def _hear_launcher(self) -> None:
        launcher = self._launcher
        while launcher is not None and (frames := launcher.receive()) is not None:
            try:
                message = self._from_launcher.decode(frames[0])
            except ProtocolError as error:
                self._drop("undecodable", str(error))
                continue
            self._board.set_size(message.size)
            launcher.send(self._encode(Acknowledge(message.version)))

    def _on_listen(self, sender: bytes, who: ListenAsRank) -> None:
        if who.incarnation < self._members.get(who.rank, 0):
            self._drop("earlier incarnation", f"rank {who.rank}, incarnation {who.incarnation}")
            return
        self._members[who.rank] = who.incarnation
        self._listeners[who.rank] = sender
        self._speakers = {peer: rank for peer, rank in self._speakers.items() if rank[0] != who.rank}
        self._board.set_members(self._board.members + 1, self._members)
        self._socket.send(sender, self._encode(Joined(self._incarnation)))

    def _on_speak(self, sender: bytes, who: SpeakAsRank) -> None:
        if self._members.get(who.rank) != who.incarnation:
            self._drop("stranger", f"rank {who.rank}, incarnation {who.incarnation}, speaks but does not listen")
            return
        self._speakers[sender] = (who.rank, who.incarnation)

    def _on_join(self, sender: bytes, who: JoinAsFrontEnd) -> None:
        self._front_ends[who.client_index] = sender
        if self._published is not None:
            self._socket.send(sender, self._encode(self._published))

    # --- ranks ---

    def _on_report(self, sender: bytes, report: RankReport) -> None:
        if self._is_speaker(sender, report.rank, report):
            self._send_all(self._waves.report(report))

    def _on_load(self, sender: bytes, report: LoadReport) -> None:
        if self._is_speaker(sender, report.rank, report):
            self._board.report(report)

    def _on_ask(self, sender: bytes, ask: AskControl) -> None:
        waves = self._waves
        if sender not in self._speakers:
            self._drop("stranger", "AskControl of a peer that is no rank")
        elif (ask.group, ask.control) == (waves.group, waves.control) and ask.paused != waves.paused:
            self._send_all(waves.pause() if ask.paused else waves.resume())

    def _is_speaker(self, sender: bytes, rank: int, message: Any) -> bool:
        known = self._speakers.get(sender, (-1, -1))[0] == rank
        if not known:
            self._drop("stranger", f"{type(message).__name__} for rank {rank} of a peer that is not that rank")
        return known

    # --- front ends ---

    def _on_first_request(self, sender: bytes, notice: FirstRequest) -> None:
        if sender in self._front_ends.values():
            self._send_all(self._waves.first_request(notice))
        else:
            self._drop("stranger", "FirstRequest of a peer that has not joined")

    # --- inside ---

    def _send_all(self, messages: list[ToRank]) -> None:
        for rank, message in messages:
            self._socket.send(self._listeners[rank], self._encode(message))

    def _drop(self, reason: str, detail: str) -> None:
        if not self.dropped[reason]:
            logger.warning("the coordinator dropped a message (%s): %s; more are only counted", reason, detail)
        self.dropped[reason] += 1


def main() -> None:
    """Runs until it is killed: by its launcher, or by its warden once that is gone."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    who = CoordinatorEnvironment.take_from(os.environ)
    network = msgspec.json.decode(who.network, type=NetworkConfig) if who.network else None
    context = make_context(msgspec.json.decode(who.keys, type=SessionKeys) if who.keys else None)
    socket = ControlServer(context, who.coordinator_address, _HIGH_WATER_MARK, network)
    launcher = Spoke(context, who.control_address)
    coordinator = DPCoordinator(socket, who.session_token, who.incarnation, launcher=launcher)
    ready = CoordinatorReady(who.session_token, who.incarnation, os.getpid(), socket.tcp_address)
    launcher.send(msgspec.msgpack.encode(ready))
    told: dict[str, int] = {}
    while True:
        coordinator.turn(None if network is None else _TELL_INTERVAL)
        refused = refused_by(context)
        if any(refused.values()) and refused != told:
            told = refused
            launcher.send(msgspec.msgpack.encode(CoordinatorRefused(who.session_token, who.incarnation, refused)))


if __name__ == "__main__":
    main()
