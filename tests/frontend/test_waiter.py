"""A waiter wakes tasks as a future would: same turn, same order, same cancellation."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from outboard.frontend.waiter import Waiter, WakeBatch
from support import Run


def make(count: int = 1) -> tuple[WakeBatch, list[Waiter]]:
    loop = asyncio.get_running_loop()
    batch = WakeBatch(loop)
    return batch, [Waiter(loop, batch) for _ in range(count)]


def test_woken_tasks_run_in_the_next_turn_in_order(run: Run) -> None:
    async def main() -> None:
        _, waiters = make(5)
        order: list[object] = []

        async def wait(number: int) -> None:
            for _ in range(3):
                await waiters[number]
                order.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(5)]
        await asyncio.sleep(0)
        for _ in range(3):
            asyncio.get_running_loop().call_soon(order.append, "before")
            for number in (3, 0, 4, 1, 2):
                waiters[number].wake()
                waiters[number].wake()  # again: nothing more
            asyncio.get_running_loop().call_soon(order.append, "after")
            assert order == []
            await asyncio.sleep(0)
            assert order == ["before", 3, 0, 4, 1, 2, "after"]
            order.clear()
        await asyncio.gather(*tasks)
        waiters[0].wake()  # nobody waits

    run(main())


def test_cancelling_a_task_that_waits(run: Run) -> None:
    async def main() -> None:
        _, (waiter,) = make()
        task = asyncio.create_task(wait(waiter))
        await asyncio.sleep(0)
        assert task.cancel("why")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        again = asyncio.create_task(wait(waiter))
        await asyncio.sleep(0)
        waiter.wake()
        await again

    async def wait(waiter: Waiter) -> None:
        await waiter

    run(main())


def test_cancelling_a_task_that_was_woken_in_the_same_turn(run: Run) -> None:
    async def main() -> None:
        _, (waiter,) = make()
        caught = []

        async def wait() -> None:
            try:
                await waiter
            except asyncio.CancelledError:
                caught.append(True)
            await waiter

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiter.wake()
        task.cancel()
        await asyncio.sleep(0)
        assert caught == [True]
        await asyncio.sleep(0)
        assert waiter.callback is not None  # it waits again, and nothing of the cancellation is left
        waiter.wake()
        await task

    run(main())


def test_timeouts_gather_and_context(run: Run) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")

    async def main() -> None:
        _, waiters = make(3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await waiters[0]

        async def wait(waiter: Waiter, name: str) -> str:
            variable.set(name)
            await waiter
            return variable.get()

        for waiter in waiters:
            asyncio.get_running_loop().call_later(0.01, waiter.wake)
        names = await asyncio.gather(*(wait(waiter, str(i)) for i, waiter in enumerate(waiters)))
        assert names == ["0", "1", "2"]

    run(main())


def test_what_escapes_one_task_does_not_keep_the_others_waiting() -> None:
    done: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def main() -> None:
        _, waiters = make(4)

        async def wait(number: int) -> None:
            await waiters[number]
            if number == 1:
                raise KeyboardInterrupt
            done.append(number)

        tasks.extend(asyncio.create_task(wait(number)) for number in range(4))
        await asyncio.sleep(0)
        for waiter in waiters:
            waiter.wake()
        await asyncio.sleep(1)

    loop = asyncio.new_event_loop()
    try:
        main_task = loop.create_task(main())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(main_task)
        main_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(main_task)
        assert done == [0, 2, 3]
        assert isinstance(tasks[1].exception(), KeyboardInterrupt)
    finally:
        loop.close()
