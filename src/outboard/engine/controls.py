"""What the busy loop does for every engine, by utility calls: pausing, sleeping, profiling, statistics.

paused, "abort"   what ran was aborted; new requests are held
paused, "wait"    what runs goes on to its end, which the call waits for; new requests are held
paused, "keep"    no step is taken; what ran goes on when resumed; new requests are held
sleeping          paused, and the engine has given memory back
"""

from __future__ import annotations

import cProfile
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from outboard.engine.core import EngineCore, OutputBatch
from outboard.errors import UtilityError
from outboard.protocol.messages import EngineCoreRequest, SchedulerStats

__all__ = ["Controls", "PauseMode"]

PauseMode = Literal["abort", "wait", "keep"]


class Controls:
    """Holds requests back and forbids steps, as its utilities are called. Belongs to the busy loop.

    Args:
        engine: the engine core.
        batch: the open requests, held ones included.
        admit: hands a request that was held to the engine.

    Attributes:
        held: requests that came while paused, by id, in order of arrival.
        paused: whether new requests are to be held.
        frozen: whether no step may be taken.
        utilities: the utility calls by name; they go before the engine's own.
    """

    def __init__(self, engine: EngineCore, batch: OutputBatch, admit: Callable[[EngineCoreRequest], None]) -> None:
        self._engine = engine
        self._batch = batch
        self._admit = admit
        self._waiting: list[Future[None]] = []  # calls of pause_generation("wait")
        self._sleeping = False
        self._profile: cProfile.Profile | None = None
        self._profile_path = Path()
        self.held: dict[str, EngineCoreRequest] = {}
        self.paused = False
        self.frozen = False
        self.utilities: dict[str, Callable[..., Any]] = {
            method.__name__: method
            for method in (
                self.pause_generation,
                self.resume_generation,
                self.is_paused,
                self.sleep,
                self.wake_up,
                self.is_sleeping,
                self.start_profile,
                self.stop_profile,
                self.get_stats,
            )
        }

    # --- for the busy loop ---

    def after_step(self) -> None:
        """Answers those that wait for the engine to be empty, once it is."""
        if self._waiting and len(self._batch) == len(self.held):
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                future.set_result(None)

    def stats(self) -> SchedulerStats:
        """The engine's load, held requests counted as waiting."""
        stats = self._engine.scheduler_stats() or SchedulerStats(running=len(self._batch) - len(self.held))
        if self.held:
            return SchedulerStats(stats.waiting + len(self.held), stats.running, stats.kv_cache_usage)
        return stats

    # --- utilities ---

    def pause_generation(self, mode: PauseMode = "abort") -> Future[None] | None:
        """Holds new requests from now on.

        Args:
            mode: what becomes of those that run: "abort" ends them, "wait" lets them end (the call is answered then),
                "keep" freezes them.
        """
        self.paused = True
        self.frozen = self._sleeping or mode == "keep"
        if mode == "abort":
            self._abort_all()
        if mode != "wait":
            return None
        done: Future[None] = Future()
        self._waiting.append(done)
        self.after_step()
        return done

    def resume_generation(self) -> Future[None] | None:
        """Ends a pause; held requests go to the engine in order of arrival. Without a pause it does nothing.

        Raises:
            UtilityError: the engine sleeps.
        """
        if self._sleeping:
            raise UtilityError("the engine sleeps: call wake_up, not resume_generation")
        self.paused = self.frozen = False
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(None)
        held, self.held = self.held, {}
        for request in held.values():
            self._admit(request)
        return None

    def is_paused(self) -> bool:
        """Whether new requests are held."""
        return self.paused

    def sleep(self, level: int = 1) -> Future[None] | None:
        """Aborts what runs, pauses, and has the engine give memory back.

        Raises:
            UnsupportedError: the engine cannot; nothing has changed.
        """
        if type(self._engine).sleep is not EngineCore.sleep:
            self.pause_generation("abort")
        self._engine.sleep(level)
        self._sleeping = self.frozen = True
        return None

    def wake_up(self, tags: list[str] | None = None) -> Future[None] | None:
        """Wakes the engine; once all of it is awake, generation resumes."""
        self._engine.wake_up(tags)
        if self._sleeping and not self._engine.is_sleeping():
            self._sleeping = False
            return self.resume_generation()
        return None

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps, in part or whole."""
        return self._sleeping or self._engine.is_sleeping()

    def start_profile(self, path: str | None = None) -> str:
        """Starts cProfile in the busy loop's thread; where `stop_profile` will write it.

        Args:
            path: the file; default: one in the directory for temporary files.
        """
        if self._profile is not None:
            raise UtilityError(f"a profile is being taken already; stop_profile writes {self._profile_path}")
        default = Path(tempfile.gettempdir()) / f"outboard-{os.getpid()}-{time.time_ns()}.prof"
        self._profile_path = Path(path) if path is not None else default
        self._profile_path.touch()  # whether it can be written to is better known now
        self._profile = cProfile.Profile()
        self._profile.enable()
        return str(self._profile_path)

    def stop_profile(self) -> str:
        """Stops the profile and writes it, for `pstats`; the file's path."""
        if self._profile is None:
            raise UtilityError("no profile is being taken; call start_profile first")
        profile, self._profile = self._profile, None
        profile.disable()
        profile.dump_stats(self._profile_path)
        return str(self._profile_path)

    def get_stats(self) -> dict[str, Any]:
        """Load and state: waiting, running, kv_cache_usage, requests (open ones), held, paused, sleeping, pid."""
        stats = self.stats()
        return {
            "waiting": stats.waiting,
            "running": stats.running,
            "kv_cache_usage": stats.kv_cache_usage,
            "requests": len(self._batch),
            "held": len(self.held),
            "paused": self.paused,
            "sleeping": self.is_sleeping(),
            "pid": os.getpid(),
        }

    def _abort_all(self) -> None:
        running = [request_id for request_id in self._batch.open_requests if request_id not in self.held]
        if running:
            self._engine.abort_requests(running)
            for request_id in running:
                self._batch.add(request_id, finish_reason="abort")
