"""What the supervisor knows of the engine cores, gathered once a second and written for all to read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outboard.client.async_mp import AsyncMPClient
from outboard.errors import OutboardError
from outboard.observe.engines import EngineReport, ServerReport, write_report
from outboard.protocol.control import EngineState, EngineStatus

__all__ = ["Reporter"]

logger = logging.getLogger("outboard.serve")

_INTERVAL = 1.0  # seconds
# An engine core in a long step answers late; it is asked again only then.
_ANSWER_TIMEOUT = 60.0


class Reporter:
    """Belongs to the supervisor's loop.

    Args:
        client: to the engine cores.
        path: of the file.
        server: a report with all that is not of engine cores.
    """

    def __init__(self, client: AsyncMPClient, path: Path, server: Callable[[], ServerReport]) -> None:
        self._client = client
        self._path = path
        self._server = server
        self._stats: dict[int, dict[str, Any]] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._stalls: dict[int, int] = {}
        self._steps: dict[int, tuple[int, int, int]] = {}  # rank -> incarnation, steps of earlier ones, its steps
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begins to write."""
        self._unsubscribe = self._client.subscribe(self._on_status)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Writes no more."""
        self._unsubscribe()
        tasks = [task for task in (self._task, *self._asking.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def report(self) -> ServerReport:
        """All that is known now."""
        report = self._server()
        report.engines = [self._engine(status) for status in self._client.engine_status]
        return report

    def _on_status(self, status: EngineStatus) -> None:
        if status.state is EngineState.STALLED:
            self._stalls[status.rank] = self._stalls.get(status.rank, 0) + 1
        if status.state is not EngineState.READY:
            self._stats.pop(status.rank, None)
        self._changed.set()

    async def _run(self) -> None:
        while True:
            self._ask()
            try:
                write_report(self._path, self.report())
            except FileNotFoundError:
                return  # its directory is gone: engine cores and all have ended
            except OSError as error:
                logger.error("cannot write %s: %s", self._path, error)
            self._changed.clear()
            try:
                async with asyncio.timeout(_INTERVAL):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        for status in self._client.engine_status:
            if status.state is EngineState.READY and status.rank not in self._asking:
                self._asking[status.rank] = loop.create_task(self._ask_one(status.rank))

    async def _ask_one(self, rank: int) -> None:
        try:
            self._stats[rank] = await self._client.call_utility_async("get_stats", rank=rank, timeout=_ANSWER_TIMEOUT)
        except (OutboardError, ValueError):  # ValueError: it has been scaled away just now
            self._stats.pop(rank, None)
        finally:
            del self._asking[rank]

    def _engine(self, status: EngineStatus) -> EngineReport:
        rank = status.rank
        stats = self._stats.get(rank, {})
        failure = status.death.reason if status.death is not None else ""
        if status.stall is not None:
            failure = f"no progress for {status.stall.age:.1f} s; the process is {status.stall.process}"
        progress = self._client.engine_progress(rank)
        return EngineReport(
            rank=rank,
            state=status.state.value,
            pid=status.pid,
            incarnation=status.incarnation,
            running=stats.get("running", 0),
            waiting=max(0, stats.get("waiting", 0) - stats.get("held", 0)),
            held=stats.get("held", 0),
            kv_cache_usage=stats.get("kv_cache_usage", 0.0),
            steps=self._count_steps(rank, status.incarnation, progress[0] if progress is not None else 0),
            last_step_age=None if progress is None else round(progress[1], 3),
            stalls=self._stalls.get(rank, 0),
            paused=stats.get("paused", False),
            sleeping=stats.get("sleeping", False),
            failure=failure,
            node=status.node,
            waits=status.waits,
        )

    def _count_steps(self, rank: int, incarnation: int, steps: int) -> int:
        known, earlier, last = self._steps.get(rank, (incarnation, 0, 0))
        if known != incarnation:
            earlier, last = earlier + last, 0
        self._steps[rank] = incarnation, earlier, max(last, steps)
        return earlier + max(last, steps)
