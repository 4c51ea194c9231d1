"""Runs one plan from start to end, and tells what was wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import io
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from chaos.faults import Striker
from chaos.ledger import Ledger, Violation
from chaos.leftovers import Watch
from chaos.llm_side import LLMSide
from chaos.mp_side import AsyncMPSide, SyncMPSide
from chaos.plan import MIDDLE, Plan, calls, requests
from chaos.side import Side, until
from outboard import AsyncMPClient, EngineDeadError, EngineGroup, launch_engines
from support import children

__all__ = ["Report", "run_plan"]

# How long what must end may take to end. It includes restarts, on a busy machine.
_PATIENCE = 15.0
# What must not be written to stderr, unless an exception was asked for.
_BAD_WORDS = ("Traceback (most recent call last)", "Exception ignored", "never retrieved", "ResourceWarning")


@dataclass
class Report:
    """What became of a schedule.

    Attributes:
        struck: faults that were injected, by kind; its end counts as one.
        requests, calls, deaths: how many there were.
        violations: what must not be.
        stderr: the last that was written there, where something was wrong.
    """

    seed: int
    seconds: float
    struck: dict[str, int]
    requests: int
    calls: int
    deaths: int
    violations: list[Violation] = field(default_factory=list)
    stderr: str = ""


def run_plan(plan: Plan) -> Report:
    """Runs a plan."""
    started = time.monotonic()
    with Watch() as watch:
        script = watch.home / "script"
        if plan.engine == "chaos":
            options = {**plan.config.options, "script": str(script)}
            plan = dataclasses.replace(plan, config=msgspec.structs.replace(plan.config, options=options))
        ledger = Ledger(plan)
        try:
            _Schedule(ledger, script).run()
        except Exception:
            ledger.violate("ending", f"the schedule broke off:\n{traceback.format_exc()}")
        violations = ledger.judge()
        requests, calls = len(ledger.requests), len(ledger.calls)
        deaths = len(ledger.died)
        struck = dict(ledger.struck)
        expected = _expected_errors(ledger), ledger.tracebacks or plan.end == "die in shutdown" or ledger.garbage
        del ledger  # it holds arrays, which hold shared memory
        violations += [Violation("leftover", text) for text in watch.left()]
    for text in watch.errors:
        if not any(part in text for part in expected[0]):
            violations.append(Violation("log", text))
    violations += [Violation("log", text) for text in watch.unraisable]
    if not expected[1]:
        violations += [Violation("log", f"on stderr: {word}") for word in _BAD_WORDS if word in watch.stderr]
    return Report(
        plan.seed,
        time.monotonic() - started,
        struck | {f"end: {plan.end}": 1},
        requests,
        calls,
        deaths,
        violations,
        watch.stderr[-6000:] if violations else "",
    )


def _expected_errors(ledger: Ledger) -> list[str]:
    expected = []
    if ledger.spent:
        expected.append("outboard.launch: engine core rank 0")
        expected.append("outboard.launch: Engine core rank 0")
    if ledger.raising_callbacks:
        expected.append("outboard.frontend: the call-back of request")
    return expected


class _Schedule:
    """One plan at work."""

    def __init__(self, ledger: Ledger, script: Path) -> None:
        self._ledger = ledger
        self._plan = ledger.plan
        self._script = script
        self._side: Side
        self._group: EngineGroup | None = None

    def run(self) -> None:
        """From start to end."""
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
        if self._plan.uvloop:
            import uvloop

            loop_factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(self._main())
        if "closed" in self._plan.end:
            self._side.client.shutdown()
        if self._group is not None:
            self._group.shutdown()

    async def _main(self) -> None:
        ledger, plan = self._ledger, self._plan
        if plan.group:
            self._group = await asyncio.to_thread(launch_engines, plan.config)
        sides: dict[str, type[LLMSide | AsyncMPSide | SyncMPSide]] = {
            "llm": LLMSide,
            "mp": AsyncMPSide,
            "sync": SyncMPSide,
        }
        self._side = side = sides[plan.side](ledger, self._group)
        await side.start()
        over = asyncio.Event()
        traffic = [
            asyncio.create_task(self._work(index, over), name=f"worker {index}") for index in range(plan.workers)
        ]
        traffic += [
            asyncio.create_task(self._call(index, over), name=f"caller {index}") for index in range(plan.callers)
        ]
        striker = Striker(side, self._group, self._script)
        for strike in plan.strikes:
            task = asyncio.create_task(striker.strike(strike), name=f"strike {strike.kind}")
            await self._ends([task], 2 * _PATIENCE)
        await asyncio.sleep(plan.calm)
        if plan.end in MIDDLE:
            if plan.end == "loop closed in the middle":
                ledger.loop_closed = ledger.closing = True
                return
            await self._end()
            await self._ends([*traffic, *striker.tasks])
        else:
            over.set()
            await self._ends([*traffic, *striker.tasks])
            await self._nothing_waits()
            if plan.end == "closed loop":
                return
            await self._end()
        del striker, traffic, side
        await self._after()

    # --- traffic ---

    async def _work(self, index: int, over: asyncio.Event) -> None:
        for number, plan in enumerate(requests(self._plan, index)):
            if over.is_set() or self._over:
                return
            request = await self._side.request(plan, f"{index}-{number}")
            # A retry comes a little later, and another request not at once: there are enough.
            await asyncio.sleep(0.02 if request.raised is not None else 0.002)

    async def _call(self, index: int, over: asyncio.Event) -> None:
        for plan in calls(self._plan, index):
            await asyncio.sleep(plan.delay)
            if over.is_set() or self._over:
                return
            await self._side.make_call(plan)

    @property
    def _over(self) -> bool:
        return self._side.gone or self._ledger.loop_closed

    async def _ends(self, tasks: Iterable[asyncio.Task[Any]], seconds: float | None = None) -> None:
        """All of this must end by itself; whatever does not is told of, and cancelled."""
        tasks = list(tasks)
        if not tasks:
            return
        done, pending = await asyncio.wait(tasks, timeout=_PATIENCE if seconds is None else seconds)
        for task in pending:
            self._ledger.violate("hung", f"{task.get_name()} waits:\n{_stack(task)}{self._state()}")
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=2)
        for task in done:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, EngineDeadError):
                text = f"{type(error).__name__}: {error}"
                self._ledger.violate("ending", f"{task.get_name()} failed: {text}\n{_stack(task)}")

    def _state(self) -> str:
        client = self._side.client
        return f"    client: {client.stats()}, {client.engine_status[0].state}, failure: {client._membership.failure!r}"

    async def _nothing_waits(self) -> None:
        """With all readers gone, nothing may be left, here or in the engine core."""
        side, ledger = self._side, self._ledger

        def empty() -> bool:
            stats = side.client.stats()
            return not stats["requests"] and not stats["utility_calls"]

        if not await until(empty, 3):
            ledger.violate("stats", f"all have ended, and the client says {side.client.stats()}")
        deadline = time.monotonic() + 5
        while await side.ready():
            try:
                stats = await side.call("get_stats", timeout=5.0)
            except EngineDeadError:
                await asyncio.sleep(0.01)
                continue
            if not stats["requests"]:
                return
            if time.monotonic() > deadline:
                ledger.violate("stats", f"all have ended, and the engine core says {stats}")
                return
            await asyncio.sleep(0.01)
        if not side.gone:
            ledger.violate("hung", f"the engine core does not get ready: it is {side.state}")

    # --- the end ---

    async def _end(self) -> None:
        side, ledger, end = self._side, self._ledger, self._plan.end
        alive = not side.gone
        ledger.closing = True
        async with asyncio.timeout(2 * _PATIENCE):
            if "drain" in end:
                assert isinstance(side, LLMSide) and side.llm is not None
                ledger.drained = end != "drain"
                try:
                    whole = await side.llm.drain(0.05 if end == "drain cut short" else _PATIENCE)
                except EngineDeadError as error:
                    if not ledger.spent:
                        ledger.violate("ending", f"drain raised {error}")
                else:
                    if alive and end == "drain" and not whole:
                        ledger.violate("ending", "drain with nothing in flight says that it cut something")
            elif end == "two shutdowns":
                await asyncio.gather(side.shutdown(), side.shutdown(0), return_exceptions=False)
            elif end == "dropped":
                await side.drop()
            elif end == "reading cancelled":
                assert isinstance(side.client, AsyncMPClient) and side.client.output_queue_task is not None
                ledger.reading_cancelled = True
                side.client.output_queue_task.cancel()
                if not await until(lambda: side.gone, 2):
                    ledger.violate("hung", "reading was cancelled, and nobody noticed")
                await side.shutdown()
            elif end == "group first":
                assert self._group is not None
                ledger.group_gone = True
                await asyncio.to_thread(self._group.shutdown)
                if not await until(lambda: side.gone, 4):
                    ledger.violate("hung", "the group was shut down, and its front end did not notice")
                await side.shutdown()
            else:
                await side.shutdown(0 if end == "kill in the middle" else None)

    async def _after(self) -> None:
        """What must be so once it has ended, while there is still a loop."""
        side, ledger = self._side, self._ledger
        if self._plan.end == "dropped":
            gc.collect()
            if not await until(lambda: not children(), 6):
                ledger.violate("leftover", "the client was dropped, and its processes run on")
            return
        try:
            await side.call("get_stats", timeout=5.0)
        except EngineDeadError:
            pass
        else:
            ledger.violate("ending", "a call was answered after the end")
        if isinstance(side, SyncMPSide | AsyncMPSide) or side.client.stats()["requests"]:
            stats = side.client.stats()
            if stats["requests"] or stats["utility_calls"]:
                ledger.violate("stats", f"after the end the client says {stats}")
        if self._group is not None and self._plan.end != "group first":
            directory = side.directory
            if not await until(lambda: [path.name for path in directory.iterdir()] == ["control"], 4):
                ledger.violate("leftover", f"sockets: {[path.name for path in directory.iterdir()]}")
        current = asyncio.current_task()
        await until(lambda: asyncio.all_tasks() == {current}, 2)
        for task in asyncio.all_tasks() - {current}:
            ledger.violate("leftover", f"a task: {task!r:.300}")


def _stack(task: asyncio.Task[Any]) -> str:
    text = io.StringIO()
    task.print_stack(file=text)
    return text.getvalue()
