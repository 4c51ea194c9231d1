"""An engine core's part in changes of the number of ranks: it says that it has been told, and when it is empty."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from outboard.engine.batch import OutputBatch
from outboard.engine.client import Client
from outboard.protocol.messages import (
    EEP_NOTIFICATION_CALL_ID,
    RECONFIGURE_FINISHED,
    SHUTDOWN_COMPLETE,
    LeaveRank,
    UtilityOutput,
)
from outboard.protocol.scaling import (
    Drained,
    DrainRank,
    Quiet,
    Reconfigured,
)

__all__ = ["Scaling"]


class Scaling:
    """Belongs to the busy loop.

    Args:
        rank: of this engine core.
        token: the session's secret, shown with every answer.
        say: sends a message to the launcher.
        clients: a view of all front ends that are served.
        answer: has a front end told something behind all outputs so far.
        batch: the open requests.
    """

    def __init__(
        self,
        rank: int,
        token: str,
        say: Callable[[Any], None],
        clients: Iterable[Client],
        answer: Callable[[Client, UtilityOutput], None],
        batch: OutputBatch,
    ) -> None:
        self._rank = rank
        self._token = token
        self._say = say
        self._clients = clients
        self._answer = answer
        self._batch = batch
        self._leaving: DrainRank | None = None
        self._drained = False

    def drain(self, message: DrainRank) -> None:
        """This rank is to leave."""
        self._leaving = message
        self._drained = False

    def left(self, client: Client, message: LeaveRank) -> None:
        """This front end sends no more."""
        client.said_leave = True

    def look(self) -> None:
        """Says that this rank is empty, once it is, and nothing can come any more."""
        if self._leaving is None or self._drained or len(self._batch):
            return
        if all(client.said_leave and not client.deferred_calls for client in self._clients):
            self._drained = True
            self._say(Drained(self._token, self._rank, self._leaving.version))

    def stopping(self) -> None:
        """This rank ends; where that is because it left, all front ends are told, behind everything else."""
        if self._leaving is not None:
            self._notify(SHUTDOWN_COMPLETE)

    def reconfigured(self, version: int, error: str = "") -> None:
        """The group's new size has been taken note of; or why it cannot be."""
        if not error:
            self._notify(RECONFIGURE_FINISHED)
        self._say(Reconfigured(self._token, self._rank, version, error))

    def quiet(self, version: int) -> None:
        """This rank rests."""
        self._say(Quiet(self._token, self._rank, version))

    def _notify(self, kind: str) -> None:
        for client in self._clients:
            self._answer(client, UtilityOutput(EEP_NOTIFICATION_CALL_ID, (kind, self._rank)))
