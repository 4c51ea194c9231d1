"""The client that makes the traffic; its kinds are in the modules behind this."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from chaos.ledger import Call, Ledger, Request
from chaos.plan import CallPlan, RequestPlan
from outboard import EngineGroup, EngineState, SamplingParams
from outboard.client.base import MPClient

__all__ = ["Side", "params_of", "until"]


class Side(ABC):
    """One front end: makes requests and calls, and notes how they end. Runs on the event loop.

    Args:
        ledger: of the schedule.
        group: the engine cores to join; None: it starts its own.
    """

    def __init__(self, ledger: Ledger, group: EngineGroup | None) -> None:
        self.ledger = ledger
        self.plan = ledger.plan
        self._group = group
        self._client: MPClient | None = None

    @property
    def client(self) -> MPClient:
        assert self._client is not None  # it has started
        return self._client

    @abstractmethod
    async def start(self) -> None:
        """Starts the engine core, or joins it."""

    @abstractmethod
    async def read(self, request: Request) -> None:
        """Makes a request and reads its outputs as planned; raises what ends it."""

    @abstractmethod
    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Makes a utility call; its result."""

    @abstractmethod
    async def shutdown(self, timeout: float | None = None) -> None:
        """Ends the client."""

    async def drop(self) -> None:
        """Lets go of the client without a shutdown."""
        self._client = None

    async def request(self, plan: RequestPlan, name: str) -> Request:
        """Makes a request, to its end."""
        request = self.ledger.request(plan, name)
        try:
            await self.read(request)
        except BaseException as error:
            request.raised = _bare(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            request.over = True
        return request

    async def make_call(self, plan: CallPlan) -> Call:
        """Makes a utility call as planned, to its end."""
        call = self.ledger.call(plan)
        try:
            call.result = await self._make_call(plan)
        except BaseException as error:
            call.raised = _bare(error)
            if isinstance(error, asyncio.CancelledError) and plan.kind != "cancelled":
                raise
        finally:
            call.over = True
        return call

    async def _make_call(self, plan: CallPlan) -> Any:
        match plan.kind:
            case "quick":
                return (await self.call("get_stats"))["requests"]
            case "everybody":
                return (await self.call("collective_rpc", "is_sleeping", None, [], None))[0]
            case "unknown":
                return await self.call("no_such_method")
            case "unsendable":
                return await self.call("get_stats", object())
            case "raises":
                return await self.call("boom")
            case "never":
                return await self.call("never", timeout=plan.after)
            case "blocks":
                return await self.call("hang", "sleep", plan.after)
            case "arrays":
                sent = np.arange(int(1e7 * plan.after), dtype=np.int64)
                if not np.array_equal(got := await self.call("mirror", sent), sent):
                    self.ledger.violate("tokens", f"an array of {len(sent)} came back as {got!r:.100}")
                return len(sent)
            case "cancelled":
                return await self._cancelled_call(plan.after)
        raise AssertionError(plan.kind)

    async def _cancelled_call(self, after: float) -> Any:
        call = asyncio.create_task(self.call("never"))
        await asyncio.wait([call], timeout=after)
        call.cancel()
        return await call

    # --- what there is to be struck ---

    @property
    def directory(self) -> Path:
        """The session's."""
        return Path(self.client.addresses.directory)

    @property
    def state(self) -> EngineState:
        return self.client.engine_status[0].state

    @property
    def gone(self) -> bool:
        """Whether nothing can be asked of the engine core any more."""
        return self._client is None or self.client._membership.failure is not None

    async def ready(self, seconds: float = 10.0) -> bool:
        """Waits until the engine core serves; False if it never will."""
        await until(lambda: self.gone or self.state is EngineState.READY, seconds)
        return not self.gone and self.state is EngineState.READY

    @property
    def engine(self) -> psutil.Process:
        return psutil.Process(self.client.core_engines[0].pid)


def _bare(error: BaseException) -> BaseException:
    """Without what would keep the client alive."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def params_of(request: Request, n: int = 1, stop: str | None = None) -> SamplingParams:
    """What is asked of the engine for this request."""
    plan = request.plan
    return SamplingParams(
        n=n,
        max_tokens=1_000_000 if plan.endless else plan.count,
        output_kind=plan.output_kind,  # type: ignore[arg-type]
        detokenize=plan.text or stop is not None,
        stop=stop,
    )


async def until(condition: Any, seconds: float) -> bool:
    """Waits for what has no event, within a bound; whether it came."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.002)
    return True
