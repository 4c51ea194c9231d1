"""What becomes of the messages that engine cores send, once a receiver has checked them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outboard.client.delivery import Delivery
from outboard.errors import EngineDeadError
from outboard.protocol.messages import EngineCoreOutputs, ErrorReport

if TYPE_CHECKING:
    from outboard.client.membership import Membership

__all__ = ["EngineListener"]

# An engine core that said ENGINE_CORE_DEAD gets this long to end by itself, so that its exit code can be told.
_EXIT_GRACE = 0.5


class EngineListener:
    """A `Listener` for all receivers of a client. Belongs to the client's thread.

    Args:
        membership: of the client.
        delivery: who gets the messages.
        owner: whether the engine cores are this client's own, so that it may have one killed.
    """

    def __init__(self, membership: Membership, delivery: Delivery, owner: bool) -> None:
        self._membership = membership
        self._delivery = delivery
        self._owner = owner

    @property
    def needs_ids(self) -> bool:
        return self._delivery.needs_ids

    def deliver(self, message: EngineCoreOutputs) -> None:
        self._delivery.deliver(message)

    def on_notification(self, payload: tuple[str, int]) -> bool:
        taken = self._delivery.notify(payload)
        scaling = self._membership.scaling
        if scaling is None:
            return taken
        scaling.on_notification(payload, hooked=taken)
        return True

    def on_engine_dead(self, rank: int, report: ErrorReport) -> None:
        """Its exit follows, and says more; where it does not follow, it is killed."""
        status = self._membership.roster.statuses[rank]
        reason = f"Engine core rank {rank} (pid {status.pid}) failed and did not end: {report.type}: {report.message}"
        self._membership.kill_later(_EXIT_GRACE, status, reason, report)

    def on_broken(self, rank: int, reason: str) -> None:
        if self._owner or self._membership.links[rank].breaks_alone:
            self._membership.kill(rank, reason)
        else:  # others may be served well
            self._membership.fail(EngineDeadError(reason, rank=rank))
