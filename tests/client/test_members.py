"""Which ranks a client uses while their number changes: a launcher and engine cores by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fake_group import FakeGroup, fake_group, until
from outboard import (
    ConfigError,
    DPAsyncMPClient,
    EngineCoreRequest,
    EngineDeadError,
    EngineRemovedError,
    EngineState,
    EngineStatus,
    FaultConfig,
    InvalidRequestError,
    ParallelConfig,
    ScaleState,
)
from outboard.client.delivery import FailedOutputs
from outboard.protocol.control import Acknowledge
from outboard.protocol.messages import AddRequest, LeaveRank, UtilityCall, UtilityOutput
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")

RESUME = FaultConfig(in_flight="resume", max_resubmits=0)


def request(name: str, rank: int | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(request_id=name, prompt_token_ids=[1, 2], data_parallel_rank=rank)


def states_of(client: Any, rank: int) -> list[EngineState]:
    """The states of a rank that subscribers are told, from now on."""
    states: list[EngineState] = []

    def note(status: EngineStatus) -> None:
        if status.rank == rank:
            states.append(status.state)

    client.subscribe(note)
    return states


def removed(group: FakeGroup, rank: int, why: str = "") -> None:
    """A rank ends on its way out, or in."""
    group.engines[rank].close()
    group.set_state(rank, EngineState.STOPPED, group.statuses[rank].incarnation, why)


# --- on the way in ---------------------------------------------------------------------------------------------------


def test_a_rank_on_its_way_in_is_attached_to_and_not_used(run: Run) -> None:
    async def main() -> None:
        async with fake_group(1) as (client, group):
            states = states_of(client, 1)
            group.set_state(1, EngineState.READY)
            new = await until(lambda: group.engines.get(1))
            for number in range(4):
                client.add_request(request(f"a{number}"))
            await until(lambda: group.engines[0].count(AddRequest) == 4)
            with pytest.raises(InvalidRequestError, match="no data_parallel_rank 1; there is rank 0"):
                client.add_request(request("pinned", 1))
            with pytest.raises(ValueError, match="no engine core of rank 1; there is rank 0"):
                await client.call_utility_async("f", rank=1)
            assert not states  # it is of no use yet
            version = group.announce(2)
            await until(lambda: Acknowledge(version) in group.heard)
            assert client.data_parallel_size == 2
            assert states == [EngineState.READY]
            client.add_request(request("b"))
            await until(lambda: new.count(AddRequest) == 1)
            assert new.count(LeaveRank) == 0

    run(main())


def test_a_rank_that_never_became_a_member_is_forgotten_without_leave(run: Run) -> None:
    async def main() -> None:
        async with fake_group(1) as (client, group):
            states = states_of(client, 1)
            group.set_state(1, EngineState.READY)
            new = await until(lambda: group.engines.get(1))
            group.progress(ScaleState.COMMITTING, 1, 2)
            group.progress(ScaleState.ROLLING_BACK, 1, 2)
            heard = list(new.heard)
            removed(group, 1)
            await until(lambda: 1 not in client._membership.links)
            assert not heard
            assert states == [EngineState.STOPPED]
            assert [status.rank for status in client.engine_status] == [0]
            client.check_health()
            group.set_state(1, EngineState.READY, 1)
            await until(lambda: group.engines[1].incarnation == 1)
            group.announce(2)
            await until(lambda: client.data_parallel_size == 2)
            assert [engine.incarnation for engine in client.core_engines] == [0, 1]

    run(main())


def test_a_new_rank_that_refuses_a_front_end_is_no_harm_to_it(run: Run) -> None:
    async def main() -> None:
        async with fake_group(1) as (client, group):
            group.refuses.add(1)
            group.set_state(1, EngineState.READY)
            await until(lambda: 1 in client._membership.roster.statuses and 1 not in client._membership.links)
            client.validate_alive()
            group.set_state(1, EngineState.STOPPED)
            await until(lambda: 1 not in client._membership.roster.statuses)
            client.add_request(request("a"))
            await until(lambda: group.engines[0].count(AddRequest) == 1)

    run(main())


# --- on the way out --------------------------------------------------------------------------------------------------


def test_leave_is_the_last_word_to_a_rank_and_comes_once(run: Run) -> None:
    async def main() -> None:
        async with fake_group(3) as (client, group):
            for number in range(6):
                client.add_request(request(f"a{number}"))
            version = group.announce(2)
            leaving = group.engines[2]
            await until(lambda: leaving.count(LeaveRank) == 1)
            assert [type(message) for message in leaving.heard] == [AddRequest, AddRequest, LeaveRank]
            await until(lambda: Acknowledge(version) in group.heard)
            group.progress(ScaleState.COMMITTING, 3, 2, client=5)
            group.progress(ScaleState.DRAINING, 3, 2, client=5)
            client.add_request(request("b"))
            await client.abort_requests_async(["a2"])
            await until(lambda: sum(group.engines[rank].count(AddRequest) for rank in (0, 1)) == 5)
            await asyncio.sleep(0.05)
            assert len(leaving.heard) == 3
            assert [group.engines[rank].count(LeaveRank) for rank in (0, 1)] == [0, 0]
            with pytest.raises(InvalidRequestError, match="no data_parallel_rank 2"):
                client.add_request(request("pinned", 2))
            assert [engine.rank for engine in client.core_engines] == [0, 1]

    run(main())


def test_leave_is_said_once_a_link_that_was_being_made_is_there(run: Run) -> None:
    async def main() -> None:
        async with fake_group(2) as (client, group):
            group.set_state(1, EngineState.RESTARTING, 0, "it died")
            await until(lambda: 1 not in client._membership.links)
            group.set_state(1, EngineState.READY, 1)
            group.announce(1)
            leaving = await until(lambda: (engine := group.engines[1]).incarnation == 1 and engine)
            await until(lambda: leaving.count(LeaveRank) == 1)
            assert client.data_parallel_size == 1

    run(main())


def test_who_joins_while_ranks_leave_says_leave_and_while_ranks_come_does_not(run: Run) -> None:
    async def joined(state: ScaleState, old: int, new: int, members: int) -> int:
        def before(group: FakeGroup) -> None:
            group.on_welcome = lambda: group.progress(state, old, new, client=5)

        async with fake_group(2, members=members, before=before) as (client, group):
            engine = await until(lambda: group.engines.get(1))
            client.add_request(request("a"))
            await until(lambda: group.engines[0].count(AddRequest) == 1)
            if new < old:
                await until(lambda: engine.count(LeaveRank) == 1)
            await until(lambda: client._membership.links[1].attached)
            return engine.count(LeaveRank)

    async def main() -> None:
        assert await joined(ScaleState.DRAINING, 2, 1, 1) == 1
        assert await joined(ScaleState.COMMITTING, 1, 2, 1) == 0

    run(main())


def test_requests_for_a_removed_rank_alone_end_and_others_move_without_being_counted(run: Run) -> None:
    async def main() -> None:
        async with fake_group(2, faults=RESUME) as (client, group):
            client.add_request(request("free0"))
            client.add_request(request("free1"))
            client.add_request(request("pinned", 1))
            leaving = group.engines[1]
            await until(lambda: leaving.count(AddRequest) == 2)
            call = asyncio.create_task(client.call_utility_async("f", rank=1))
            await until(lambda: leaving.count(UtilityCall) == 1)
            states = states_of(client, 1)
            group.announce(1)
            handle = leaving.heard[0].handle
            leaving.say(handles=[handle], tokens=[7])
            removed(group, 1, "its time was over")
            with pytest.raises(EngineRemovedError, match="its time was over"):
                await call
            ended = []
            while not isinstance(message := await client.get_output_async(), FailedOutputs):
                ended.append(message)
            assert message.request_ids == ["pinned"]
            assert isinstance(message.cause, EngineRemovedError)
            assert "rank 1" in str(message.cause) and "scaled away" in str(message.cause)
            await until(lambda: group.engines[0].count(AddRequest) == 2)
            moved = group.engines[0].heard[-1]
            assert (moved.handle, moved.num_output_tokens) == (handle, 1)
            assert states == [EngineState.STOPPED]
            assert list(client._membership.roster.statuses) == [0]

    run(main())


def test_who_waits_for_a_restart_of_a_rank_that_leaves_is_told(run: Run) -> None:
    async def main() -> None:
        async with fake_group(2, faults=RESUME) as (client, group):
            group.set_state(1, EngineState.RESTARTING, 0, "it died")
            await until(lambda: 1 not in client._membership.links)
            client.add_request(request("pinned", 1))
            group.announce(1)
            message = await client.get_output_async()
            assert isinstance(message, FailedOutputs)
            assert isinstance(message.cause, EngineRemovedError)
            group.set_state(1, EngineState.STOPPED, 0, "it died")
            await until(lambda: 1 not in client._membership.roster.statuses)
            client.check_health()

    run(main())


def test_a_rank_that_comes_again_before_the_last_word_of_the_old_one_is_taken(run: Run) -> None:
    async def main() -> None:
        async with fake_group(2) as (client, group):
            client.add_request(request("pinned", 1))
            states = states_of(client, 1)
            group.announce(1)
            await until(lambda: group.engines[1].count(LeaveRank) == 1)
            removed(group, 1)
            group.set_state(1, EngineState.READY, 1)
            message = await client.get_output_async()
            assert isinstance(message, FailedOutputs)
            assert isinstance(message.cause, EngineRemovedError)
            await until(lambda: group.engines[1].incarnation == 1)
            group.announce(2)
            await until(lambda: client.data_parallel_size == 2)
            client.add_request(request("again", 1))
            await until(lambda: group.engines[1].count(AddRequest) == 1)
            assert states == [EngineState.STOPPED, EngineState.READY]

    run(main())


def test_the_client_ends_when_no_member_is_left_whoever_is_on_its_way(run: Run) -> None:
    async def main() -> None:
        async with fake_group(1) as (client, group):
            group.set_state(1, EngineState.READY)
            await until(lambda: 1 in group.engines and client._membership.links[1].attached)
            waiting = asyncio.create_task(client.wait_for_state(EngineState.STALLED, rank=1))
            unknown = asyncio.create_task(client.wait_for_state(EngineState.READY, rank=3))
            await asyncio.sleep(0)
            group.engines[0].close()
            group.set_state(0, EngineState.DEAD, 0, "it died")
            for task in (waiting, unknown):
                with pytest.raises(EngineDeadError, match="it died"):
                    async with asyncio.timeout(5):
                        await task
            with pytest.raises(EngineDeadError, match="it died"):
                client.add_request(request("a"))

    run(main())


# --- a client of one rank --------------------------------------------------------------------------------------------

EXTERNAL = ParallelConfig(data_parallel_size=2, balancing="external")


def external(rank: int, **more: Any) -> Any:
    return fake_group(2, parallel=EXTERNAL, client_class=DPAsyncMPClient, data_parallel_rank=rank, **more)


def test_the_client_of_a_rank_that_leaves_ends_after_its_requests(run: Run) -> None:
    async def main() -> None:
        async with external(1) as (client, group):
            handle = client.add_request(request("a"))
            engine = group.engines[1]
            call = asyncio.create_task(client.call_utility_async("f"))
            await until(lambda: engine.count(UtilityCall) == 1)
            group.announce(1)
            await until(lambda: engine.count(LeaveRank) == 1)
            with pytest.raises(EngineRemovedError):
                client.add_request(request("b"))
            with pytest.raises(EngineRemovedError):
                await client.call_utility_async("f")
            with pytest.raises(EngineRemovedError):
                client.check_health()
            number = next(message.call_id for message in engine.heard if isinstance(message, UtilityCall))
            engine.say(utility_output=UtilityOutput(number, "done"))
            assert await call == "done"
            engine.say(handles=[handle], tokens=[7], finished=[(0, "stop", None)])
            assert (await client.get_output_async()).outputs[0].new_token_ids == [7]
            removed(group, 1)
            with pytest.raises(EngineRemovedError):
                await client.get_output_async()

    run(main())


def test_the_client_of_another_rank_goes_on(run: Run) -> None:
    async def main() -> None:
        async with external(0) as (client, group):
            version = group.announce(1)
            await until(lambda: Acknowledge(version) in group.heard)
            group.set_state(1, EngineState.STOPPED)
            client.add_request(request("a"))
            await until(lambda: group.engines[0].count(AddRequest) == 1)
            client.check_health()

    run(main())


def test_a_rank_that_is_no_member_has_no_client(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="data_parallel_rank 1 does not exist: data_parallel_size is 1"):
            async with external(1, members=1):
                pass

    run(main())
