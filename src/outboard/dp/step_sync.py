"""Reductions over the ranks of a lockstep group: the interface, and one by ZeroMQ.

    rank 1 .. n - 1   Ballot -> rank 0     one for each reduction, in order
    rank 0            Outcome -> all       once it has everybody's, its own included; or Missing, if it has not in time

Rank 0 does its part within its own call, so no thread and no process of their own are needed.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Protocol

import msgspec

from outboard.dp.waves import Vote, combine
from outboard.errors import ProtocolError, ReductionError
from outboard.protocol.codec import MsgpackDecoder
from outboard.transport.sockets import ControlServer, ZmqContext
from outboard.transport.spoke import Spoke

__all__ = ["ReductionInterrupted", "StepSync", "ZmqStepSync"]

# Rank 0 knows who is missing, so the others give it this much more time to say so, seconds.
_HUB_GRACE = 1.0
# After an interrupt a reduction that all others are about to join still gets so long, seconds.
_INTERRUPT_GRACE = 1.0
# Rank 0 may end right behind the last reduction: its outcome still has to leave.
_LINGER_MS = 500


class ReductionInterrupted(Exception):
    """This rank is to end, and waits for others that may have ended."""


class StepSync(Protocol):
    """How ranks agree. A group's reductions follow each other in the same order on every rank."""

    def reduce(self, vote: Vote) -> Vote:
        """Gives a vote, waits for those of all other ranks, and returns the greatest of each field.

        Raises:
            ReductionError: some rank did not take part in time; the message names it.
            ReductionInterrupted: this process is to end.
        """
        ...

    def close(self) -> None:
        """Frees what it holds."""


class _Ballot(msgspec.Struct, array_like=True, tag="ballot", frozen=True):
    session_token: str
    rank: int
    number: int
    vote: Vote


class _Outcome(msgspec.Struct, array_like=True, tag="outcome", frozen=True):
    number: int
    vote: Vote


class _Missing(msgspec.Struct, array_like=True, tag="missing", frozen=True):
    number: int
    ranks: list[int]


class ZmqStepSync:
    """Reductions by way of rank 0, on one host.

    Args:
        context: of the sockets.
        address: where rank 0 binds; of this incarnation of the group alone.
        token: the session's secret.
        rank, size: this rank, and how many there are.
        timeout: for one reduction, seconds.
        interrupt_fd: a descriptor that becomes readable when this process is to end; -1: none.

    Attributes:
        dropped: how many messages were dropped, by reason.
    """

    def __init__(
        self,
        context: ZmqContext,
        address: str,
        token: str,
        rank: int,
        size: int,
        *,
        timeout: float = 30.0,
        interrupt_fd: int = -1,
    ) -> None:
        self._token = token
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._interrupt_fd = interrupt_fd
        self._number = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._hub: ControlServer | None = None
        self._spoke: Spoke | None = None
        if rank == 0:
            self._hub = ControlServer(context, address)
            self._ballots: MsgpackDecoder[_Ballot] = MsgpackDecoder(_Ballot)
        else:
            self._spoke = Spoke(context, address)
            self._answers: MsgpackDecoder[_Outcome | _Missing] = MsgpackDecoder(_Outcome | _Missing)
        self._peers: dict[int, bytes] = {}
        self._early: dict[int, Vote] = {}  # of this reduction, by rank
        self.dropped: Counter[str] = Counter()

    def reduce(self, vote: Vote) -> Vote:
        self._number += 1
        return self._gather(vote) if self._hub is not None else self._ask(vote)

    def close(self) -> None:
        if self._hub is not None:
            self._hub.close(_LINGER_MS)
        if self._spoke is not None:
            self._spoke.close()

    # --- rank 0 ---

    def _gather(self, vote: Vote) -> Vote:
        hub, votes = self._hub, self._early
        assert hub is not None
        votes[0] = vote
        wait = _Wait(self._timeout, self._interrupt_fd)
        while len(votes) < self._size:
            self._take_ballots(hub, votes)
            if len(votes) < self._size and not wait.for_message(hub):
                missing = sorted(set(range(self._size)) - votes.keys())
                self._send_all(hub, _Missing(self._number, missing))
                raise self._who_is_missing(missing)
        self._early = {}
        result = combine(votes.values())
        self._send_all(hub, _Outcome(self._number, result))
        return result

    def _take_ballots(self, hub: ControlServer, votes: dict[int, Vote]) -> None:
        while (message := hub.receive()) is not None:
            sender, frames = message
            try:
                ballot = self._ballots.decode(frames[0])
            except ProtocolError:
                self.dropped["undecodable"] += 1
                continue
            if ballot.session_token != self._token or not 0 < ballot.rank < self._size:
                self.dropped["stranger"] += 1
            elif ballot.number != self._number:
                raise ReductionError(
                    f"rank {ballot.rank} is at reduction {ballot.number}, rank 0 at {self._number}: "
                    "they are not in step any more"
                )
            else:
                self._peers[ballot.rank] = sender
                votes[ballot.rank] = ballot.vote

    def _send_all(self, hub: ControlServer, message: _Outcome | _Missing) -> None:
        body = self._encode(message)
        for peer in self._peers.values():
            hub.send(peer, body)

    # --- all others ---

    def _ask(self, vote: Vote) -> Vote:
        spoke = self._spoke
        assert spoke is not None
        if not spoke.send(self._encode(_Ballot(self._token, self._rank, self._number, vote))):
            raise self._who_is_missing([0])
        wait = _Wait(self._timeout + _HUB_GRACE, self._interrupt_fd)
        while True:
            frames = spoke.receive()
            if frames is None:
                if not wait.for_message(spoke):
                    raise self._who_is_missing([0])
                continue
            try:
                answer = self._answers.decode(frames[0])
            except ProtocolError:
                self.dropped["undecodable"] += 1
                continue
            if answer.number != self._number:
                self.dropped["other reduction"] += 1
            elif isinstance(answer, _Missing):
                raise self._who_is_missing(answer.ranks)
            else:
                return answer.vote

    def _who_is_missing(self, ranks: list[int]) -> ReductionError:
        names = ", ".join(map(str, ranks))
        who = f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
        return ReductionError(
            f"{who} did not take part in reduction {self._number} within {self._timeout:g} s; all ranks of a lockstep "
            "group must step together: is it stopped, stuck in a step, or much slower? "
            "ParallelConfig(dp_sync_timeout=...) is the limit"
        )


class _Wait:
    """Waits for messages until a deadline, or a little longer than an interrupt."""

    def __init__(self, timeout: float, interrupt_fd: int) -> None:
        self._deadline = time.monotonic() + timeout
        self._fds = [interrupt_fd] if interrupt_fd >= 0 else []
        self._interrupted = False

    def for_message(self, socket: ControlServer | Spoke) -> bool:
        """Whether there may be a message; False once the time is over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            if self._interrupted:
                raise ReductionInterrupted
            return False
        if socket.wait(self._fds, left):
            self._interrupted = True
            self._fds = []
            self._deadline = min(self._deadline, time.monotonic() + _INTERRUPT_GRACE)
        return True
