"""An engine that runs, and all that the front end needs to talk to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from outboard.client.async_mp import AsyncMPClient
from outboard.client.data_parallel import client_class
from outboard.config import EngineConfig
from outboard.engine.core import Tokenizer
from outboard.engine.loader import bind_options, load_engine_class
from outboard.engines.registry import resolve_engine
from outboard.errors import DuplicateRequestError
from outboard.frontend.dispatcher import Dispatcher
from outboard.frontend.prompt import PromptProcessor
from outboard.frontend.slot import Slot
from outboard.frontend.stream import RequestStream
from outboard.frontend.text import TextState
from outboard.launch.group import EngineAddresses
from outboard.protocol.messages import EngineCoreRequest
from outboard.protocol.sampling import SamplingParams

__all__ = ["RunningEngine"]


class RunningEngine:
    """What there is once the engine core is ready: client, tokenizer, dispatcher."""

    def __init__(self, client: AsyncMPClient, tokenizer: Tokenizer | None) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self._encoding: dict[str, RequestStream] = {}  # requests whose prompts are being encoded
        self._prompts = PromptProcessor(tokenizer, client.engine_info)
        self.dispatcher = Dispatcher(
            asyncio.get_running_loop(),
            client.abort_handles,
            tokenizer,
            client.config.transport.stream_buffer_bytes,
        )
        client.set_output_sink(self.dispatcher.on_message, request_ids=False)

    @classmethod
    async def launch(
        cls, config: EngineConfig, addresses: EngineAddresses | None = None, client_index: int = 0
    ) -> RunningEngine:
        client = await client_class(config).launch(
            config if addresses is None else None, addresses=addresses, client_index=client_index
        )
        try:
            return cls(client, await asyncio.to_thread(_make_tokenizer, client.config))
        except BaseException:
            await asyncio.shield(asyncio.to_thread(client.shutdown, 0))
            raise

    async def submit(self, stream: RequestStream) -> None:
        params = stream.params
        if stream.request_id in self.dispatcher.requests or stream.request_id in self._encoding:
            raise DuplicateRequestError(f"a request with id {stream.request_id!r} is in flight already")
        self._encoding[stream.request_id] = stream
        try:
            token_ids = await self._prompts.process(stream.asked, params, stream.inputs)
        finally:
            del self._encoding[stream.request_id]
            self.dispatcher.ended.set()
        if stream.closed:
            return
        # From here on nothing suspends: either all completions are sent and known, or none.
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
                data_parallel_rank=stream.data_parallel_rank,
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
            elif request_id in self._encoding:
                self._encoding[request_id].abort()

    @property
    def in_flight(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return [*self.dispatcher.requests, *self._encoding]

    async def wait_until_idle(self) -> None:
        """Returns once no request is in flight."""
        while self.in_flight:
            self.dispatcher.ended.clear()
            await self.dispatcher.ended.wait()


def _for_completion(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of `n` completions: seeds differ, or all would be the same."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else params.seed + index
    return msgspec.structs.replace(params, n=1, seed=seed)


def _make_tokenizer(config: EngineConfig) -> Tokenizer | None:
    engine_class = load_engine_class(resolve_engine(config.engine))
    return engine_class.tokenizer(bind_options(engine_class, config.options))
