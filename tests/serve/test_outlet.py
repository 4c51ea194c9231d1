"""`Outlet`: `send` stepped from call-backs, and seen through by a task where it suspends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fake_connection import settle
from outboard.serve.outlet import Outlet
from support import Run


class _Log:
    """What happened, in order."""

    def __init__(self) -> None:
        self.what: list[Any] = []

    def outlet(self, send: Callable[[Any], Awaitable[None]], **more: Any) -> Outlet:
        def on_busy() -> None:
            self.what.append("busy")

        def on_free() -> None:
            self.what.append("free")

        return Outlet(send, on_busy, on_free, **more)  # type: ignore[arg-type]


def _name(message: Any) -> Any:
    return message["status"] if message["type"] == "http.response.start" else message["body"]


def test_writes_at_once_where_send_does_not_suspend(run: Run) -> None:
    log = _Log()

    async def send(message: Any) -> None:
        log.what.append(_name(message))

    async def body() -> None:
        outlet = log.outlet(send)
        outlet.start(200, [], b"a", True)
        outlet.body(b"b")
        outlet.body(b"c", more_body=False)
        assert log.what == [200, b"a", b"b", b"c"]  # with no step of the loop
        assert not outlet.busy

    run(body())


def test_a_send_that_suspends_is_seen_through_in_order(run: Run) -> None:
    log = _Log()

    async def body() -> None:
        free = asyncio.Event()

        async def send(message: Any) -> None:
            await free.wait()
            await asyncio.sleep(0)  # one more suspension, of another kind
            log.what.append(_name(message))

        outlet = log.outlet(send)
        outlet.start(200, [], b"a", True)
        assert outlet.busy
        await settle()
        assert log.what == ["busy"]
        free.set()
        await settle()
        assert log.what == ["busy", 200, b"a", "free"]
        assert not outlet.busy
        outlet.body(b"b")
        assert outlet.busy
        await settle()
        assert log.what[4:] == ["busy", b"b", "free"]

    run(body())


def test_what_it_waits_for_may_be_done_before_the_task_begins(run: Run) -> None:
    log = _Log()

    async def body() -> None:
        free = asyncio.Event()

        async def send(message: Any) -> None:
            await free.wait()
            log.what.append(_name(message))

        outlet = log.outlet(send)
        outlet.body(b"a")
        free.set()
        await settle()
        assert log.what == ["busy", b"a", "free"]

    run(body())


def test_on_free_may_write_and_be_busy_again(run: Run) -> None:
    written: list[bytes] = []

    async def body() -> None:
        rest = [b"b", b"c"]

        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            written.append(message["body"])

        def on_free() -> None:
            if rest:
                outlet.body(rest.pop(0))
                assert outlet.busy

        outlet = Outlet(send, lambda: None, on_free)
        outlet.body(b"a")
        await settle()
        assert written == [b"a", b"b", b"c"]
        assert not outlet.busy

    run(body())


def test_a_send_that_raises_is_a_client_that_is_gone(run: Run) -> None:
    log = _Log()

    async def body() -> None:
        suspends = False

        async def send(message: Any) -> None:
            if suspends:
                await asyncio.sleep(0)
            raise RuntimeError("gone")

        outlet = log.outlet(send)
        outlet.start(200, [], b"a", True)
        outlet.body(b"b")
        assert not outlet.busy
        suspends = True
        outlet.body(b"c")
        assert outlet.busy
        await settle()
        assert not outlet.busy
        assert log.what == ["busy", "free"]

    run(body())


def test_nothing_is_sent_behind_a_head_that_could_not_be(run: Run) -> None:
    tried: list[Any] = []

    async def body() -> None:
        async def send(message: Any) -> None:
            tried.append(_name(message))
            await asyncio.sleep(0)
            raise RuntimeError("gone")

        outlet = Outlet(send, lambda: None, lambda: None)
        outlet.start(200, [], b"a", True)
        await settle()
        assert tried == [200]

    run(body())


def test_close_cancels_what_is_under_way(run: Run) -> None:
    log = _Log()

    async def body(steps: bool) -> None:
        async def send(message: Any) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                log.what.append("cancelled")
                raise

        outlet = log.outlet(send)
        outlet.start(200, [], b"a", True)
        if steps:
            await settle()
        outlet.close()
        outlet.close()
        await settle()
        assert len(asyncio.all_tasks()) == 1
        assert "free" not in log.what

    run(body(True))
    assert log.what == ["busy", "cancelled"]
    run(body(False))  # before its task has begun: the send just goes


def test_close_without_anything_under_way_does_nothing(run: Run) -> None:
    async def body() -> None:
        async def send(message: Any) -> None:
            pass

        outlet = Outlet(send, lambda: None, lambda: None)
        outlet.close()
        outlet.body(b"a")
        outlet.close()

    run(body())


def test_the_short_way_is_for_more_of_the_body_alone(run: Run) -> None:
    log = _Log()

    async def send(message: Any) -> None:
        log.what.append(_name(message))

    def write_chunk(body: bytes) -> bool:
        if body == b"refused":
            return False
        log.what.append(("chunk", body))
        return True

    async def body() -> None:
        outlet = log.outlet(send, write_chunk=write_chunk)
        outlet.start(200, [], b"a", True)
        outlet.body(b"b")
        outlet.body(b"refused")
        outlet.body(b"c", more_body=False)
        assert log.what == [200, b"a", ("chunk", b"b"), b"refused", b"c"]

    run(body())


def test_a_short_way_that_raises_is_a_client_that_is_gone(run: Run) -> None:
    async def body() -> None:
        async def send(message: Any) -> None:
            raise AssertionError("it is gone")

        def write_chunk(body: bytes) -> bool:
            raise RuntimeError("unable to perform operation; the handler is closed")

        Outlet(send, lambda: None, lambda: None, write_chunk).body(b"a")

    run(body())
