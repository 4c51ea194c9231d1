"""The application of an API process: what is streamed, and everything beside it."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from outboard.errors import OutboardError
from outboard.serve.endpoints import ChatEndpoint, CompletionsEndpoint
from outboard.serve.errors import ApiError, to_api_error
from outboard.serve.exchange import Exchange, Receive, Scope, request_id_of
from outboard.serve.openapi import openapi
from outboard.serve.outlet import Send
from outboard.serve.parameters import text_messages
from outboard.serve.requests import DetokenizeRequest, TokenizeRequest
from outboard.serve.service import Service

__all__ = ["ApiApp", "error_response", "json_response"]

_UI = Path(__file__).with_name("ui")
_T = TypeVar("_T")


class ApiApp:
    """An ASGI application. Streaming endpoints get the server's own `send`; the rest goes through Starlette."""

    def __init__(self, service: Service) -> None:
        endpoints = (CompletionsEndpoint(service), ChatEndpoint(service))
        self._streaming = {endpoint.path: endpoint for endpoint in endpoints}
        self._rest = _Rest(service).app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._streaming.get(scope.get("path", ""))
        if endpoint is not None and scope["type"] == "http" and scope["method"] == "POST":
            await endpoint(scope, receive, send)
        else:
            await self._rest(scope, receive, _with_request_id(scope, send))


def _with_request_id(scope: Scope, send: Send) -> Send:
    """Has the answer's head echo the request's id. Nothing is streamed this way."""
    if scope["type"] != "http":
        return send

    async def send_with_id(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            echo = (b"x-request-id", request_id_of(dict(scope["headers"])).encode())
            message["headers"] = [*message.get("headers", ()), echo]
        await send(message)

    return send_with_id


class _Rest:
    """All that answers with one document."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._document = msgspec.json.encode(openapi(service.model))
        get, post = ["GET"], ["POST"]
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._only_post, methods=post),
                Route("/v1/chat/completions", self._only_post, methods=post),
                Route("/v1/models", self._models, methods=get),
                Route("/v1/models/{name:path}", self._one_model, methods=get),
                Route("/tokenize", self._tokenize, methods=post),
                Route("/detokenize", self._detokenize, methods=post),
                Route("/livez", self._livez, methods=get),
                Route("/readyz", self._readyz, methods=get),
                Route("/health", self._readyz, methods=get),
                Route("/ping", self._readyz, methods=get),
                Route("/metrics", self._metrics, methods=get),
                Route("/openapi.json", self._openapi, methods=get),
                Route("/ui", lambda request: RedirectResponse("/ui/"), methods=get),
                Mount("/ui", StaticFiles(directory=_UI, html=True)),
            ],
            exception_handlers={
                ApiError: error_response,
                OutboardError: error_response,
                HTTPException: error_response,
                Exception: error_response,
            },
        )

    async def _only_post(self, request: Request) -> Response:
        raise AssertionError("POST goes to the endpoint itself")

    async def _models(self, request: Request) -> Response:
        self._exchange(request)
        return json_response({"object": "list", "data": [self._model()]})

    async def _one_model(self, request: Request) -> Response:
        self._exchange(request)
        self._service.check_model(request.path_params["name"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        info = self._service.llm.engine_info
        return {
            "id": self._service.model,
            "object": "model",
            "created": self._service.created,
            "owned_by": "outboard",
            "root": info.model or self._service.model,
            "max_model_len": info.max_model_len,
        }

    async def _tokenize(self, request: Request) -> Response:
        asked = await self._read(request, TokenizeRequest)
        tokenizer = self._service.tokenizer
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        text = asked.prompt
        if asked.messages is not None:
            messages = text_messages(asked.messages)
            try:
                text = tokenizer.apply_chat_template(messages)
            except Exception as error:  # templates refuse what they do not know in ways of their own
                raise ApiError(400, f"the chat template refused the messages: {error}", param="messages") from error
        # In a thread: a long text takes a while.
        tokens = await asyncio.to_thread(tokenizer.encode, text or "")
        limit = self._service.llm.engine_info.max_model_len
        return json_response({"tokens": list(tokens), "count": len(tokens), "max_model_len": limit})

    async def _detokenize(self, request: Request) -> Response:
        asked = await self._read(request, DetokenizeRequest)
        size = self._service.llm.engine_info.vocab_size
        if size is not None and any(token >= size for token in asked.tokens):
            raise ApiError(400, f"a token is outside the vocabulary: ids are 0 to {size - 1}", param="tokens")
        texts = await asyncio.to_thread(self._service.tokenizer.decode, [asked.tokens], False)
        return json_response({"prompt": texts[0]})

    async def _read(self, request: Request, kind: type[_T]) -> _T:
        exchange = self._exchange(request)
        config = self._service.config
        asked = await exchange.read(kind, config.max_body_bytes, config.receive_timeout)
        self._service.check_model(getattr(asked, "model", None))
        return asked

    def _exchange(self, request: Request) -> Exchange:
        """With its API key checked."""
        exchange = Exchange(request.scope, request.receive, request._send)  # type: ignore[arg-type]
        self._service.check_key(exchange)
        return exchange

    async def _livez(self, request: Request) -> Response:
        return Response()

    async def _readyz(self, request: Request) -> Response:
        self._service.check_ready()
        return Response()

    async def _metrics(self, request: Request) -> Response:
        page = await self._service.render_metrics()
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def _openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")


def json_response(document: Any) -> Response:
    """A document as JSON."""
    return Response(msgspec.json.encode(document), media_type="application/json")


async def error_response(request: Request, error: Exception) -> Response:
    """An error as the API tells it; Starlette's own too."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers.update(error.headers or {})  # such as `allow`
        what = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, what, code=str(error.detail).lower().replace(" ", "_"))
    told = to_api_error(error)
    headers.update({name.decode(): value.decode() for name, value in told.headers})
    return Response(told.body, told.status, headers, "application/json")
