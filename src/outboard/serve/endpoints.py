"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from outboard.frontend.prompt import Prompt
from outboard.observe.record import RequestRecord
from outboard.protocol.sampling import SamplingParams
from outboard.serve.answer import Answer, StreamedAnswer, WholeAnswer
from outboard.serve.errors import to_api_error
from outboard.serve.exchange import Exchange, Receive, Scope
from outboard.serve.formats import ChatFormat, CompletionFormat
from outboard.serve.generation import Generation
from outboard.serve.outlet import Send
from outboard.serve.parameters import (
    chat_messages,
    chat_params,
    completion_params,
    completion_prompts,
    stream_usage,
)
from outboard.serve.requests import ChatRequest, CompletionRequest, Sampling
from outboard.serve.service import Service

__all__ = ["ChatEndpoint", "CompletionsEndpoint"]

_R = TypeVar("_R", bound=Sampling)


class _GenerationEndpoint(ABC, Generic[_R]):
    """An ASGI application for one path. Its `send` has to be the server's own."""

    path = ""
    _kind: type[_R]
    _format: type[ChatFormat] | type[CompletionFormat]
    _prefix = ""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        record = RequestRecord(request_id=exchange.request_id, path=self.path, started=time.time())
        record.trace_parent = exchange.headers.get(b"traceparent", b"").decode("latin-1")
        record.trace_state = exchange.headers.get(b"tracestate", b"").decode("latin-1")
        try:
            await self._serve(exchange, record)
        except ConnectionError:
            record.error = "client_disconnected"
        except Exception as error:
            told = to_api_error(error)
            record.status, record.error = told.status, told.code or told.type
            await exchange.refuse(told)
            if told.code == "internal_error":
                raise
        finally:
            record.duration = record.duration or time.time() - record.started
            self._service.tell(record)

    async def _serve(self, exchange: Exchange, record: RequestRecord) -> None:
        service, config = self._service, self._service.config
        record.key = service.check_key(exchange)
        request = await exchange.read(self._kind, config.max_body_bytes, config.receive_timeout)
        service.check_model(request.model)
        record.streamed = bool(request.stream)
        params = self._params(request)
        prompts = self._prompts(request)
        with_usage, with_all_usage = stream_usage(request)
        timeout = exchange.timeout(config.request_timeout)
        service.check_taking()
        if config.log_prompts:
            record.prompt = repr(prompts[0] if len(prompts) == 1 else prompts)
        ticket = service.admission.admit(record.key)
        try:
            answer_id = f"{self._prefix}-{secrets.token_hex(12)}"
            form = self._format(answer_id, service.model, service.token_texts, params.logprobs)
            answer: Answer
            if record.streamed:
                answer = StreamedAnswer(
                    exchange,
                    form,
                    with_usage=with_usage,
                    with_all_usage=with_all_usage,
                    slow_bytes=config.slow_reader_bytes,
                    slow_timeout=config.slow_reader_timeout,
                    on_slow=lambda: generation.slow(),
                    on_error=lambda error: generation.fail(error),
                )
            else:
                answer = WholeAnswer(exchange, form)
            generation = Generation(service.llm, answer, ticket, record, timeout)
            service.begin(generation)
            try:
                await generation.begin(prompts, params)
                await exchange.until_over()
            finally:
                generation.close()
                service.end(generation)
        finally:
            ticket.end()

    @abstractmethod
    def _params(self, request: _R) -> SamplingParams:
        """How to continue."""

    @abstractmethod
    def _prompts(self, request: _R) -> Sequence[Prompt]:
        """What to continue."""


class CompletionsEndpoint(_GenerationEndpoint[CompletionRequest]):
    """`POST /v1/completions`."""

    path = "/v1/completions"
    _kind = CompletionRequest
    _format = CompletionFormat
    _prefix = "cmpl"

    def _params(self, request: CompletionRequest) -> SamplingParams:
        return completion_params(request)

    def _prompts(self, request: CompletionRequest) -> Sequence[Prompt]:
        return completion_prompts(request)


class ChatEndpoint(_GenerationEndpoint[ChatRequest]):
    """`POST /v1/chat/completions`."""

    path = "/v1/chat/completions"
    _kind = ChatRequest
    _format = ChatFormat
    _prefix = "chatcmpl"

    def _params(self, request: ChatRequest) -> SamplingParams:
        info = self._service.llm.engine_info
        return chat_params(request, info.structured_outputs)

    def _prompts(self, request: ChatRequest) -> Sequence[Prompt]:
        return [chat_messages(request)]
