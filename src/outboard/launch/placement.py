"""Where a rank's next incarnation starts: on this host, or on a node with a free place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outboard.launch.process import EngineProcess
from outboard.launch.rank_process import NoRoom, RankProcess, RankStarter
from outboard.protocol.environment import ChildEnvironment
from outboard.transport.session import SessionDirectory

__all__ = ["LocalStarter", "PlacedStarter", "Placement", "Room"]


@dataclass(frozen=True, slots=True)
class Room:
    """What a node has room for.

    Attributes:
        node_id, name: of the node.
        places: engine cores that it can run.
        taken: places where one runs, starts or ends.
        leaving: whether it takes none any more.
        joining: whether it has not been heard since its hello. That may be an old one, which a cut has held up, and
            nobody there; what is started there would die with it.
    """

    node_id: str
    name: str
    places: int
    taken: int
    leaving: bool = False
    joining: bool = False

    @property
    def free(self) -> int:
        """Places that a rank can have."""
        return 0 if self.leaving or self.joining else max(self.places - self.taken, 0)


class Placement:
    """Pure: decides, and says why not.

    Args:
        local_ranks: how many ranks run on this host: the first ones.
    """

    def __init__(self, local_ranks: int) -> None:
        self._local_ranks = local_ranks

    def is_local(self, rank: int) -> bool:
        """Whether a rank runs on this host, always."""
        return rank < self._local_ranks

    def choose(self, rooms: Sequence[Room]) -> Room | None:
        """The node for a rank that is not local; None: there is no room.

        That with the smallest part of its places taken, so that ranks spread; of equals, that which joined first.
        """
        free = [room for room in rooms if room.free]
        return min(free, key=lambda room: room.taken / room.places, default=None)

    def no_room(self, rank: int, rooms: Sequence[Room]) -> str:
        """Why a rank has no place, and what would give it one."""
        if not rooms:
            why = "no node has joined"
        else:
            names = ", ".join(f"{room.name} ({_state_of(room)})" for room in rooms)
            why = f"no node has a free place: {names}"
        return f"no room: rank {rank} is to run on a node, and {why}; start one with `outboard node --join`"


def _state_of(room: Room) -> str:
    if room.leaving or room.joining:
        return "leaving" if room.leaving else "joining"
    return f"{room.taken} of {room.places} places taken"


class LocalStarter(RankStarter):
    """Starts all ranks on this host.

    Args:
        session: directory and token.
        control_address: where engine cores find the launcher.
        share: among how many ranks of this host its CPUs are shared; 0: among all that there are.
    """

    def __init__(self, session: SessionDirectory, control_address: str, share: int = 0) -> None:
        self._session = session
        self._control_address = control_address
        self._share = share

    def start(self, rank: int, incarnation: int, env: Mapping[str, str]) -> EngineProcess:
        """See `RankStarter`."""
        where = ChildEnvironment(
            self._control_address, self._session.token, rank, incarnation, place=rank, places=self._share
        )
        return EngineProcess.start({**os.environ, **env, **where.to_environ()}, self._session.path)


class PlacedStarter(RankStarter):
    """Starts a rank where the placement says.

    Args:
        placement: decides.
        local: starts those of this host.
        rooms: what nodes have room for, now.
        remote: starts an incarnation of a rank on a node: `remote(node_id, rank, incarnation, env)`.
    """

    def __init__(
        self,
        placement: Placement,
        local: LocalStarter,
        rooms: Callable[[], Sequence[Room]],
        remote: Callable[[str, int, int, Mapping[str, str]], RankProcess],
    ) -> None:
        self._placement = placement
        self._local = local
        self._rooms = rooms
        self._remote = remote

    def start(self, rank: int, incarnation: int, env: Mapping[str, str]) -> RankProcess:
        """See `RankStarter`."""
        if self._placement.is_local(rank):
            return self._local.start(rank, incarnation, env)
        rooms = self._rooms()
        room = self._placement.choose(rooms)
        if room is None:
            raise NoRoom(self._placement.no_room(rank, rooms))
        return self._remote(room.node_id, rank, incarnation, env)
