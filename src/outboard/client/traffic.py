"""What a client asks of its engine cores: requests, aborts, calls; and which engine core is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outboard.client.link import Link
from outboard.client.moves import Moves
from outboard.client.pending import CallFuture, PendingTable
from outboard.client.routing import Routing
from outboard.client.states import GONE, gone, restarting
from outboard.errors import InvalidRequestError
from outboard.protocol.messages import EngineCoreRequest

if TYPE_CHECKING:
    from outboard.client.membership import Membership

__all__ = ["Traffic"]


class Traffic:
    """Sends by the links that its membership has; what cannot be sent yet, waits. Belongs to the client's thread.

    Args:
        membership: which engine cores there are, and how they are.
        pending: what waits for an answer.
        moves: what waits for an engine core.
        routing: which rank gets a request.
    """

    def __init__(self, membership: Membership, pending: PendingTable, moves: Moves, routing: Routing) -> None:
        self._membership = membership
        self._pending = pending
        self._moves = moves
        self._routing = routing

    def add_request(self, request: EngineCoreRequest) -> int:
        """Sends a request, or has it wait while its engine core is being started again; its handle."""
        membership = self._membership
        membership.watch.arm()
        link = self.route(request)
        if link is not None:
            handle = link.sender.add_request(request)
            membership.coordination.request_sent()
            return handle
        self._settle(request.data_parallel_rank)
        return self._moves.hold(request)

    def abort(self, handles: Sequence[int]) -> None:
        """Aborts requests by handle; unknown ones are no error."""
        by_rank: dict[int, list[int]] = {}
        for handle in handles:
            rank = self._pending.ranks.get(handle)
            if rank is not None:
                by_rank.setdefault(rank, []).append(handle)
        for rank, some in by_rank.items():
            link = self._usable(rank)
            sender = self._moves.waiting_room if link is None else link.sender
            sender.abort(some)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Aborts requests by the user's ids; unknown ones are no error."""
        handles = self._pending.handles
        self.abort([handles[request_id] for request_id in request_ids if request_id in handles])

    def call(
        self,
        future: CallFuture,
        method: str,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        rank: int | None = None,
    ) -> int:
        """Calls a utility method of a rank, by default the first; the call id, under which `future` waits."""
        membership = self._membership
        membership.watch.arm()
        membership.roster.check_members()
        rank = membership.roster.ranks[0] if rank is None else rank
        link = self._usable(rank)
        if link is None:
            self._settle(rank)
            raise restarting(membership.roster.statuses[rank])
        return link.sender.call(future, method, args, kwargs)

    def route(self, request: EngineCoreRequest) -> Link | None:
        """The link with the rank that is to have a request; None: none can have it now."""
        rank = request.data_parallel_rank
        if rank is None:
            rank = self._routing.choose(request)
            return None if rank is None else self._membership.links[rank]
        if not self._membership.roster.is_member(rank):
            self._membership.roster.check_members()
            ranks = ", ".join(map(str, self._membership.roster.ranks))
            raise InvalidRequestError(f"there is no data_parallel_rank {rank!r}; there is rank {ranks}")
        return self._usable(rank)

    def _usable(self, rank: int) -> Link | None:
        """The link with a rank, if something may be sent."""
        link = self._membership.links.get(rank)
        return link if link is not None and link.usable else None

    def _settle(self, rank: int | None) -> None:
        """Raises the end of a rank, or of all, that is known while what was sent before it is still being taken."""
        membership = self._membership
        membership.roster.check_members()
        for link in list(membership.links.values()):
            if link.ending and membership.roster.statuses[link.status.rank].state in GONE:
                link.end_now()
        if membership.failure is not None:
            raise membership.failure.copy()
        if rank is not None and membership.roster.statuses[rank].state in GONE:
            raise gone(membership.roster.statuses[rank])
