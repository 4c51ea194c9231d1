"""One front end, as the busy loop sees it."""

from __future__ import annotations

from collections.abc import Callable

from outboard.engine.batch import Columns, OutputBatch
from outboard.engine.events import ClientJoined
from outboard.engine.outgoing import Outgoing

__all__ = ["Client"]


class Client:
    """Columns of its own, a way out of its own: what one front end does not take delays no other.

    Attributes:
        epoch: of this front end and this engine core; names it.
        client_index: its index among the front ends.
        slot: where its messages are counted on the progress page.
        columns: its part of the batch.
        outgoing: sends to it.
        deferred_calls: its utility calls that are answered later.
        said_leave: whether it sends nothing more, since this rank is to be removed.
    """

    __slots__ = ("client_index", "columns", "deferred_calls", "epoch", "outgoing", "port", "said_leave", "slot")

    def __init__(
        self, joined: ClientJoined, batch: OutputBatch, abort_requests: Callable[[list[str]], None], rank: int
    ) -> None:
        self.epoch = joined.epoch
        self.client_index = joined.client_index
        self.slot = joined.slot
        self.port = joined.port
        self.columns = Columns()
        self.deferred_calls = 0
        self.said_leave = False
        self.outgoing = Outgoing(joined.port, self.columns, batch, abort_requests, rank=rank, epoch=joined.epoch)
