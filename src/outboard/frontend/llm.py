"""`AsyncLLM`: prompts in, streams of `RequestOutput` out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import msgspec

from outboard.client.async_mp import AsyncMPClient
from outboard.config import EngineConfig
from outboard.engine.core import Tokenizer
from outboard.engine.loader import load_engine_class
from outboard.engines.registry import resolve_engine
from outboard.errors import ClientClosedError, ConfigError, DuplicateRequestError
from outboard.frontend.dispatcher import Dispatcher
from outboard.frontend.prompt import Prompt, PromptProcessor
from outboard.frontend.slot import OnOutput, Slot
from outboard.frontend.stream import RequestStream
from outboard.frontend.text import TextState
from outboard.protocol.messages import EngineCoreRequest, EngineInfo
from outboard.protocol.sampling import SamplingParams

__all__ = ["AsyncLLM"]

EngineLike: TypeAlias = "EngineConfig | str | type[Any]"


class AsyncLLM:
    """An engine in a process of its own, with prompts in and text out. Belongs to one event loop.

        async with AsyncLLM("openvino") as llm:
            async for output in llm.generate("The capital of France is"):
                print(output.outputs[0].text)

    Building it starts nothing; `async with`, `start` or the first request does. Leaving `async with` shuts down.

    Args:
        engine: an `EngineConfig`, or an engine name, reference or class with default settings.
        options: with a bare engine, the keyword arguments of its constructor.
    """

    def __init__(self, engine: EngineLike, *, options: dict[str, Any] | None = None) -> None:
        if isinstance(engine, EngineConfig):
            if options is not None:
                raise ConfigError("give options inside the EngineConfig, or a bare engine with options")
            self.config = engine
        else:
            self.config = EngineConfig(engine=engine, options=options or {})
        self._start_lock = asyncio.Lock()
        self._running: _Running | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Starts the engine core and waits until it is ready. Idempotent. Cancelling stops start-up.

        Raises:
            ConfigError: the engine, an option or a model file is wrong.
            EngineStartupError: it died, failed or was too slow.
            ClientClosedError: it has been shut down.
        """
        async with self._start_lock:
            if self._closed:
                raise ClientClosedError("this AsyncLLM was shut down; build another one", phase="stopping")
            if self._running is None:
                self._running = await _Running.launch(self.config)

    async def shutdown(self, timeout: float | None = None) -> None:
        """Stops the engine core and frees everything. Idempotent; does not block the loop.

        Requests that run end with `ClientClosedError`.

        Args:
            timeout: seconds that the engine core gets to stop by itself; default `FaultConfig.shutdown_timeout`.
        """
        async with self._start_lock:
            self._closed = True
            running = self._running
        if running is not None:
            await asyncio.to_thread(running.client.shutdown, timeout)

    def generate(
        self,
        prompt: Prompt = "",
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        inputs: Any = None,
    ) -> RequestStream:
        """The outputs for a prompt, as an async iterator. The request is sent with its first `__anext__`.

        Args:
            prompt: text, token ids, or chat messages (`[{"role": "user", "content": "..."}]`).
            sampling_params: how to continue; default `SamplingParams()`.
            request_id: a name for it; must not be in flight. Default: a random one.
            inputs: input of an engine that is not a language model; msgpack values and numpy arrays.

        Returns:
            a stream of `RequestOutput`; see `RequestStream` for its errors and for what cancellation does.
        """
        return self._stream(prompt, sampling_params, request_id, inputs, None)

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        on_output: OnOutput,
        request_id: str | None = None,
        *,
        inputs: Any = None,
    ) -> RequestStream:
        """Sends a request whose outputs go to a callback, with no task to wake: for servers.

        `on_output(output)` is called on the loop while a message is dispatched, so it must be quick; an exception of
        its own aborts the request. The last call has an output with `finished`, or an `OutboardError`.

        Returns:
            the stream, whose `abort` ends the request; it need not be kept.

        Raises:
            InvalidRequestError: the request cannot be served; nothing was sent.
            EngineDeadError: the engine core is gone.
        """
        stream = self._stream(prompt, sampling_params, request_id, inputs, on_output)
        stream.state.stream = stream
        try:
            await stream.begin()
        except BaseException:
            stream.state.stream = None
            raise
        return stream

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends requests as if their streams had been closed. Unknown and finished ids are no error."""
        if self._running is not None:
            ids = [request_id] if isinstance(request_id, str) else request_id
            self._running.abort_requests(ids)

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine core is gone; `ClientClosedError` after shutdown."""
        await self.start()
        self.client.validate_alive()

    @property
    def client(self) -> AsyncMPClient:
        """The client underneath: utility calls, statistics, process ids.

        Raises:
            RuntimeError: nothing has been started.
        """
        if self._running is None:
            raise RuntimeError("this AsyncLLM has not been started; use `async with`, or await start()")
        return self._running.client

    @property
    def engine_info(self) -> EngineInfo:
        """What the engine core reported of itself when it was ready."""
        return self.client.engine_info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer; None if it has none, or nothing has been started."""
        return self._running.tokenizer if self._running is not None else None

    def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        inputs: Any,
        on_output: OnOutput | None,
    ) -> RequestStream:
        name = secrets.token_hex(8) if request_id is None else request_id
        return RequestStream(self, name, params or SamplingParams(), prompt, inputs, on_output)

    # --- for streams ---

    async def submit_stream(self, stream: RequestStream) -> None:
        """Sends the request of a stream."""
        if self._running is None or self._closed:
            await self.start()
        assert self._running is not None
        await self._running.submit(stream)

    def abort_slots(self, slots: Sequence[Slot]) -> None:
        """Ends the completions that have not ended."""
        if self._running is not None:
            self._running.dispatcher.abort(slots)


class _Running:
    """What there is once the engine core is ready."""

    def __init__(self, client: AsyncMPClient, tokenizer: Tokenizer | None) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self._prompts = PromptProcessor(tokenizer, client.engine_info)
        self.dispatcher = Dispatcher(
            asyncio.get_running_loop(),
            client.abort_handles,
            tokenizer,
            client.config.transport.stream_buffer_bytes,
        )
        client.set_output_sink(self.dispatcher.on_message)

    @classmethod
    async def launch(cls, config: EngineConfig) -> _Running:
        client = await AsyncMPClient.launch(config)
        try:
            return cls(client, await asyncio.to_thread(_make_tokenizer, config))
        except BaseException:
            await asyncio.shield(asyncio.to_thread(client.shutdown, 0))
            raise

    async def submit(self, stream: RequestStream) -> None:
        params = stream.params
        token_ids = await self._prompts.process(stream.asked, params, stream.inputs)
        # From here on nothing suspends: either all completions are sent and known, or none.
        if stream.request_id in self.dispatcher.requests:
            raise DuplicateRequestError(f"a request with id {stream.request_id!r} is in flight already")
        stream.prompt_token_ids = list(token_ids)
        stream.state.metrics.num_prompt_tokens = len(token_ids)
        detokenize = params.detokenize and self.tokenizer is not None
        for index in range(params.n):
            request = EngineCoreRequest(
                request_id=stream.request_id if params.n == 1 else f"{index}_{stream.request_id}",
                prompt_token_ids=token_ids,
                sampling_params=_for_completion(params, index),
                inputs=stream.inputs,
                arrival_time=stream.state.metrics.arrival_time,
            )
            try:
                handle = self.client.add_request(request)
            except BaseException:
                self.dispatcher.abort(stream.state.slots)
                stream.state.slots.clear()
                raise
            slot = Slot(stream.state, index, TextState(params, token_ids) if detokenize else None)
            self.dispatcher.add(slot, handle)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            request = self.dispatcher.requests.get(request_id)
            if request is not None:
                self.dispatcher.abort(request.slots)


def _for_completion(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of `n` completions: seeds differ, or all would be the same."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else params.seed + index
    return msgspec.structs.replace(params, n=1, seed=seed)


def _make_tokenizer(config: EngineConfig) -> Tokenizer | None:
    return load_engine_class(resolve_engine(config.engine)).tokenizer(config.options)
