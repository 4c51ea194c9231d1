"""The official `openai` client against the small model, and against engines that say what is expected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serving import Server, eventually, serving
from support import ONE_LOOP, Run

pytestmark = pytest.mark.no_cover  # servers are other processes

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def openvino() -> Iterator[Server]:
    pytest.importorskip("openvino_genai")
    with serving("openvino", admin=True) as server:
        yield server


@pytest.fixture(scope="module")
def mock() -> Iterator[Server]:
    with serving("mock", "--option", "step_ms=2", "--option", "max_model_len=8192", admin=True) as server:
        yield server


def client_of(server: Server, **more: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60, **more)


def async_client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.openvino
@pytest.mark.xdist_group("openvino")
class TestOpenVINO:
    def test_a_chat(self, openvino: Server) -> None:
        with client_of(openvino) as client:
            model = client.models.list().data[0].id
            answer = client.chat.completions.create(
                model=model, messages=MESSAGES, max_completion_tokens=32, temperature=0
            )
        assert isinstance(answer, ChatCompletion)
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        count = openvino.ask("POST", "/tokenize", {"messages": MESSAGES})[2]["count"]
        assert answer.usage.prompt_tokens == count
        assert answer.usage.total_tokens == count + 8

    def test_a_streamed_chat(self, openvino: Server) -> None:
        with client_of(openvino) as client:
            chunks = list(
                client.chat.completions.create(
                    model="smollm2-135m",
                    messages=MESSAGES,
                    max_tokens=32,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
        assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
        *parts, last = chunks
        assert parts[0].choices[0].delta.role == "assistant"
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == "The capital of France is Paris."
        assert parts[-1].choices[0].finish_reason == "stop"
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 8

    def test_completions_and_log_probabilities(self, openvino: Server) -> None:
        with client_of(openvino) as client:
            whole = client.completions.create(
                model="smollm2-135m", prompt="The capital of France is", max_tokens=6, temperature=0, logprobs=1
            )
            parts = client.completions.create(
                model="smollm2-135m", prompt="The capital of France is", max_tokens=6, temperature=0, stream=True
            )
            assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert "".join(logprobs.tokens) == whole.choices[0].text
        assert all(len(top) == 1 for top in logprobs.top_logprobs or ())

    def test_chat_log_probabilities_and_stop(self, openvino: Server) -> None:
        with client_of(openvino) as client:
            answer = client.chat.completions.create(
                model="smollm2-135m",
                messages=MESSAGES,
                max_tokens=32,
                temperature=0,
                logprobs=True,
                top_logprobs=1,
                stop=[" Paris"],
            )
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("The capital of France is", "stop")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert choice.logprobs.content[0].token == "The"
        assert all(len(one.top_logprobs) == 1 for one in choice.logprobs.content)

    def test_several_choices_and_a_seed(self, openvino: Server) -> None:
        def ask(client: openai.OpenAI, n: int) -> list[str | None]:
            answer = client.chat.completions.create(
                model="smollm2-135m", messages=MESSAGES, max_tokens=12, temperature=1, seed=5, n=n
            )
            assert [choice.index for choice in answer.choices] == list(range(n))
            return [choice.message.content for choice in answer.choices]

        with client_of(openvino) as client:
            assert ask(client, 1) == ask(client, 1)
            assert len(set(ask(client, 3))) == 3

    def test_tools_are_refused_clearly(self, openvino: Server) -> None:
        tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
        with (
            client_of(openvino) as client,
            pytest.raises(openai.BadRequestError, match="tools is not supported") as info,
        ):
            client.chat.completions.create(model="smollm2-135m", messages=MESSAGES, tools=[tool])
        assert (info.value.param, info.value.code) == ("tools", "unsupported_parameter")

    @ONE_LOOP
    def test_cancellation_aborts(self, openvino: Server, run: Run) -> None:
        async def main() -> None:
            async with async_client_of(openvino) as client:
                stream = await client.chat.completions.create(
                    model="smollm2-135m", messages=[{"role": "user", "content": "Count."}], max_tokens=4000, stream=True
                )
                async for _ in stream:
                    break
                await stream.close()
                task = asyncio.ensure_future(
                    client.chat.completions.create(
                        model="smollm2-135m", messages=[{"role": "user", "content": "Count."}], max_tokens=4000
                    )
                )
                await asyncio.sleep(0.5)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        run(main())
        eventually(lambda: openvino.admin("GET", "/admin/engines")["engines"][0]["running"] == 0)
        eventually(lambda: openvino.metric("requests_failed_total", reason="client_disconnected") >= 1)


def test_errors_have_the_clients_own_types(mock: Server) -> None:
    with client_of(mock) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist here"):
            client.completions.create(model="gpt-9", prompt="x")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-9")
        with pytest.raises(openai.BadRequestError) as info:
            client.completions.create(model="mock", prompt="x" * 9000)
        assert info.value.code == "context_length_exceeded"
        with pytest.raises(openai.InternalServerError, match="not finished within"):
            client.completions.create(
                model="mock", prompt="x", max_tokens=8000, extra_headers={"x-request-timeout": "0.2"}
            )
        stream = client.completions.create(
            model="mock", prompt="x", max_tokens=8000, stream=True, extra_headers={"x-request-timeout": "0.2"}
        )
        with pytest.raises(openai.APIError, match="not finished within"):
            for _ in stream:
                pass


def test_a_response_format_where_the_engine_can() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    engine = str(Path(__file__).parents[1] / "grammar_engine.py") + ":GrammarEngine"
    with serving(engine) as server, client_of(server) as client:
        for form, wanted in (
            ({"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}, {"json": schema}),
            ({"type": "json_object"}, {"json_object": True}),
            ({"type": "text"}, None),
        ):
            answer = client.chat.completions.create(model="grammar", messages=MESSAGES, response_format=form)
            assert json.loads(answer.choices[0].message.content or "") == wanted
        with pytest.raises(openai.BadRequestError, match="must be a JSON schema"):
            form = {"type": "json_schema", "json_schema": {"name": "place"}}
            client.chat.completions.create(model="grammar", messages=MESSAGES, response_format=form)


def test_keys() -> None:
    with serving("mock", "--option", "max_model_len=4096", env={"OUTBOARD_API_KEY": "good"}) as server:
        base_url = f"{server.url}/v1"
        bad = openai.OpenAI(base_url=base_url, api_key="bad", max_retries=0)
        with bad, pytest.raises(openai.AuthenticationError):
            bad.models.list()
        with openai.OpenAI(base_url=base_url, api_key="good", max_retries=0) as client:
            assert client.completions.create(model="mock", prompt="x", max_tokens=3).choices[0].text == "abc"


@ONE_LOOP
def test_many_at_once(mock: Server, run: Run) -> None:
    async def main() -> None:
        async with async_client_of(mock) as client:

            async def one(length: int) -> None:
                stream = await client.chat.completions.create(
                    model="mock", messages=MESSAGES, max_tokens=length, stream=True
                )
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                assert text == (ALPHABET * 4)[:length]

            await asyncio.gather(*(one(length) for length in range(1, 65)))

    run(main())


def test_the_request_id_is_in_the_answer(mock: Server) -> None:
    with client_of(mock) as client:
        answer = client.completions.with_raw_response.create(
            model="mock", prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine"}
        )
        assert answer.headers["x-request-id"] == "mine"
        assert answer.parse()._request_id == "mine"
