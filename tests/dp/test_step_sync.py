"""Reductions over ZeroMQ, one thread a rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from outboard.dp.step_sync import ReductionInterrupted, ZmqStepSync
from outboard.dp.waves import Vote, combine
from outboard.errors import ReductionError
from outboard.transport.sockets import make_context
from outboard.transport.spoke import Spoke

TOKEN = "secret"


class Ranks:
    """All ranks of a group; each reduces in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.context = make_context()
        self.address = f"ipc://{path}/sync-0"
        self.syncs: list[ZmqStepSync] = []
        self.pool = ThreadPoolExecutor(8)

    def start(self, size: int, order: Callable[[int], Any] = lambda rank: -rank, **options: Any) -> list[ZmqStepSync]:
        syncs = {}
        for rank in sorted(range(size), key=order):
            syncs[rank] = ZmqStepSync(self.context, self.address, TOKEN, rank, size, **{"timeout": 20.0, **options})
        self.syncs = [syncs[rank] for rank in range(size)]
        return self.syncs

    def reduce(self, rank: int, vote: Vote) -> Future[Vote]:
        return self.pool.submit(self.syncs[rank].reduce, vote)

    def close(self) -> None:
        self.pool.shutdown()
        for sync in self.syncs:
            sync.close()
        self.context.term()


@pytest.fixture
def ranks(short_tmp: Path) -> Iterator[Ranks]:
    ranks = Ranks(short_tmp)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("size", [2, 5])
def test_all_get_the_greatest_of_each_field(ranks: Ranks, size: int) -> None:
    ranks.start(size)
    random = Random(size)
    for _ in range(200):
        votes = [Vote(random.random() < 0.3, random.randrange(1 << 62)) for _ in range(size)]
        order = random.sample(range(size), size)
        futures = {rank: ranks.reduce(rank, votes[rank]) for rank in order}
        assert {future.result(20) for future in futures.values()} == {combine(votes)}


def test_nobody_goes_on_before_the_last_has_come(ranks: Ranks) -> None:
    ranks.start(3)
    first = [ranks.reduce(rank, Vote(False, 0)) for rank in (0, 2)]
    deadline = time.monotonic() + 20
    while len(ranks.syncs[0]._early) < 2:  # rank 0 has both votes
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not any(future.done() for future in first)
    last = ranks.reduce(1, Vote(True, 5))
    assert [future.result(20) for future in (*first, last)] == [Vote(True, 5)] * 3


def test_the_missing_are_named_by_all(ranks: Ranks) -> None:
    ranks.start(4, timeout=0.5)
    futures = [ranks.reduce(rank, Vote(True, 0)) for rank in (0, 3)]
    for future in futures:
        with pytest.raises(ReductionError, match=r"ranks 1, 2 did not take part in reduction 1 within 0\.5 s"):
            future.result(20)


def test_without_rank_0_it_is_the_one_that_is_missing(ranks: Ranks) -> None:
    ranks.start(2, timeout=0.2)
    started = time.monotonic()
    with pytest.raises(ReductionError, match="rank 0 did not take part in reduction 1"):
        ranks.reduce(1, Vote(True, 0)).result(20)
    assert 0.2 < time.monotonic() - started < 5


def test_ranks_that_count_differently_are_told_apart(ranks: Ranks) -> None:
    ranks.start(2, timeout=1.0)
    ranks.syncs[1]._number = 4
    ahead = ranks.reduce(1, Vote(True, 0))
    with pytest.raises(ReductionError, match="rank 1 is at reduction 5, rank 0 at 1"):
        ranks.reduce(0, Vote(True, 0)).result(20)
    with pytest.raises(ReductionError, match="rank 0 did not take part in reduction 5"):
        ahead.result(20)


def test_junk_and_strangers_change_nothing(ranks: Ranks) -> None:
    ranks.start(2)
    stranger = Spoke(ranks.context, ranks.address)
    for body in (b"", b"\xc1", msgspec.msgpack.encode(["ballot", "wrong", 1, 1, [True, 9]])):
        stranger.send(body)
    stranger.send(msgspec.msgpack.encode(["ballot", TOKEN, 7, 1, [True, 9]]))
    deadline = time.monotonic() + 20
    while sum(ranks.syncs[0].dropped.values()) < 4:  # it looks at what has come during a reduction
        assert time.monotonic() < deadline
        futures = [ranks.reduce(rank, Vote(False, 1)) for rank in (0, 1)]
        assert [future.result(20) for future in futures] == [Vote(False, 1)] * 2
    assert ranks.syncs[0].dropped == {"undecodable": 2, "stranger": 2}
    stranger.close()


def test_an_interrupt_ends_a_wait_that_is_in_vain(ranks: Ranks) -> None:
    interrupt = os.eventfd(0)
    ranks.start(3, interrupt_fd=interrupt)
    futures = [ranks.reduce(rank, Vote(True, 0)) for rank in (0, 1)]
    time.sleep(0.05)
    assert not any(future.done() for future in futures)
    os.eventfd_write(interrupt, 1)
    for future in futures:
        with pytest.raises(ReductionInterrupted):
            future.result(5)
    os.close(interrupt)


def test_an_interrupt_does_not_end_a_wait_for_one_who_is_about_to_come(ranks: Ranks) -> None:
    """Ranks that are stopped together still agree that their wave is over."""
    interrupt = os.eventfd(1)
    ranks.start(3, interrupt_fd=interrupt)
    futures = [ranks.reduce(rank, Vote(False, 0)) for rank in (0, 1)]
    later = threading.Timer(0.2, lambda: futures.append(ranks.reduce(2, Vote(False, 0))))
    later.start()
    later.join()
    assert [future.result(5) for future in futures] == [Vote(False, 0)] * 3
    os.close(interrupt)
