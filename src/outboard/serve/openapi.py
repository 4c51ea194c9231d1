"""The OpenAPI document: request bodies as they are checked, answers as they are written."""

from __future__ import annotations

from typing import Any

import msgspec

from outboard._version import __version__
from outboard.serve.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

__all__ = ["openapi"]

_REF = "#/components/schemas/{name}"
_STRING: dict[str, Any] = {"type": "string"}
_INT: dict[str, Any] = {"type": "integer"}
_LOGPROBS: dict[str, Any] = {"type": ["object", "null"]}
_REASON: dict[str, Any] = {"enum": ["stop", "length", None]}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_USAGE = _object({"prompt_tokens": _INT, "completion_tokens": _INT, "total_tokens": _INT})
_ANSWER = {"id": _STRING, "object": _STRING, "created": _INT, "model": _STRING, "usage": _USAGE}
_MESSAGE = _object({"role": {"const": "assistant"}, "content": _STRING})
_MODEL = _object({"id": _STRING, "object": {"const": "model"}, "created": _INT, "owned_by": _STRING})
_CHOICE = {"index": _INT, "logprobs": _LOGPROBS, "finish_reason": _REASON}
_ANSWERS: dict[str, Any] = {
    "Completion": _object({**_ANSWER, "choices": _list(_object({**_CHOICE, "text": _STRING}))}),
    "ChatCompletion": _object({**_ANSWER, "choices": _list(_object({**_CHOICE, "message": _MESSAGE}))}),
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "Tokens": _object({"tokens": _list(_INT), "count": _INT, "max_model_len": {"type": ["integer", "null"]}}),
    "Text": _object({"prompt": _STRING}),
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _STRING,
                    "type": _STRING,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                }
            )
        }
    ),
}
_WHAT = {
    400: "The request cannot be served; the message names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    405: "The path has no such method.",
    408: "The body took too long.",
    413: "The body is too large.",
    429: "A limit is reached: try again after `Retry-After` seconds.",
    500: "The engine failed with this request.",
    503: "No engine core serves now; with `Retry-After` it is worth another try.",
    504: "The request's time was over.",
}


def openapi(model: str) -> dict[str, Any]:
    """The document for a server of this model."""
    kinds = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    bodies = (400, 401, 404, 408, 413)
    engine = (*bodies, 429, 500, 503, 504)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Outboard",
            "version": __version__,
            "description": f"An OpenAI-compatible API to {model}.",
        },
        "paths": {
            "/v1/completions": _post("Continue a text", "CompletionRequest", "Completion", engine, streams=True),
            "/v1/chat/completions": _post("Answer a chat", "ChatRequest", "ChatCompletion", engine, streams=True),
            "/v1/models": _get("The model that is served", "ModelList", (401,)),
            "/v1/models/{name}": {
                **_get("One model", "Model", (401, 404)),
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": _STRING}],
            },
            "/tokenize": _post("Tokens of a text", "TokenizeRequest", "Tokens", (*bodies, 500)),
            "/detokenize": _post("Text of tokens", "DetokenizeRequest", "Text", (*bodies, 500)),
            "/livez": _get("Whether this process answers", None, ()),
            "/readyz": _get("Whether requests can be served", None, (503,)),
            "/health": _get("As /readyz", None, (503,)),
        },
        "components": {
            "schemas": {**schemas, **_ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _post(summary: str, body: str, answer: str, errors: tuple[int, ...], streams: bool = False) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": _STRING}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
            "responses": {"200": {"description": "The answer.", "content": content}, **_errors(errors)},
        }
    }


def _get(summary: str, answer: str | None, errors: tuple[int, ...]) -> dict[str, Any]:
    right: dict[str, Any] = {"description": "Yes." if answer is None else "The answer."}
    if answer is not None:
        right["content"] = {"application/json": {"schema": _ref(answer)}}
    return {"get": {"summary": summary, "responses": {"200": right, **_errors(errors)}}}


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref("Error")}}
    return {str(status): {"description": _WHAT[status], "content": content} for status in statuses}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}
