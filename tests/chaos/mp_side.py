"""Traffic through the clients below `AsyncLLM`: messages are read, and sorted by request."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

from chaos.ledger import Ledger, Request
from chaos.side import Side, params_of
from outboard import (
    AsyncMPClient,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineGroup,
    SyncMPClient,
)

__all__ = ["AsyncMPSide", "SyncMPSide"]


class _PlainHook(AsyncMPClient):
    seen = 0

    @staticmethod
    def process_engine_outputs(client: _PlainHook | None, outputs: EngineCoreOutputs) -> None:
        if client is not None:
            client.seen += 1


class _CoroutineHook(AsyncMPClient):
    seen = 0

    @staticmethod
    async def process_engine_outputs(client: _CoroutineHook | None, outputs: EngineCoreOutputs) -> None:
        await asyncio.sleep(0)
        if client is not None:
            client.seen += 1


class _Collector(Side):
    """Sorts messages to the requests that wait for them."""

    def __init__(self, ledger: Ledger, group: EngineGroup | None) -> None:
        super().__init__(ledger, group)
        self._open: dict[str, tuple[Request, asyncio.Future[None]]] = {}
        self._failure: EngineDeadError | None = None

    def _take(self, message: EngineCoreOutputs) -> None:
        for output in message.outputs:
            if output.request_id is None or output.request_id not in self._open:
                continue  # aborted, while this was on its way
            request, over = self._open[output.request_id]
            one = request.of(0)
            one.tokens += output.new_token_ids
            one.text += "".join(map(chr, output.new_token_ids))
            if output.result is not None:
                one.results.append(output.result)
            if output.finish_reason is not None:
                one.reason, one.error = output.finish_reason, output.error
                one.ends += 1
                del self._open[output.request_id]
                if not over.done():
                    over.set_result(None)

    def _fail(self, failure: EngineDeadError) -> None:
        self._failure = failure
        for _, over in self._open.values():
            if not over.done():
                over.set_exception(failure.copy())
        self._open.clear()

    async def read(self, request: Request) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        style = request.plan.style
        prompt = request.expected if self.plan.engine == "echo" else [1]
        params = params_of(request)
        if style == "refused":
            prompt = [1 << 40]
        elif style == "refused there" and self.plan.engine != "echo":
            params.max_tokens = None
        asked = EngineCoreRequest(request_id=request.name, prompt_token_ids=prompt, sampling_params=params)
        self._open[request.name] = request, over
        try:
            await self._add(asked)
            if style == "duplicate":
                await self._add(asked)
            if style == "abort":
                await asyncio.wait([over], timeout=request.plan.after)
                if not over.done():
                    request.gave_up = True
                    self._open.pop(request.name)
                    await self._abort(request.name)
                    over.cancel()
                    return
            await over
        finally:
            if self._open.pop(request.name, None) is not None:
                await self._abort(request.name)
            over.cancel()

    async def _add(self, request: EngineCoreRequest) -> None:
        raise NotImplementedError

    async def _abort(self, name: str) -> None:
        raise NotImplementedError


class AsyncMPSide(_Collector):
    """One `AsyncMPClient`, whose messages one task reads, by fits and starts."""

    _reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        kind = {"": AsyncMPClient, "plain": _PlainHook, "coroutine": _CoroutineHook}[self.plan.hook]
        config = self.plan.config if self._group is None else None
        self._client = await kind.launch(config, addresses=None if self._group is None else self._group.addresses)
        self.ledger.on_status(self.client.engine_status[0])
        self.client.subscribe(self.ledger.on_status)
        self._reader = asyncio.create_task(self._read_all(self._client, self._take, self._fail))

    @staticmethod
    async def _read_all(
        client: AsyncMPClient, take: Callable[[EngineCoreOutputs], None], fail: Callable[[EngineDeadError], None]
    ) -> None:
        turn = 0
        while True:
            turn += 1
            try:
                # Cancelling loses nothing, so every now and then it is.
                async with asyncio.timeout(0.003 if turn % 5 == 0 else None):
                    message = await client.get_output_async()
            except TimeoutError:
                continue
            except EngineDeadError as error:
                fail(error)
                return
            take(message)

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        assert isinstance(self._client, AsyncMPClient)
        return await self._client.call_utility_async(method, *args, timeout=timeout)

    async def shutdown(self, timeout: float | None = None) -> None:
        await asyncio.to_thread(self.client.shutdown, timeout)
        if self._reader is not None:
            await self._reader

    async def drop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._reader = None
        await super().drop()
        gc.collect()

    async def _add(self, request: EngineCoreRequest) -> None:
        assert isinstance(self._client, AsyncMPClient)
        await self._client.add_request_async(request)

    async def _abort(self, name: str) -> None:
        if isinstance(self._client, AsyncMPClient):
            await self._client.abort_requests_async([name])


class SyncMPSide(_Collector):
    """One `SyncMPClient`, whose messages a thread reads; calls are made in others."""

    _thread: threading.Thread | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        config = self.plan.config if self._group is None else None
        addresses = None if self._group is None else self._group.addresses
        self._client = await asyncio.to_thread(SyncMPClient, config, addresses=addresses)
        self.ledger.on_status(self.client.engine_status[0])
        self.client.subscribe(self.ledger.on_status)
        self._thread = threading.Thread(target=self._read_all, args=(self._client, loop), name="chaos-reader")
        self._thread.start()

    def _read_all(self, client: SyncMPClient, loop: asyncio.AbstractEventLoop) -> None:
        turn = 0
        while self._thread is not None:
            turn += 1
            try:
                message = client.get_output(timeout=0.003 if turn % 5 == 0 else 0.5)
            except TimeoutError:
                continue
            except EngineDeadError as error:
                loop.call_soon_threadsafe(self._fail, error)
                return
            loop.call_soon_threadsafe(self._take, message)

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        assert isinstance(self._client, SyncMPClient)
        return await asyncio.to_thread(self._client.call_utility, method, *args, timeout=timeout)

    async def _cancelled_call(self, after: float) -> Any:
        """A call that blocks cannot be cancelled: it is given up by its timeout."""
        try:
            await self.call("never", timeout=after)
        except TimeoutError:
            raise asyncio.CancelledError from None

    async def shutdown(self, timeout: float | None = None) -> None:
        await asyncio.to_thread(self.client.shutdown, timeout)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10)

    async def drop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.join, 10)
        await super().drop()
        gc.collect()

    async def _add(self, request: EngineCoreRequest) -> None:
        assert isinstance(self._client, SyncMPClient)
        await asyncio.to_thread(self._client.add_request, request)

    async def _abort(self, name: str) -> None:
        if isinstance(self._client, SyncMPClient):
            await asyncio.to_thread(self._client.abort_requests, [name])
