"""Traffic through `AsyncLLM`: streams and call-backs, read to the end or given up in every way there is."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from chaos.ledger import STOP, Request
from chaos.side import Side, params_of
from outboard import AsyncLLM, DuplicateRequestError, OutboardError, RequestOutput, RequestStream

__all__ = ["LLMSide"]


class LLMSide(Side):
    """One `AsyncLLM`."""

    llm: AsyncLLM | None = None

    async def start(self) -> None:
        if self._group is None:
            self.llm = AsyncLLM(self.plan.config)
        else:
            self.llm = AsyncLLM(addresses=self._group.addresses)
        await self.llm.start()
        self._client = self.llm.client
        self.ledger.on_status(self.client.engine_status[0])
        self.client.subscribe(self.ledger.on_status)

    async def shutdown(self, timeout: float | None = None) -> None:
        assert self.llm is not None
        await self.llm.shutdown(timeout)

    async def drop(self) -> None:
        self.llm = None
        await super().drop()
        gc.collect()

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        assert self.llm is not None
        return await self.llm.client.call_utility_async(method, *args, timeout=timeout)

    def _generate(self, request: Request, n: int = 1, stop: str | None = None) -> RequestStream:
        assert self.llm is not None
        prompt = request.expected if self.plan.engine == "echo" else [1]
        return self.llm.generate(prompt, params_of(request, n, stop), request.name)

    async def read(self, request: Request) -> None:
        style = request.plan.style.replace(" ", "_")
        if style in ("stop_string", "refused_there") and self.plan.engine == "echo":  # it knows neither
            style = "whole"
        await getattr(self, f"_{style}")(request)

    # --- readers ---

    async def _whole(self, request: Request) -> None:
        async for output in self._generate(request):
            note(request, output)

    async def _slow(self, request: Request) -> None:
        async for output in self._generate(request):
            note(request, output)
            await asyncio.sleep(request.plan.pause)

    async def _several(self, request: Request) -> None:
        async for output in self._generate(request, n=3):
            note(request, output)

    async def _stop_string(self, request: Request) -> None:
        async for output in self._generate(request, stop=STOP):
            note(request, output)
        one = request.of(0)
        if one.reason == "stop" and one.text != "abcdefghijklmnopqrstuvw":
            self.ledger.violate("tokens", f"{request.name}: stopped at {STOP!r} with text {one.text!r}")
        elif one.reason == "length" and request.plan.count >= 26:
            self.ledger.violate("tokens", f"{request.name}: did not stop at {STOP!r}")

    async def _cancel(self, request: Request) -> None:
        stream = self._generate(request)
        reader = asyncio.create_task(_read(request, stream))
        await asyncio.wait([reader], timeout=request.plan.after)
        request.gave_up = not reader.done()
        reader.cancel()
        try:
            await reader
        except asyncio.CancelledError:
            if not request.gave_up:
                raise
            await self._rest(request, stream)

    async def _timeout(self, request: Request) -> None:
        stream = self._generate(request)
        try:
            while True:
                async with asyncio.timeout(0.001 + request.plan.after / 4):
                    note(request, await anext(stream))
        except StopAsyncIteration:
            pass
        except TimeoutError:
            request.gave_up = True
            await self._rest(request, stream)

    async def _break(self, request: Request) -> None:
        async for output in self._generate(request):
            note(request, output)
            if len(request.of(0).tokens) >= request.plan.at:
                request.gave_up = True
                break

    async def _aclose(self, request: Request) -> None:
        stream = self._generate(request)
        async for output in stream:
            note(request, output)
            if len(request.of(0).tokens) >= request.plan.at:
                request.gave_up = True
                await stream.aclose()

    async def _abort(self, request: Request) -> None:
        assert self.llm is not None
        reader = asyncio.create_task(_read(request, self._generate(request)))
        await asyncio.wait([reader], timeout=request.plan.after)
        request.gave_up = not reader.done()
        await self.llm.abort(request.name)
        try:
            await reader
        finally:
            reader.cancel()

    async def _never_read(self, request: Request) -> None:
        self._generate(request)

    async def _rest(self, request: Request, stream: RequestStream) -> None:
        """What had arrived stays readable, and then it has ended."""
        if not request.plan.rest:
            return
        async for output in stream:
            note(request, output)
        # Where it was cancelled before it was sent, "abort" is all that there is.
        reasons = [one.reason for one in request.completions.values()]
        if None in reasons or not reasons:
            self.ledger.violate("ending", f"{request.name}: given up, and no end came: {reasons}")

    # --- call-backs ---

    async def _submit(self, request: Request, stop_at: int | None = None, raises: bool = False) -> None:
        assert self.llm is not None
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        streams: list[RequestStream] = []

        def on_output(output: RequestOutput | OutboardError) -> None:
            if over.cancelled():
                pass  # nobody waits for it any more
            elif over.done():
                self.ledger.violate("ending", f"{request.name}: called back after the end, with {output!r:.100}")
            elif isinstance(output, OutboardError):
                over.set_exception(output)
            else:
                note(request, output)
                if output.finished:
                    over.set_result(None)
                elif stop_at is not None and len(request.of(0).tokens) >= stop_at and not request.gave_up:
                    request.gave_up = True
                    if raises:
                        over.set_result(None)
                        self.ledger.raising_callbacks = True
                        raise LookupError("a callback that raises")
                    if streams:
                        streams[0].abort()

        prompt = request.expected if self.plan.engine == "echo" else [1]
        try:
            streams.append(await self.llm.submit(prompt, params_of(request), on_output, request.name))
        except BaseException:
            if not over.cancel() and over.exception() is not None:
                self.ledger.violate("ending", f"{request.name}: submit raised, and its callback was told of the end")
            raise
        if stop_at is None and not raises and request.plan.style == "submit and abort":
            await asyncio.wait([over], timeout=request.plan.after)
            request.gave_up = not over.done()
            streams[0].abort()
        if stop_at is None or raises:
            streams.clear()  # it need not be kept
        await over

    async def _submit_and_abort(self, request: Request) -> None:
        await self._submit(request)

    async def _abort_inside(self, request: Request) -> None:
        await self._submit(request, request.plan.at)

    async def _submit_and_raise(self, request: Request) -> None:
        await self._submit(request, request.plan.at, raises=True)

    # --- what is refused ---

    async def _duplicate(self, request: Request) -> None:
        twin = self._generate(request)
        reader = asyncio.create_task(_read_all(twin))
        try:
            await asyncio.sleep(0)
            if reader.done():
                await reader
            async for output in self._generate(request):
                note(request, output)
                if reader.done():  # the twin was quicker, or ended by a fault
                    await reader
                    raise DuplicateRequestError("the twin has ended by itself")
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _refused(self, request: Request) -> None:
        assert self.llm is not None
        async for output in self.llm.generate([1 << 40], params_of(request), request.name):
            note(request, output)

    async def _refused_there(self, request: Request) -> None:
        """Without a limit: only the engine can tell."""
        assert self.llm is not None
        params = params_of(request)
        params.max_tokens = None
        async for output in self.llm.generate([1], params, request.name):
            note(request, output)


async def _read(request: Request, stream: RequestStream) -> None:
    async for output in stream:
        note(request, output)


async def _read_all(stream: RequestStream) -> None:
    async for _ in stream:
        pass


def note(request: Request, output: RequestOutput) -> None:
    """Enters an output."""
    delta = request.plan.output_kind == "delta"
    for completion in output.outputs:
        one = request.of(completion.index)
        if delta:
            one.tokens += completion.token_ids
            one.text += completion.text
        else:
            one.tokens = list(completion.token_ids)
            one.text = completion.text
        if completion.result is not None:
            one.results.append(completion.result)
        if completion.finish_reason is not None:
            one.reason, one.error = completion.finish_reason, completion.error
            one.ends += 1
