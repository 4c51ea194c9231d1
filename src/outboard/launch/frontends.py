"""The front ends of a group of engine cores: who they are, and where each is attached. No IO but their pidfds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from outboard._version import __version__
from outboard.launch.rank import EngineRank
from outboard.protocol.control import Attach, Join
from outboard.protocol.messages import PROTOCOL_VERSION
from outboard.protocol.progress import MAX_SLOTS
from outboard.transport.sockets import remove_socket_file

__all__ = ["FrontEnd", "FrontEnds"]


@dataclass(slots=True)
class FrontEnd:
    """One front end that has joined.

    Attributes:
        peer: its ZeroMQ identity on the control channel.
        client_index: its index; outputs return to it.
        slot: its place on every progress page.
        pid: its process.
        pidfd: readable once it has ended; -1 where it is this very process.
        attached: what it attached to, by rank; of the rank's latest incarnation.
        confirmed: epochs that engine cores serve, or served.
        reported: ranks that it waits for in vain.
        acknowledged: the last version of the engine cores' states that it has taken note of.
    """

    peer: bytes
    client_index: int
    slot: int
    pid: int
    pidfd: int
    attached: dict[int, Attach] = field(default_factory=dict)
    confirmed: set[int] = field(default_factory=set)
    reported: set[int] = field(default_factory=set)
    acknowledged: int = -1

    def is_attached_to(self, ranks: Iterable[EngineRank]) -> bool:
        """Whether it is attached to all of these."""
        for rank in ranks:
            attach = self.attached.get(rank.rank)
            if attach is None or attach.incarnation != rank.supervisor.incarnation:
                return False
            if attach.epoch not in self.confirmed:
                return False
        return True

    def remove_files(self) -> None:
        """Removes the socket files that it left; for one that cannot any more."""
        for attach in self.attached.values():
            for address in (attach.input_address, attach.output_address):
                remove_socket_file(address)

    def close(self) -> None:
        """Releases the descriptor."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class FrontEnds:
    """All front ends, by peer and by index.

    Args:
        token: the session's secret.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._by_peer: dict[bytes, FrontEnd] = {}
        self._next_slot = 0

    def __iter__(self) -> Iterator[FrontEnd]:
        return iter(list(self._by_peer.values()))

    def __len__(self) -> int:
        return len(self._by_peer)

    def get(self, peer: bytes) -> FrontEnd | None:
        """The front end behind this identity; None: nobody has joined with it."""
        return self._by_peer.get(peer)

    def with_index(self, client_index: int) -> FrontEnd | None:
        """The front end with this index."""
        return next((one for one in self._by_peer.values() if one.client_index == client_index), None)

    def refusal(self, join: Join) -> str:
        """Why this one cannot join; "": it can."""
        if join.session_token != self._token:
            return "the session token is not this session's"
        if join.protocol_version != PROTOCOL_VERSION:
            return (
                f"protocol version {join.protocol_version} (outboard {join.outboard_version}) does not fit the "
                f"launcher's {PROTOCOL_VERSION} (outboard {__version__}): both must run the same installation"
            )
        if not join.client_index >= 0:
            return f"client_index must be at least 0, not {join.client_index}"
        if len(self._by_peer) >= MAX_SLOTS:
            return f"there are {len(self._by_peer)} front ends already; no more than {MAX_SLOTS} can join"
        return ""

    def add(self, peer: bytes, join: Join) -> FrontEnd | None:
        """Enters a front end; None if its process is gone already."""
        pidfd = -1
        if join.pid != os.getpid():
            try:
                pidfd = os.pidfd_open(join.pid)
            except (OSError, OverflowError, ValueError):
                return None
        taken = {one.slot for one in self._by_peer.values()}
        # Round and round: an engine core that hangs still shows the count of the one that had a slot last.
        while self._next_slot in taken:
            self._next_slot = (self._next_slot + 1) % MAX_SLOTS
        slot = self._next_slot
        self._next_slot = (slot + 1) % MAX_SLOTS
        front_end = FrontEnd(peer, join.client_index, slot, join.pid, pidfd)
        self._by_peer[peer] = front_end
        return front_end

    def any_reports(self, rank: int) -> bool:
        """Whether somebody waits in vain for this rank."""
        return any(rank in one.reported for one in self._by_peer.values())

    def remove(self, front_end: FrontEnd) -> None:
        """Forgets a front end, and releases its descriptor."""
        if self._by_peer.get(front_end.peer) is front_end:
            del self._by_peer[front_end.peer]
        front_end.close()
