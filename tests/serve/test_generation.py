"""A request of the API against an engine that the test plays: tickets, ends, and what call-backs raise."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fake_connection import FakeConnection, settle
from outboard.errors import EngineDeadError, InvalidRequestError, OutboardError, PromptTooLongError
from outboard.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from outboard.observe.record import RequestRecord
from outboard.protocol.sampling import SamplingParams
from outboard.serve.answer import Answer, StreamedAnswer, WholeAnswer
from outboard.serve.errors import ApiError
from outboard.serve.formats import CompletionFormat
from outboard.serve.generation import Generation
from outboard.serve.limits import Admission, LimitsPage
from support import Run


class _Stream:
    """A request to the engine, as the front end has it."""

    def __init__(self, prompt: Any, on_output: Any, on_text: Any) -> None:
        self.prompt_token_ids = [1] * len(prompt)
        self.num_generation_tokens = 0
        self.on_output = on_output
        self.on_text = on_text
        self.aborted = False
        self.ended = False

    def abort(self) -> None:
        if not self.ended:
            self.aborted = self.ended = True
            self.on_output(RequestOutput("r", [CompletionOutput(0, "", [], "abort")], True))

    def give(self, text: str, finish: Any = None, **more: Any) -> None:
        """An output of one token."""
        self.ended = self.ended or finish is not None
        self.num_generation_tokens += 1
        metrics = RequestMetrics(time_to_first_token=0.5, queue_time=0.25, num_cached_tokens=2)
        output = CompletionOutput(0, text, [97], finish, **more)
        self.on_output(RequestOutput("r", [output], finish is not None, metrics=metrics))

    def fail(self, error: OutboardError) -> None:
        self.ended = True
        self.on_output(error)


class _Engine:
    """Its requests, in order; one whose prompt is an error is refused with it."""

    def __init__(self) -> None:
        self.streams: list[_Stream] = []
        self.hold: asyncio.Event | None = None

    async def submit(
        self, prompt: Any, params: SamplingParams, on_output: Any, request_id: str, on_text: Any
    ) -> _Stream:
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(prompt, Exception):
            raise prompt
        self.streams.append(_Stream(prompt, on_output, on_text))
        return self.streams[-1]


class _Side:
    """All that one request has."""

    def __init__(self, streamed: bool = True, timeout: float = 30.0, **more: Any) -> None:
        self.connection = FakeConnection()
        self.exchange = self.connection.exchange()
        form = CompletionFormat("id", "m", None)
        self.answer: Answer
        if streamed:
            settings: dict[str, Any] = {"slow_bytes": 1024, "slow_timeout": 30.0}
            self.answer = StreamedAnswer(
                self.exchange,
                form,
                with_usage=True,
                with_all_usage=False,
                on_slow=lambda: self.generation.slow(),
                on_error=lambda error: self.generation.fail(error),
                **(settings | more),
            )
        else:
            self.answer = WholeAnswer(self.exchange, form)
        self.page, _ = LimitsPage.create(1, 1)
        self.ticket = Admission(self.page, 0, 10, 10).admit(0)
        self.record = RequestRecord(request_id="r", path="/v1/completions")
        self.engine = _Engine()
        self.generation = Generation(self.engine, self.answer, self.ticket, self.record, timeout)  # type: ignore[arg-type]

    async def begin(self, *prompts: Any, n: int = 1) -> None:
        await self.generation.begin(prompts, SamplingParams(output_kind="delta", n=n))

    def check_over(self, error: str = "") -> None:
        """Nothing is left of it but the answer."""
        assert self.generation.ended
        assert self.record.error == error
        assert not self.page.counts.any(), "a ticket is left"
        assert all(stream.ended for stream in self.engine.streams), "a request is left in the engine"
        assert self.generation._timer.cancelled() or self.generation._timer.when() <= asyncio.get_running_loop().time()

    @property
    def texts(self) -> str:
        events = [one for one in self.connection.events if one != "[DONE]"]
        return "".join(choice["text"] for one in events for choice in one.get("choices", ()))

    @property
    def error(self) -> Any:
        """Of the stream, or of the document."""
        if self.connection.status != 200:
            return json.loads(self.connection.body)["error"]
        return next((one["error"] for one in self.connection.events if "error" in one), None)


def test_from_the_prompt_to_the_end(run: Run) -> None:
    async def body() -> None:
        side = _Side()
        await side.begin("hello")
        [stream] = side.engine.streams
        assert side.page.waiting == 1
        stream.give("a")
        assert side.page.waiting == 0 and side.page.counts.any()
        stream.on_text("b")
        stream.give("c", "stop")
        side.check_over()
        await side.exchange.until_over()
        side.generation.close()
        assert side.texts == "abc" and side.connection.events[-1] == "[DONE]"
        assert side.connection.events[-2]["usage"]["prompt_tokens"] == 5
        record = side.record
        assert (record.status, record.finish_reasons, record.prompt_tokens) == (200, ["stop"], 5)
        assert (record.completion_tokens, record.cached_tokens, record.queue_time) == (2, 2, 0.25)
        assert record.time_to_first_token == 0.5 and record.duration > 0

    run(body())


def test_it_ends_with_the_last_of_several_prompts(run: Run) -> None:
    async def body() -> None:
        side = _Side(streamed=False)
        await side.begin("a", "bc")
        first, second = side.engine.streams
        second.give("2", "length")
        assert not side.generation.ended
        first.give("1", "stop")
        side.check_over()
        document = json.loads(side.connection.body)
        assert [(one["index"], one["text"]) for one in document["choices"]] == [(0, "1"), (1, "2")]
        assert document["usage"]["total_tokens"] == 3 + 2

    run(body())


def test_choices_of_several_prompts_with_several_completions(run: Run) -> None:
    async def body() -> None:
        side = _Side(streamed=False)
        await side.begin("a", "b", n=2)
        assert side.engine.streams[0].on_text is None
        for number, stream in enumerate(side.engine.streams):
            stream.ended = True
            ends = [CompletionOutput(index, f"{number}{index}", [97], "stop") for index in range(2)]
            stream.on_output(RequestOutput("r", ends, True, metrics=RequestMetrics()))
        side.check_over()
        document = json.loads(side.connection.body)
        choices = [(one["index"], one["text"]) for one in document["choices"]]
        assert choices == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]
        assert side.record.finish_reasons == ["stop"] * 4

    run(body())


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptTooLongError("too long"), 400, "context_length_exceeded"),
        (InvalidRequestError("odd"), 400, "invalid_request"),
        (OverflowError("odd"), 500, "internal_error"),
    ],
)
def test_one_prompt_that_is_refused_ends_them_all(run: Run, error: Exception, status: int, code: str) -> None:
    async def body() -> None:
        side = _Side()
        await side.begin("a", error, "c")
        assert len(side.engine.streams) == 1 and side.engine.streams[0].aborted
        side.check_over(code)
        assert side.connection.status == status and side.error["code"] == code
        assert side.connection.complete

    run(body())


@pytest.mark.parametrize("begun", [False, True])
def test_the_death_of_the_engine_core(run: Run, begun: bool) -> None:
    async def body() -> None:
        side = _Side()
        await side.begin("a", "b")
        first, second = side.engine.streams
        if begun:
            first.give("1")
        second.fail(EngineDeadError("it died"))
        first.ended = True
        first.on_output(EngineDeadError("it died"))  # the other is told too, which changes nothing
        side.check_over("engine_dead")
        assert side.connection.status == (200 if begun else 503)
        assert side.error["code"] == "engine_dead" and side.connection.complete

    run(body())


@pytest.mark.parametrize(
    ("finish", "more", "status", "code"),
    [
        ("abort", {}, 503, "aborted"),
        ("error", {"error": "odd"}, 500, "request_failed"),
        ("error", {"error": "odd", "stop_reason": "invalid_request"}, 400, "invalid_request"),
    ],
)
def test_ends_that_are_errors(run: Run, finish: Any, more: Any, status: int, code: str) -> None:
    async def body() -> None:
        side = _Side()
        await side.begin("a")
        side.engine.streams[0].give("", finish, **more)
        side.check_over(code)
        assert side.connection.status == status and side.error["code"] == code

    run(body())


def test_many_prompts_leave_the_loop_to_others(run: Run) -> None:
    async def body() -> None:
        side = _Side()
        turns = 0

        async def other() -> None:
            nonlocal turns
            while not side.connection.complete:
                turns += 1
                if turns == 50:  # the others are not sent any more
                    side.engine.streams[0].fail(EngineDeadError("it died"))
                await asyncio.sleep(0)

        others = asyncio.ensure_future(other())
        await side.begin(*["a"] * 1000)
        await others
        assert turns >= 50
        assert len(side.engine.streams) < 1000
        side.check_over("engine_dead")

    run(body())


@pytest.mark.parametrize("begun", [False, True])
def test_its_time_is_over(run: Run, begun: bool) -> None:
    async def body() -> None:
        side = _Side(timeout=0.02)
        await side.begin("a")
        if begun:
            side.engine.streams[0].give("1")
        await side.exchange.until_over()
        side.check_over("deadline_exceeded")
        assert side.engine.streams[0].aborted
        assert side.connection.status == (200 if begun else 504)
        assert side.error["code"] == "deadline_exceeded"

    run(body())


def test_its_time_is_over_while_a_prompt_is_encoded(run: Run) -> None:
    async def body() -> None:
        side = _Side(timeout=0.02)
        side.engine.hold = asyncio.Event()
        begins = asyncio.ensure_future(side.begin("a", "b"))
        await side.exchange.until_over()
        side.engine.hold.set()
        await begins
        assert len(side.engine.streams) == 1
        side.check_over("deadline_exceeded")

    run(body())


def test_the_client_goes_away(run: Run) -> None:
    async def body() -> None:
        side = _Side()
        await side.begin("a")
        side.engine.streams[0].give("1")
        side.connection.leave()
        await side.exchange.until_over()
        side.generation.close()
        side.generation.close()
        side.check_over("client_disconnected")
        assert side.engine.streams[0].aborted

    run(body())


def test_cancelled_while_a_prompt_is_encoded(run: Run) -> None:
    async def body() -> None:
        side = _Side()
        await side.begin("a")
        side.engine.hold = asyncio.Event()
        begins = asyncio.ensure_future(side.begin("b"))
        await settle()
        begins.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begins
        side.generation.close()
        side.check_over("client_disconnected")

    run(body())


@pytest.mark.parametrize("by_bytes", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_a_client_that_does_not_read_loses_its_connection(run: Run, by_bytes: bool, ended: bool) -> None:
    async def body() -> None:
        side = _Side(slow_bytes=10 if by_bytes else 1000, slow_timeout=30 if by_bytes else 0.02)
        await side.begin("a")
        [stream] = side.engine.streams
        stream.give("1")
        side.connection.pause()
        stream.give("2")
        stream.give("3" * 100, "stop" if ended else None)
        await side.exchange.until_over()
        side.generation.close()
        await settle()
        assert side.connection.aborted
        side.check_over("slow_reader")
        assert len(asyncio.all_tasks()) == 1

    run(body())


@pytest.mark.parametrize("by_text", [False, True])
def test_what_a_call_back_raises_ends_the_request(run: Run, by_text: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A lone surrogate, say, which no JSON can hold: the client must not wait for a time-out."""

    async def body() -> None:
        side = _Side()
        await side.begin("a")
        [stream] = side.engine.streams
        stream.give("1")
        if by_text:
            stream.on_text("\ud800")
        else:
            stream.give("\ud800")
        side.check_over("internal_error")
        assert stream.aborted
        assert side.error["code"] == "internal_error" and side.connection.complete

    run(body())
    assert "UnicodeEncodeError" in caplog.text


@pytest.mark.parametrize("ended", [False, True])
def test_what_cannot_be_written_once_the_connection_is_free(run: Run, ended: bool) -> None:
    async def body() -> None:
        side = _Side()
        await side.begin("a")
        [stream] = side.engine.streams
        stream.give("1")
        side.connection.pause()
        stream.give("2")
        stream.give("\ud800", "stop" if ended else None)
        side.connection.resume()
        await side.exchange.until_over()
        side.generation.close()
        side.check_over("" if ended else "internal_error")
        assert side.texts == "12" and side.connection.complete
        assert side.error["code"] == "internal_error"

    run(body())


def test_a_document_that_cannot_be_written(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        side = _Side(streamed=False)
        await side.begin("a")
        side.engine.streams[0].give("\ud800", "stop")
        side.check_over("internal_error")
        assert side.connection.status == 500 and side.error["code"] == "internal_error"

    run(body())
    assert "UnicodeEncodeError" in caplog.text


def test_all_may_be_cut(run: Run) -> None:
    async def body() -> None:
        side = _Side()
        await side.begin("a")
        assert side.generation.fail(ApiError(503, "bye", "server_error", "shutting_down"))
        assert not side.generation.fail(ApiError(503, "bye", "server_error", "shutting_down"))
        side.check_over("shutting_down")
        assert side.connection.status == 503

    run(body())
