"""OpenAI's own client on the application, without a network: what its users see of answers and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import openai
import pytest

from fake_server import FakeServer, give
from outboard.errors import EngineDeadError, PromptTooLongError

_T = TypeVar("_T")
_HELLO: Any = [{"role": "user", "content": "hello"}]


def _with_client(
    server: FakeServer, use: Callable[[openai.AsyncOpenAI], Awaitable[_T]], answer: Callable[[Any], None] | None = None
) -> _T:
    """What `use` makes of the client; each request to the engine is given to `answer`."""

    async def answers() -> None:
        answered = len(server.engine.requests)
        while True:
            for request in server.engine.requests[answered:]:
                assert answer is not None
                answer(request)
            answered = len(server.engine.requests)
            await asyncio.sleep(0)

    async def go() -> _T:
        task = asyncio.ensure_future(answers())
        transport = httpx.ASGITransport(server.app)  # type: ignore[arg-type]
        async with asyncio.timeout(10), httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(base_url="http://x/v1", api_key="k", http_client=http, max_retries=0)
            used = await use(client)
        assert not task.done() or task.result()
        task.cancel()
        return used

    return asyncio.run(go())


def _hello(request: Any) -> None:
    give(request, "Hel")
    if request.on_text is not None:
        request.on_text("lo")
        give(request, "!", "stop")
    else:
        give(request, "lo!", "stop")


def _whole(request: Any) -> None:
    give(request, "Hello!", "stop")


def test_chat() -> None:
    async def use(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(model="m", messages=_HELLO)

    answer = _with_client(FakeServer(), use, _whole)
    assert answer.choices[0].message.content == "Hello!" and answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 2
    assert answer._request_id


def test_completions_of_several_prompts() -> None:
    async def use(client: openai.AsyncOpenAI) -> Any:
        return await client.completions.create(model="m", prompt=["a", "b"])

    answer = _with_client(FakeServer(), use, _whole)
    assert [choice.text for choice in answer.choices] == ["Hello!", "Hello!"]


def test_streams() -> None:
    async def use(client: openai.AsyncOpenAI) -> Any:
        chat = await client.chat.completions.create(
            model="m", messages=_HELLO, stream=True, stream_options={"include_usage": True}
        )
        completion = await client.completions.create(model="m", prompt="x", stream=True)
        return [one async for one in chat], [one async for one in completion]

    chat, completion = _with_client(FakeServer(), use, _hello)
    assert "".join(one.choices[0].delta.content or "" for one in chat if one.choices) == "Hello!"
    assert chat[-1].usage.total_tokens == 3 and not any(one.usage for one in chat[:-1])
    assert "".join(one.choices[0].text for one in completion) == "Hello!"


def test_the_helper_for_streams_of_chat() -> None:
    async def use(client: openai.AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(model="m", messages=_HELLO) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_completion()

    answer = _with_client(FakeServer(), use, _hello)
    assert answer.choices[0].message.content == "Hello!" and answer.choices[0].finish_reason == "stop"


def test_models() -> None:
    async def use(client: openai.AsyncOpenAI) -> Any:
        return [one.id async for one in client.models.list()], (await client.models.retrieve("m")).id

    assert _with_client(FakeServer(), use) == (["m"], "m")


@pytest.mark.parametrize(
    ("config", "asked", "error", "code"),
    [
        ({"api_keys": ["other"]}, {}, openai.AuthenticationError, "invalid_api_key"),
        ({}, {"model": "gpt-4"}, openai.NotFoundError, "model_not_found"),
        ({}, {"temperature": 3}, openai.BadRequestError, "invalid_value"),
        ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, None),
    ],
)
def test_errors_have_the_clients_own_types(
    config: Any, asked: Any, error: type[openai.APIStatusError], code: Any
) -> None:
    async def use(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(error) as caught:
            await client.chat.completions.create(**{"model": "m", "messages": _HELLO, **asked})
        return caught.value

    told = _with_client(FakeServer(**config), use)
    assert told.code == (code or "unsupported_parameter")
    if told.status_code == 400:
        assert told.param == next(iter(asked))
    assert told.request_id


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine(stream: bool) -> None:
    server = FakeServer()

    async def use(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="m", messages=_HELLO, stream=stream)
        return caught.value

    told = _with_client(server, use, lambda request: request.on_output(EngineDeadError("it died")))
    assert (told.status_code, told.code) == (503, "engine_dead")
    server.engine.raises = PromptTooLongError("too long")
    told = _with_client(server, use)
    assert (told.status_code, told.code) == (400, "context_length_exceeded")


def test_an_error_in_the_middle_of_a_stream_is_raised() -> None:
    def dies(request: Any) -> None:
        give(request, "Hel")
        request.on_output(EngineDeadError("it died"))

    async def use(client: openai.AsyncOpenAI) -> tuple[str, openai.APIError]:
        text = ""
        stream = await client.chat.completions.create(model="m", messages=_HELLO, stream=True)
        with pytest.raises(openai.APIError, match="it died") as caught:
            async for one in stream:
                text += one.choices[0].delta.content or ""
        return text, caught.value

    text, told = _with_client(FakeServer(), use, dies)
    assert text == "Hel" and told.code == "engine_dead"
