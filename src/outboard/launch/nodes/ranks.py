"""The engine cores that a node runs for its head."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Any

from outboard.launch.nodes.watch import RankWatch
from outboard.launch.process import EngineProcess
from outboard.protocol.environment import ChildEnvironment
from outboard.protocol.nodes import (
    NodeWelcome,
    RankExited,
    RankForgotten,
    RankStarted,
    SignalRank,
    StartRank,
    WatchRank,
)
from outboard.transport.session import SessionDirectory

__all__ = ["NodeRanks"]

logger = logging.getLogger("outboard.node")

# For a warden to kill what it guards, seconds; then it is killed itself, with what can be found of the rest.
_KILL_BOUND = 10.0


@dataclass(slots=True)
class _Running:
    """An engine core."""

    process: EngineProcess
    place: int
    watch: RankWatch | None = None
    killed_by: float | None = None  # when a kill must have had its effect
    terminated: bool = False


class NodeRanks:
    """Of one life of a node. Belongs to its thread.

    Args:
        welcome: what engine cores must know of the head.
        session: for what wardens remove if this process is gone.
        places: how many there is room for.
        search_path: where engine cores find modules.
    """

    def __init__(self, welcome: NodeWelcome, session: SessionDirectory, places: int, search_path: str) -> None:
        self._welcome = welcome
        self._session = session
        self._places = places
        self._search_path = search_path
        self._running: dict[tuple[int, int], _Running] = {}  # by rank and incarnation
        self._exited: dict[tuple[int, int], RankExited] = {}  # until the head has heard of it
        self._leaving = False
        self._over: set[tuple[int, int]] = set()  # all that have ended, or must not be started any more

    def __len__(self) -> int:
        return len(self._running)

    @property
    def sentinels(self) -> list[int]:
        """Readable once one has ended."""
        return [running.process.sentinel for running in self._running.values()]

    @property
    def due(self) -> float | None:
        """When to call `look` although none has ended."""
        return min((one.killed_by for one in self._running.values() if one.killed_by is not None), default=None)

    # --- what the head wants; each returns what to answer ---

    def start(self, what: StartRank) -> RankStarted | RankExited | None:
        """Starts an engine core, if it has not been."""
        key = (what.rank, what.incarnation)
        if key in self._over:
            return self._exited.get(key)
        if key not in self._running:
            if self._leaving:
                return self._end_unstarted(key, "the node is being stopped")
            taken = {running.place for running in self._running.values()}
            place = next((place for place in range(self._places) if place not in taken), None)
            if place is None:
                return self._end_unstarted(key, f"it has {self._places} places, and all are taken")
            welcome = self._welcome
            where = ChildEnvironment(
                welcome.control_address,
                welcome.session_token,
                *key,
                keys=welcome.keys,
                search_path=self._search_path,
                place=place,
                places=self._places,
            )
            try:
                process = EngineProcess.start({**os.environ, **what.env, **where.to_environ()}, self._session.path)
            except (OSError, ValueError) as error:  # the latter of variables that no process can have
                return self._end_unstarted(key, str(error))
            self._running[key] = _Running(process, place)
            logger.info("engine core rank %d is being started", what.rank)
        return RankStarted(*key)

    def signal(self, what: SignalRank, now: float) -> RankExited | None:
        """Asks an engine core for its end, or kills it."""
        key = (what.rank, what.incarnation)
        running = self._running.get(key)
        if running is None:
            return self._exited.get(key) if key in self._over else self._end_unstarted(key, "it is not wanted any more")
        if what.kill:
            self._kill(running, now)
        else:
            self._terminate(running)
        return None

    def watch(self, what: WatchRank) -> None:
        """Tells how an engine core goes on, from now on."""
        running = self._running.get((what.rank, what.incarnation))
        if running is not None and running.watch is None:
            try:
                running.watch = RankWatch(what, self._welcome.stall_timeout)
            except (OSError, ValueError) as error:
                logger.info("engine core rank %d cannot be watched for stalls: %s", what.rank, error)

    def forget(self, what: RankForgotten) -> None:
        """The head knows how one has ended."""
        self._exited.pop((what.rank, what.incarnation), None)

    # --- what is to be told ---

    def look(self, now: float) -> list[RankExited]:
        """Those that have ended since the last call."""
        news = []
        for key, running in list(self._running.items()):
            process = running.process
            if process.poll() is None and running.killed_by is not None and now >= running.killed_by:
                process.kill(force=True)
                running.killed_by = now + _KILL_BOUND
            if process.poll() is not None:
                news.append(self._end(key, running))
        return news

    def unanswered(self) -> list[RankExited]:
        """Those that have ended, and of which the head does not know yet."""
        return list(self._exited.values())

    def progress(self) -> list[Any]:
        """How those go on that are watched."""
        return [running.watch.look() for running in self._running.values() if running.watch is not None]

    # --- the end ---

    def terminate_all(self) -> None:
        """Asks all for their end, and starts no more."""
        self._leaving = True
        for running in self._running.values():
            self._terminate(running)

    def kill_all(self, now: float) -> None:
        """Kills all. Does not wait."""
        for running in self._running.values():
            self._kill(running, now)

    def end_all(self) -> list[RankExited]:
        """Kills all, and waits until they have ended; a process that the system cannot end is left behind."""
        now = time.monotonic()
        self.kill_all(now)  # first, so that they end side by side
        deadline = now + _KILL_BOUND
        news = []
        for key, running in list(self._running.items()):
            running.process.end(max(deadline - time.monotonic(), 0.0))
            news.append(self._end(key, running))
        return news

    def _terminate(self, running: _Running) -> None:
        if not running.terminated:
            running.terminated = True
            running.process.terminate()

    def _kill(self, running: _Running, now: float) -> None:
        if running.killed_by is None:
            running.killed_by = now + _KILL_BOUND
            running.process.kill()

    def _end(self, key: tuple[int, int], running: _Running) -> RankExited:
        process = running.process
        report = process.report
        exited = RankExited(
            *key,
            pid=process.engine_pid,
            exit_code=process.poll(),
            stderr_tail=report.read_stderr_tail(),
            report=report.read_report(),
            verdict=process.oom_verdict,
        )
        process.close()
        if running.watch is not None:
            running.watch.close()
        del self._running[key]
        return self._note(key, exited)

    def _end_unstarted(self, key: tuple[int, int], failure: str) -> RankExited:
        return self._note(key, RankExited(*key, failure=failure))

    def _note(self, key: tuple[int, int], exited: RankExited) -> RankExited:
        self._over.add(key)
        self._exited[key] = exited
        return exited
