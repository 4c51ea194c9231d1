"""From an engine core's messages to the bytes of answers, drawn from seeds: nothing is lost, doubled or out of order.

The front end and the application are real; messages and connections are the test's.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from fake_connection import FakeConnection, settle
from outboard.config import EngineConfig
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.frontend.llm import AsyncLLM
from outboard.frontend.running import RunningEngine
from outboard.protocol.messages import EngineCoreOutputs, EngineCoreRequest, EngineInfo, OutputExtras
from outboard.serve.app import ApiApp
from outboard.serve.config import ServeConfig
from outboard.serve.limits import Admission, LimitsPage
from outboard.serve.service import Service
from support import Run

_ALPHABET = 'ab é\N{GRINNING FACE}\n"\\'
_STOPS = ["ab", "éa", "\N{GRINNING FACE}\N{GRINNING FACE}", "a b"]


class _Core:
    """An engine core whose client is this object: requests come in, and messages go to the sink."""

    def __init__(self, draw: random.Random) -> None:
        self.config = EngineConfig(engine="mock")
        self.engine_info = EngineInfo(model="m", max_model_len=1000, vocab_size=256)
        self.draw = draw
        self.running: dict[int, list[int]] = {}  # handle -> tokens to come
        self.said: dict[str, bytes] = {}  # by request: what it says, were it not stopped
        self.logprobs: set[int] = set()
        self._sequence = 0
        self.sink: Any = None

    def set_output_sink(self, sink: Any, request_ids: bool) -> None:
        self.sink = sink

    def validate_alive(self) -> None:
        pass

    def add_request(self, request: EngineCoreRequest) -> int:
        handle = len(self.said)
        text = "".join(self.draw.choice(_ALPHABET) for _ in range(self.draw.randint(1, 30)))
        said = text.encode()[: request.sampling_params.max_tokens]
        self.said[request.request_id] = said
        self.running[handle] = list(said)
        if request.sampling_params.logprobs is not None:
            self.logprobs.add(handle)
        return handle

    def abort_handles(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.running.pop(handle, None)

    def step(self) -> None:
        """Sends one message, with some tokens of some of its requests."""
        handles = [one for one in self.running if self.draw.random() < 0.7]
        most = self.draw.choice([1, 1, 3])
        tokens: list[int] = []
        counts: list[int] = []
        finished: list[Any] = []
        extras = OutputExtras(logprobs={})
        for position, handle in enumerate(handles):
            left = self.running[handle]
            new = left[:most]
            del left[:most]
            tokens += new
            counts.append(len(new))
            if handle in self.logprobs:
                extras.logprobs[position] = [{token: -1.0} for token in new]
            if not left:
                finished.append((position, "length", None))
                del self.running[handle]
        plain = most == 1 and not finished and not extras.logprobs
        message = EngineCoreOutputs(0, 0, self._sequence, 0.0, handles, tokens)
        if not plain:
            message.counts, message.finished, message.extras = counts, finished, extras
        self._sequence += 1
        self.sink(message)


class _Asked:
    """One request of the API."""

    def __init__(self, draw: random.Random, app: ApiApp) -> None:
        self.chat = draw.random() < 0.5
        self.streamed = draw.random() < 0.8
        self.n = draw.choice([1, 1, 1, 2])
        self.prompts = 1 if self.chat else draw.choice([1, 1, 3])
        self.stop = draw.choice([None, None, *_STOPS])
        self.all_usage = draw.random() < 0.2
        body: dict[str, Any] = {"n": self.n, "max_tokens": draw.randint(1, 40), "stop": self.stop}
        if self.streamed:
            body |= {"stream": True}
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": self.all_usage}
        self.logprobs = draw.random() < 0.2
        if self.chat:
            body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": self.logprobs}
        else:
            body |= {"prompt": ["x"] * self.prompts, "logprobs": 0 if self.logprobs else None}
        self.connection = FakeConnection(json.dumps(body).encode(), chunks=draw.random() < 0.7)
        self.connection.pauses_after_each = draw.random() < 0.3
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        self.connection.scope |= {"path": path}
        connection = self.connection
        self.task = asyncio.ensure_future(app(connection.scope, connection.receive, connection.send))

    def check(self, said: dict[str, bytes]) -> None:
        texts, ends, usage, tokens = self._streamed() if self.streamed else self._whole()
        assert sorted(texts) == list(range(self.n * self.prompts))
        name = next(iter(self._id))
        total = 0
        for choice, text in texts.items():
            prompt, index = divmod(choice, self.n)
            request_id = name if self.prompts == 1 else f"{name}-{prompt}"
            whole = said[request_id if self.n == 1 else f"{index}_{request_id}"]
            expected = whole.decode("utf-8", "replace")
            stopped = self.stop is not None and self.stop in expected
            if stopped:
                assert self.stop is not None
                expected = expected[: expected.index(self.stop)]
            assert text == expected
            assert ends[choice] == ("stop" if stopped else "length")
            if self.logprobs and not stopped:
                assert tokens[choice] == len(whole)
            total += len(whole)
        assert usage["prompt_tokens"] == self.prompts * (len("user: x\nassistant:") if self.chat else 1)
        assert usage["completion_tokens"] == total or (self.stop is not None and usage["completion_tokens"] <= total)

    def _whole(self) -> Any:
        document = json.loads(self.connection.body)
        assert self.connection.status == 200, document
        self._id = {document["id"]}
        texts, ends, tokens = {}, {}, {}
        for one in document["choices"]:
            texts[one["index"]] = one["message"]["content"] if self.chat else one["text"]
            ends[one["index"]] = one["finish_reason"]
            tokens[one["index"]] = self._tokens(one)
        return texts, ends, document["usage"], tokens

    def _streamed(self) -> Any:
        *events, last, done = self.connection.events
        assert done == "[DONE]" and last["choices"] == []
        self._id = {event["id"] for event in [*events, last]}
        assert len(self._id) == 1
        texts: dict[int, str] = {}
        ends: dict[int, str] = {}
        tokens: dict[int, int] = {}
        for event in events:
            [one] = event["choices"]
            index = one["index"]
            assert index not in ends, "an event behind the end of its choice"
            if self.chat:
                assert (index in texts) == ("role" not in one["delta"])
                text = one["delta"].get("content", "")
            else:
                text = one["text"]
            texts[index] = texts.get(index, "") + text
            tokens[index] = tokens.get(index, 0) + self._tokens(one)
            if one["finish_reason"] is not None:
                ends[index] = one["finish_reason"]
        return texts, ends, last["usage"], tokens

    def _tokens(self, choice: Any) -> int:
        logprobs = choice["logprobs"]
        if logprobs is None:
            return 0
        return len(logprobs["content"] if self.chat else logprobs["tokens"])


async def _schedule(seed: int) -> None:
    draw = random.Random(seed)
    core = _Core(draw)
    llm = AsyncLLM("mock")
    llm._running = RunningEngine(core, ByteTokenizer())  # type: ignore[arg-type]
    page, _ = LimitsPage.create(1, 0)
    service = Service(llm, ServeConfig(), Admission(page, 0, 100, None))
    app = ApiApp(service)
    asked = [_Asked(draw, app) for _ in range(draw.randint(1, 5))]
    await settle()
    for _ in range(2000):
        if all(one.task.done() for one in asked):
            break
        if core.running:
            core.step()
        for one in asked:
            if one.connection.paused:
                if draw.random() < 0.4 or not core.running:
                    one.connection.resume()
            elif draw.random() < 0.1:
                one.connection.pause()
        if draw.random() < 0.5 or not core.running:
            await settle()
    for one in asked:
        assert one.task.done(), "an answer does not end"
        one.task.result()
        one.check(core.said)
    assert not page.counts.any() and not service.live and not llm._running.in_flight
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_all_texts_arrive(run: Run, first: int) -> None:
    async def body() -> None:
        for seed in range(first, first + 50):
            try:
                await _schedule(seed)
            except Exception as error:
                error.add_note(f"seed {seed}")
                raise

    run(body())
