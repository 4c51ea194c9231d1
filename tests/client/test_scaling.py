"""A client's conversation with the launcher about the number of ranks: a launcher and engine cores by hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fake_group import FakeGroup, fake_group, until
from outboard import (
    AsyncMPClient,
    ConfigError,
    DPAsyncMPClient,
    DPLBAsyncMPClient,
    EngineConfig,
    EngineDeadError,
    EngineState,
    NotificationError,
    ParallelConfig,
    ScaleError,
    ScaleInProgressError,
    ScaleProgress,
    ScaleRolledBackError,
    ScaleState,
    UnsupportedError,
)
from outboard.client import scaling
from outboard.client.data_parallel import client_class
from outboard.protocol.scaling import (
    AbortScale,
    CommitScale,
    Scale,
)
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")

FINISHED, COMPLETE = "RECONFIGURE_FINISHED", "SHUTDOWN_COMPLETE"
DONE, ROLLED_BACK = ScaleState.DONE, ScaleState.ROLLED_BACK

Body = Callable[[Any, FakeGroup], Awaitable[None]]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for in vain is not waited for so long."""
    monkeypatch.setattr(scaling, "_APART", 0.3)


def on(run: Run, body: Body, size: int = 1, **more: Any) -> None:
    async def main() -> None:
        async with fake_group(size, **more) as (client, group):
            await body(client, group)

    run(main())


async def begin(client: Any, group: FakeGroup, old: int, new: int, **more: Any) -> asyncio.Task[None]:
    """A `scale` up to where its ranks are told."""
    task = asyncio.create_task(client.scale(new, **more))
    await group.hear(Scale)
    for rank in range(old, new):
        group.set_state(rank, EngineState.READY)
    await until(lambda: len(group.engines) == max(old, new))
    for state in (ScaleState.PREPARING, ScaleState.READY, ScaleState.COMMITTING):
        group.progress(state, old, new)
    return task


# --- how it goes -----------------------------------------------------------------------------------------------------


def test_up(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        states: list[ScaleState] = []
        task = await begin(client, group, 1, 3, timeout=7, drain=8, on_progress=lambda p: states.append(p.state))
        assert group.all_heard(Scale) == [Scale(1, 3, 7, 8)]
        group.notify_all(FINISHED, range(3))
        group.announce(3)
        group.progress(DONE, 1, 3)
        await task
        assert client.data_parallel_size == 3
        assert states == [ScaleState.PREPARING, ScaleState.READY, ScaleState.COMMITTING, DONE]
        assert not client.stats()["dropped"]
        assert not group.all_heard(AbortScale)

    on(run, body)


def test_down_waits_for_the_last_word_of_those_that_leave(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = await begin(client, group, 2, 1)
        group.announce(1)
        group.notify_all(FINISHED, range(1))
        group.progress(DONE, 2, 1)
        await until(lambda: client.data_parallel_size == 1)
        await asyncio.sleep(0.05)
        assert not task.done()
        group.engines[1].notify(COMPLETE)
        group.engines[1].close()
        group.set_state(1, EngineState.STOPPED)
        await task

    on(run, body, 2)


def test_as_it_is_already_is_asked_all_the_same(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = asyncio.create_task(client.scale(1))
        assert (await group.hear(Scale)).timeout == client.config.faults.startup_timeout
        group.progress(DONE, 1, 1)
        await task

    on(run, body)


def test_who_subscribes_hears_of_other_front_ends(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        heard: list[ScaleProgress] = []
        end = client.subscribe_scale(heard.append)
        group.progress(ScaleState.PREPARING, 1, 2, client=5)
        await until(lambda: heard)
        end()
        assert heard[0].client_index == 5

    on(run, body)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("ScaleInProgressError", ScaleInProgressError),
        ("UnsupportedError", UnsupportedError),
        ("ConfigError", ConfigError),
        ("RemoteError", ScaleError),
        ("annotations", ScaleError),
        ("NoSuchError", ScaleError),
    ],
)
def test_refused(run: Run, error: str, kind: type[Exception]) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = asyncio.create_task(client.scale(2))
        group.refuse((await group.hear(Scale)).call, error, "for a reason")
        with pytest.raises(kind, match="for a reason") as caught:
            await task
        assert type(caught.value) is kind

    on(run, body)


@pytest.mark.parametrize(
    ("size", "settings", "message"),
    [
        ("2", {}, "number of ranks"),
        (True, {}, "number of ranks"),
        (1 << 70, {}, "number of ranks"),
        (2, {"timeout": "5"}, "timeout must be above 0"),
        (2, {"timeout": float("inf")}, "timeout must be above 0"),
        (2, {"drain": -1}, "drain must be at least 0"),
        (2, {"drain": float("nan")}, "drain must be at least 0"),
    ],
)
def test_what_cannot_be_asked_for(run: Run, size: Any, settings: dict[str, Any], message: str) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        for ask in (client.scale, client.prepare_elastic_ep):
            with pytest.raises(ConfigError, match=message):
                await ask(size, **settings)
        assert not group.all_heard(Scale)

    on(run, body)


def test_the_client_ends_meanwhile(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = await begin(client, group, 1, 2)
        group.engines[0].close()
        group.set_state(0, EngineState.DEAD, 0, "it died")
        with pytest.raises(EngineDeadError, match="it died"):
            await task
        with pytest.raises(EngineDeadError, match="it died"):
            await client.scale(1)

    on(run, body)


def test_the_client_ends_between_the_end_and_the_notifications(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = await begin(client, group, 1, 2)
        done = asyncio.Event()
        client.subscribe_scale(lambda p: done.set())
        group.progress(DONE, 1, 2)
        await done.wait()
        group.engines[0].close()
        group.set_state(0, EngineState.DEAD, 0, "it died")
        with pytest.raises(EngineDeadError, match="it died"):
            await task

    on(run, body)


def test_a_launcher_that_says_nothing_is_not_waited_for_without_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_SILENCE", 0.1)

    async def body(client: Any, group: FakeGroup) -> None:
        with pytest.raises(ScaleError, match="the launcher has said nothing"):
            await client.scale(2, timeout=0.1, drain=0)
        await group.hear(AbortScale)

    on(run, body, parallel=ParallelConfig(max_size=8, dp_sync_timeout=0.1))


# --- taken back ------------------------------------------------------------------------------------------------------


def test_rolled_back(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = await begin(client, group, 1, 2)
        group.engines[0].notify(FINISHED)
        group.progress(ScaleState.ROLLING_BACK, 1, 2, reason="it died")
        group.progress(ROLLED_BACK, 1, 2, reason="it died")
        with pytest.raises(ScaleRolledBackError, match="it died"):
            await task

    on(run, body)


@pytest.mark.parametrize("call", ["scale", "prepare_elastic_ep"])
def test_cancelled(run: Run, call: str) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = asyncio.create_task(getattr(client, call)(2))
        await group.hear(Scale)
        group.progress(ScaleState.PREPARING, 1, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await group.hear(AbortScale) == AbortScale(1)
        again = asyncio.create_task(client.scale(3))
        assert (await group.hear(Scale, 2)).call == 2
        group.progress(ROLLED_BACK, 1, 2, call=1, reason="whoever wanted it took it back")
        group.progress(DONE, 3, 3, call=2)
        await again

    on(run, body)


# --- in two halves ---------------------------------------------------------------------------------------------------


async def prepare(client: Any, group: FakeGroup) -> None:
    task = asyncio.create_task(client.prepare_elastic_ep(2))
    assert not (await group.hear(Scale)).commit
    group.set_state(1, EngineState.READY)
    await until(lambda: len(group.engines) == 2)
    group.progress(ScaleState.PREPARING, 1, 2)
    group.progress(ScaleState.READY, 1, 2)
    await task


def test_prepared_and_committed(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        await prepare(client, group)
        task = asyncio.create_task(client.commit_elastic_ep())
        assert await group.hear(CommitScale) == CommitScale(1)
        group.progress(ScaleState.COMMITTING, 1, 2)
        group.notify_all(FINISHED, range(2))
        group.progress(DONE, 1, 2)
        await task
        with pytest.raises(ScaleError, match="nothing is prepared"):
            await client.commit_elastic_ep()

    on(run, body)


def test_prepared_and_aborted(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        await prepare(client, group)
        task = asyncio.create_task(client.abort_elastic_ep())
        await group.hear(AbortScale)
        group.progress(ScaleState.ROLLING_BACK, 1, 2)
        group.progress(ROLLED_BACK, 1, 2)
        await task
        with pytest.raises(ScaleError, match="nothing is prepared"):
            await client.abort_elastic_ep()

    on(run, body)


@pytest.mark.parametrize("way", ["commit", "abort"])
def test_prepared_and_rolled_back_before_anybody_asked(run: Run, way: str) -> None:
    """The launcher knows nothing of it any more, and would not answer."""

    async def body(client: Any, group: FakeGroup) -> None:
        await prepare(client, group)
        ended = asyncio.Event()
        client.subscribe_scale(lambda p: ended.set())
        group.progress(ROLLED_BACK, 1, 2, reason="rank 1 died")
        await ended.wait()
        async with asyncio.timeout(5):
            if way == "commit":
                with pytest.raises(ScaleRolledBackError, match="rank 1 died"):
                    await client.commit_elastic_ep()
            else:
                await client.abort_elastic_ep()

    on(run, body)


@pytest.mark.parametrize("way", ["commit_elastic_ep", "abort_elastic_ep"])
def test_nothing_to_prepare(run: Run, way: str) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = asyncio.create_task(client.prepare_elastic_ep(1))
        await group.hear(Scale)
        group.progress(DONE, 1, 1)
        await task
        async with asyncio.timeout(5):
            await getattr(client, way)()

    on(run, body)


def test_a_second_prepare_that_is_refused_leaves_the_first(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        await prepare(client, group)
        task = asyncio.create_task(client.prepare_elastic_ep(3))
        group.refuse((await group.hear(Scale, 2)).call, "ScaleInProgressError", "one is under way")
        with pytest.raises(ScaleInProgressError):
            await task
        task = asyncio.create_task(client.abort_elastic_ep())
        assert await group.hear(AbortScale) == AbortScale(1)
        group.progress(ROLLED_BACK, 1, 2)
        await task

    on(run, body)


# --- notifications ---------------------------------------------------------------------------------------------------


def test_one_that_is_missing(run: Run, soon: None) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = await begin(client, group, 1, 3)
        group.notify_all(FINISHED, range(2))
        group.progress(DONE, 1, 3)
        with pytest.raises(NotificationError, match="rank 2") as caught:
            await task
        assert caught.value.rank == 2

    on(run, body)


def test_a_rank_that_died_on_its_way_out_is_not_missing(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = await begin(client, group, 2, 1)
        group.announce(1)
        group.engines[1].close()
        group.set_state(1, EngineState.STOPPED, 0, "it died")
        group.engines[0].notify(FINISHED)
        group.progress(DONE, 2, 1)
        await task

    on(run, body, 2)


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize(
    ("kind", "rank", "message"),
    [
        ("WHATEVER", 0, "unknown type 'WHATEVER'"),
        (FINISHED, 7, "rank 7 sent RECONFIGURE_FINISHED"),
        (COMPLETE, 0, "rank 0 sent SHUTDOWN_COMPLETE"),
        (FINISHED, 0, "rank 0 sent RECONFIGURE_FINISHED twice"),
    ],
)
def test_one_that_makes_no_sense_fails_the_scale(
    run: Run, soon: None, kind: str, rank: int, message: str, done: bool
) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = await begin(client, group, 1, 2)
        group.notify_all(FINISHED, range(2))
        group.engines[0].notify(kind, rank)
        if done:
            group.progress(DONE, 1, 2)
        else:
            await group.hear(AbortScale)
            assert not task.done()
            group.progress(ROLLED_BACK, 1, 2, reason="taken back")
        with pytest.raises(NotificationError, match=message) as caught:
            await task
        assert caught.value.rank == rank
        assert client.stats()["dropped"] == {"notification": 1}

    on(run, body)


def test_one_that_belongs_to_nothing_is_told_of_and_harms_nobody(
    run: Run, soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        with caplog.at_level(logging.WARNING):
            group.engines[0].notify(FINISHED)
            await until(lambda: client.stats()["dropped"])
        assert "rank 0 sent RECONFIGURE_FINISHED, which belongs to no change of size" in caplog.text
        task = await begin(client, group, 1, 2)
        group.notify_all(FINISHED, range(2))
        group.progress(DONE, 1, 2)
        await task

    on(run, body)


def test_early_ones(run: Run) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        task = asyncio.create_task(client.scale(2))
        await group.hear(Scale)
        group.set_state(1, EngineState.READY)
        await until(lambda: len(group.engines) == 2)
        group.notify_all(FINISHED, range(2))
        await until(lambda: client.stats()["received"] == 2)
        group.progress(ScaleState.COMMITTING, 1, 2)
        group.progress(DONE, 1, 2)
        await task
        assert not client.stats()["dropped"]

    on(run, body)


def test_those_of_the_change_before_that_come_late(run: Run, soon: None) -> None:
    """Another front end's change has ended, and the news of the next was faster than the last of its notifications."""

    async def body(client: Any, group: FakeGroup) -> None:
        heard: list[ScaleState] = []
        client.subscribe_scale(lambda p: heard.append(p.state))
        for state in (ScaleState.COMMITTING, DONE):
            group.progress(state, 3, 2, client=5)
        task = await begin(client, group, 2, 1)
        await until(lambda: heard.count(ScaleState.COMMITTING) == 2)
        group.notify_all(FINISHED, range(2))  # of the one before
        group.notify_all(FINISHED, range(1))
        group.engines[1].notify(COMPLETE)
        group.progress(DONE, 2, 1)
        await task
        await asyncio.sleep(0.4)
        assert not client.stats()["dropped"]

    on(run, body, 2)


def test_those_of_a_change_that_was_taken_back_come_late(run: Run, soon: None) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        heard: list[ScaleState] = []
        client.subscribe_scale(lambda p: heard.append(p.state))
        for state in (ScaleState.COMMITTING, ScaleState.ROLLING_BACK, ROLLED_BACK):
            group.progress(state, 1, 2, client=5)
        task = asyncio.create_task(client.scale(2))
        await group.hear(Scale)
        group.set_state(1, EngineState.READY)
        await until(lambda: len(group.engines) == 2)
        group.progress(ScaleState.PREPARING, 1, 2)
        await until(lambda: ScaleState.PREPARING in heard)
        group.engines[0].notify(FINISHED)  # of the one before
        await until(lambda: client.stats()["received"] == 1)
        group.progress(ScaleState.COMMITTING, 1, 2)
        group.notify_all(FINISHED, range(2))
        group.progress(DONE, 1, 2)
        await task

    on(run, body)


class Hooked(DPLBAsyncMPClient):
    """Waits, and may raise."""

    heard: list[Any]
    go: asyncio.Event
    fails: bool

    async def eep_process_engine_core_notification(self, data: tuple[str, int]) -> None:
        self.heard.append(data)
        await self.go.wait()
        if self.fails:
            raise LookupError("not today")


@pytest.mark.parametrize("late", [True, False])
def test_a_hook_that_raises_fails_the_scale_and_nothing_else(run: Run, late: bool) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        client.heard, client.go, client.fails = [], asyncio.Event(), True
        task = await begin(client, group, 1, 2)
        group.notify_all(FINISHED, range(2))
        await until(lambda: len(client.heard) == 2)
        if not late:
            client.go.set()
            await group.hear(AbortScale)
        done = asyncio.Event()
        client.subscribe_scale(lambda p: done.set())
        group.progress(DONE, 1, 2)
        await done.wait()
        client.go.set()
        with pytest.raises(ScaleError, match="raised LookupError: not today") as caught:
            await task
        assert isinstance(caught.value.__cause__, LookupError)
        client.validate_alive()

    on(run, body, client_class=Hooked)


def test_a_client_of_one_rank_knows_what_its_rank_says(run: Run, soon: None) -> None:
    async def body(client: Any, group: FakeGroup) -> None:
        group.progress(ScaleState.COMMITTING, 2, 3)
        group.engines[1].notify(FINISHED)
        group.progress(DONE, 2, 3)
        await until(lambda: client.stats()["received"])
        await asyncio.sleep(0.4)
        assert not client.stats()["dropped"]

    parallel = ParallelConfig(data_parallel_size=2, balancing="external")
    on(run, body, 2, parallel=parallel, client_class=DPAsyncMPClient, data_parallel_rank=1)


# --- which client ----------------------------------------------------------------------------------------------------


def test_the_client_that_fits() -> None:
    def of(**parallel: Any) -> type[AsyncMPClient]:
        return client_class(EngineConfig(engine="echo", parallel=ParallelConfig(**parallel)))

    assert of() is AsyncMPClient
    assert of(max_size=1) is AsyncMPClient
    assert of(max_size=2) is DPLBAsyncMPClient
    assert of(data_parallel_size=2) is DPLBAsyncMPClient
    assert of(max_size=2, balancing="external") is DPAsyncMPClient
