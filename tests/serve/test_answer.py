"""Answers: what is written of which outputs, and what becomes of them while the connection takes no more."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fake_connection import FakeConnection, settle
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.frontend.outputs import CompletionOutput, RequestOutput
from outboard.protocol.sampling import FinishReason
from outboard.serve.answer import StreamedAnswer, WholeAnswer
from outboard.serve.errors import ApiError
from outboard.serve.formats import ChatFormat, CompletionFormat
from outboard.serve.logprobs import TokenTexts
from support import Run

_ERROR = ApiError(503, "gone", "server_error", "engine_dead", retry_after=7)


def _output(*outputs: CompletionOutput) -> RequestOutput:
    return RequestOutput("r", list(outputs), all(one.finish_reason for one in outputs))


def _one(text: str, finish: FinishReason | None = None, index: int = 0, **more: Any) -> CompletionOutput:
    return CompletionOutput(index, text, [7], finish, **more)


def _streamed(
    connection: FakeConnection, form: Any = ChatFormat, *, slow: list[str] | None = None, **more: Any
) -> StreamedAnswer:
    settings: dict[str, Any] = {
        "with_usage": False,
        "with_all_usage": False,
        "slow_bytes": 1024,
        "slow_timeout": 30.0,
        "on_slow": lambda: (slow if slow is not None else []).append("slow"),
        "on_error": pytest.fail,
    }
    return StreamedAnswer(connection.exchange(), form("id-1", "m", None), **(settings | more))


def _texts(events: list[Any], index: int = 0) -> list[Any]:
    """Texts of a choice; "[...]" for what has none."""
    texts = []
    for event in events:
        if event == "[DONE]":
            texts.append(event)
        elif "error" in event:
            texts.append(f"[{event['error']['code']}]")
        else:
            for choice in event["choices"]:
                if choice["index"] == index:
                    texts.append(choice["text"] if "text" in choice else choice["delta"].get("content"))
    return texts


# --- streams ---


def test_a_stream_of_chat_from_its_opening_to_its_end() -> None:
    async def body() -> None:
        connection = FakeConnection(headers=[(b"x-request-id", b"mine")])
        answer = _streamed(connection)
        assert answer.status == 0 and not connection.sent
        answer.add(0, _output(_one("He")))
        assert answer.status == connection.status == 200
        assert connection.headers[b"content-type"].startswith(b"text/event-stream")
        assert connection.headers[b"cache-control"] == b"no-cache"
        assert connection.headers[b"x-request-id"] == b"mine"
        opening, first = connection.events
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert first["choices"][0]["delta"] == {"content": "He"}
        answer.add(0, _output(_one("llo", "stop", stop_reason="!")))
        last = connection.events[-1]["choices"][0]
        assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({"content": "llo"}, "stop", "!")
        assert not connection.complete
        answer.finish()
        assert connection.complete
        assert connection.events[-1] == "[DONE]"
        assert len(connection.events) == 4
        assert not answer._outlet.busy

    asyncio.run(body())


def test_each_choice_has_an_opening() -> None:
    async def body() -> None:
        connection = FakeConnection()
        answer = _streamed(connection)
        answer.add(0, _output(_one("a"), _one("b", index=1)))
        answer.add(2, _output(_one("c", index=0)))
        answer.add(0, _output(_one("d", index=1)))
        assert [_texts(connection.events, index) for index in range(3)] == [["", "a"], ["", "b", "d"], ["", "c"]]
        roles = [one for one in connection.events if one["choices"][0]["delta"].get("role")]
        assert len(roles) == 3
        assert len(connection.sent) == 1 + 3  # the head, and one write an output

    asyncio.run(body())


def test_completions_have_no_opening() -> None:
    async def body() -> None:
        connection = FakeConnection()
        answer = _streamed(connection, CompletionFormat)
        answer.add(0, _output(_one("a")))
        assert _texts(connection.events) == ["a"]

    asyncio.run(body())


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("form", [ChatFormat, CompletionFormat])
def test_texts_behind_a_first_token_without_text_are_not_lost(form: Any, chunks: bool) -> None:
    """The first byte of a character, or what may become a stop string."""

    async def body() -> None:
        connection = FakeConnection(chunks=chunks)
        answer = _streamed(connection, form)
        answer.add(0, _output(_one("")))
        assert connection.status == 200  # it has begun
        on_text = answer.text_writer(0)
        assert on_text is not None
        on_text("é")
        answer.add(0, _output(_one("", "length")))
        answer.finish()
        assert [text for text in _texts(connection.events) if text] == ["é", "[DONE]"]

    asyncio.run(body())


def test_an_output_with_nothing_to_tell_is_no_event() -> None:
    async def body() -> None:
        connection = FakeConnection()
        answer = _streamed(connection)
        answer.add(0, _output(_one("a")))
        before = len(connection.sent)
        answer.add(0, _output(_one("")))
        assert len(connection.sent) == before

    asyncio.run(body())


@pytest.mark.parametrize("form", [ChatFormat, CompletionFormat])
def test_texts_on_the_short_way_look_like_events(form: Any) -> None:
    async def body() -> None:
        slow, quick = FakeConnection(), FakeConnection(chunks=True)
        for connection in (slow, quick):
            answer = _streamed(connection, form)
            answer.add(0, _output(_one("a")))
            on_text = answer.text_writer(0)
            assert on_text is not None
            on_text('"\n\u2028é')
        assert slow.events == quick.events
        by_event = FakeConnection()
        answer = _streamed(by_event, form)
        answer.add(0, _output(_one("a")))
        answer.add(0, _output(_one('"\n\u2028é')))
        [choice] = by_event.events[-1]["choices"]
        assert choice.pop("stop_reason") is None  # which the short way leaves out
        assert quick.events[-1]["choices"] == [choice]

    asyncio.run(body())


def test_usage_is_the_last_event_where_it_was_asked_for() -> None:
    async def body() -> None:
        connection = FakeConnection()
        answer = _streamed(connection, with_usage=True)
        answer.usage.prompt_tokens = 3
        answer.add(0, _output(_one("a", "stop")))
        answer.usage.completion_tokens = 2
        answer.finish()
        *others, usage, done = connection.events
        assert done == "[DONE]" and usage["choices"] == []
        assert usage["usage"]["total_tokens"] == 5
        assert not any("usage" in one for one in others)

    asyncio.run(body())


def test_usage_may_be_in_all_events() -> None:
    async def body() -> None:
        connection = FakeConnection()
        answer = _streamed(connection, with_usage=True, with_all_usage=True)
        assert answer.counts_always
        assert answer.text_writer(0) is None  # such events have more than a text
        for count in (1, 2):
            answer.usage.completion_tokens = count
            answer.add(0, _output(_one("a")))
        counts = [one["usage"]["completion_tokens"] for one in connection.events if "usage" in one]
        assert counts == [1, 2]

    asyncio.run(body())


def test_an_error_before_the_head_has_a_status_of_its_own() -> None:
    async def body() -> None:
        connection = FakeConnection()
        answer = _streamed(connection)
        answer.fail(_ERROR)
        assert (connection.status, answer.status) == (503, 503)
        assert connection.headers[b"content-type"] == b"application/json"
        assert connection.headers[b"retry-after"] == b"7"
        assert int(connection.headers[b"content-length"]) == len(connection.body)
        assert connection.body == _ERROR.body and connection.complete

    asyncio.run(body())


def test_an_error_behind_the_head_is_an_event() -> None:
    async def body() -> None:
        connection = FakeConnection()
        answer = _streamed(connection, with_usage=True)
        answer.add(0, _output(_one("a")))
        answer.fail(_ERROR)
        assert connection.status == 200
        error, done = connection.events[-2:]
        assert error["error"]["code"] == "engine_dead" and done == "[DONE]"
        assert connection.complete

    asyncio.run(body())


# --- while the connection takes no more ---


def test_what_is_new_merges_while_the_connection_is_busy(run: Run) -> None:
    async def body() -> None:
        connection = FakeConnection()
        form = ChatFormat("id-1", "m", TokenTexts(ByteTokenizer()))
        answer = _streamed(connection, lambda *_: form)
        answer.add(0, _output(_one("a")))
        connection.pause()
        answer.add(0, _output(_one("b")))  # this write waits
        on_text = answer.text_writer(0)
        assert on_text is not None
        on_text("c")
        answer.add(0, _output(_one("d", logprobs=[{7: -1.0}])))
        answer.add(0, _output(_one("x", index=1)))
        answer.add(0, _output(_one("e", "length", logprobs=[{7: -2.0}])))
        await settle()
        assert _texts(connection.events) == ["", "a"]
        connection.resume()
        await settle()
        assert _texts(connection.events) == ["", "a", "b", "cde"]
        assert _texts(connection.events, 1) == ["", "x"]
        merged = next(one for one in connection.events if _texts([one]) == ["cde"])
        assert merged["choices"][0]["finish_reason"] == "length"
        logprobs = merged["choices"][0]["logprobs"]["content"]
        assert [one["logprob"] for one in logprobs] == [-1.0, -2.0]
        answer.finish()
        assert connection.events[-1] == "[DONE]"
        assert answer._timer is None

    run(body())


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_while_busy_comes_behind_all_texts(run: Run, fails: bool) -> None:
    async def body() -> None:
        connection = FakeConnection()
        answer = _streamed(connection, with_usage=True)
        connection.pause()
        answer.add(0, _output(_one("a")))
        answer.add(0, _output(_one("b")))
        if fails:
            answer.fail(_ERROR)
        else:
            answer.usage.completion_tokens = 2
            answer.finish()
        await settle()
        assert not connection.sent
        connection.resume()
        await settle()
        assert connection.complete
        assert _texts(connection.events) == ["", "a", "b", *(["[engine_dead]"] if fails else []), "[DONE]"]
        assert answer._timer is None and not answer._outlet.busy

    run(body())


def test_a_connection_that_each_write_fills_loses_nothing(run: Run) -> None:
    async def body() -> None:
        connection = FakeConnection()
        connection.pauses_after_each = True
        answer = _streamed(connection)
        on_text = answer.text_writer(0)
        assert on_text is not None
        answer.add(0, _output(_one("0")))
        for number in range(1, 10):
            on_text(str(number))
            if number % 3 == 0:
                connection.resume()
                await settle()
        answer.finish()
        for _ in range(20):
            connection.resume()
            await settle()
        assert connection.complete
        assert "".join(text for text in _texts(connection.events) if text != "[DONE]") == "0123456789"
        assert answer._timer is None

    run(body())


def test_too_much_held_back_is_a_slow_reader(run: Run) -> None:
    async def body() -> None:
        slow: list[str] = []
        connection = FakeConnection()
        answer = _streamed(connection, slow=slow, slow_bytes=10)
        connection.pause()
        answer.add(0, _output(_one("a")))
        answer.add(0, _output(_one("0123456789")))
        assert not slow
        answer.add(0, _output(_one("0")))
        assert slow == ["slow"]
        answer.cut()
        assert connection.aborted
        await settle()
        assert len(asyncio.all_tasks()) == 1

    run(body())


def test_what_was_written_is_not_held_back_any_more(run: Run) -> None:
    async def body() -> None:
        slow: list[str] = []
        connection = FakeConnection()
        answer = _streamed(connection, slow=slow, slow_bytes=10)
        for _ in range(5):
            connection.pause()
            answer.add(0, _output(_one("a")))
            answer.add(0, _output(_one("0123456789")))
            connection.resume()
            await settle()
        assert not slow and answer._timer is None

    run(body())


def test_log_probabilities_count_as_held_back() -> None:
    async def body() -> None:
        slow: list[str] = []
        connection = FakeConnection()
        answer = _streamed(connection, slow=slow, slow_bytes=100)
        connection.pause()
        answer.add(0, _output(_one("a")))
        for _ in range(2):
            answer.add(0, _output(_one("", logprobs=[{7: -1.0}])))
        assert slow == ["slow"]
        answer.close()

    asyncio.run(body())


def test_a_write_that_takes_too_long_is_a_slow_reader(run: Run) -> None:
    async def body() -> None:
        slow: list[str] = []
        connection = FakeConnection()
        answer = _streamed(connection, slow=slow, slow_timeout=0.01)
        connection.pause()
        answer.add(0, _output(_one("a")))
        async with asyncio.timeout(5):
            while not slow:
                await asyncio.sleep(0.005)
        answer.close()

    run(body())


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_write_has_its_time_too(run: Run, fails: bool) -> None:
    """No more outputs come, so nothing else would look at it again."""

    async def body() -> None:
        slow: list[str] = []
        connection = FakeConnection()
        answer = _streamed(connection, slow=slow, slow_timeout=0.01)
        answer.add(0, _output(_one("a", "stop")))
        connection.pause()
        if fails:
            answer.fail(_ERROR)
        else:
            answer.finish()
        async with asyncio.timeout(5):
            while not slow:
                await asyncio.sleep(0.005)
        answer.close()

    run(body())


def test_time_counts_anew_with_each_write(run: Run) -> None:
    async def body() -> None:
        slow: list[str] = []
        connection = FakeConnection()
        answer = _streamed(connection, slow=slow, slow_timeout=30)
        connection.pause()
        answer.add(0, _output(_one("a")))
        first = answer._timer
        answer.add(0, _output(_one("b")))
        assert answer._timer is first
        connection.pauses_after_each = True
        connection.resume()
        await settle()  # the head fills it again
        connection.resume()
        await settle()
        second = answer._timer
        assert answer._outlet.busy and second is not None and second is not first
        assert first is not None and first.cancelled()
        answer.close()
        assert second.cancelled() and answer._timer is None

    run(body())


def test_close_leaves_no_task_and_no_timer(run: Run) -> None:
    async def body() -> None:
        connection = FakeConnection()
        answer = _streamed(connection)
        connection.pause()
        answer.add(0, _output(_one("a")))
        answer.close()
        answer.close()
        await settle()
        assert len(asyncio.all_tasks()) == 1 and answer._timer is None
        assert not connection.sent

    run(body())


def test_a_client_that_has_gone_ends_the_wait(run: Run) -> None:
    async def body() -> None:
        connection = FakeConnection()
        exchange = connection.exchange()
        answer = _streamed(connection)
        connection.pause()
        answer.add(0, _output(_one("a")))
        connection.leave()
        await exchange.until_over()
        answer.add(0, _output(_one("b")))
        answer.finish()
        answer.close()
        await settle()
        assert not connection.sent and answer._timer is None

    run(body())


# --- whole answers ---


def test_a_whole_answer_has_all_choices_in_order() -> None:
    async def body() -> None:
        connection = FakeConnection(headers=[(b"x-request-id", b"mine")])
        answer = WholeAnswer(connection.exchange(), CompletionFormat("id-1", "m", None))
        further = answer.text_writer(2)
        assert further is not None
        answer.add(2, _output(_one("c")))
        further("c")
        further("c")
        answer.add(2, _output(_one("", "stop"), _one("d", "length", index=1)))
        answer.add(0, _output(_one("b", "stop", index=1), _one("a", "stop")))
        assert not connection.sent
        answer.usage.prompt_tokens, answer.usage.completion_tokens = 4, 4
        answer.finish()
        assert connection.complete and (answer.status, connection.status) == (200, 200)
        assert connection.headers[b"x-request-id"] == b"mine"
        assert int(connection.headers[b"content-length"]) == len(connection.body)
        document = json.loads(connection.body)
        assert [(one["index"], one["text"]) for one in document["choices"]] == [
            (0, "a"),
            (1, "b"),
            (2, "ccc"),
            (3, "d"),
        ]
        assert document["usage"]["total_tokens"] == 8

    asyncio.run(body())


def test_a_whole_answer_may_be_an_error() -> None:
    async def body() -> None:
        connection = FakeConnection()
        answer = WholeAnswer(connection.exchange(), CompletionFormat("id-1", "m", None))
        answer.add(0, _output(_one("a", "stop")))
        answer.fail(_ERROR)
        assert connection.status == 503 and connection.body == _ERROR.body
        assert connection.headers[b"retry-after"] == b"7"

    asyncio.run(body())


def test_a_whole_answer_waits_for_the_connection(run: Run) -> None:
    async def body() -> None:
        connection = FakeConnection()
        answer = WholeAnswer(connection.exchange(), CompletionFormat("id-1", "m", None))
        connection.pause()
        answer.add(0, _output(_one("a", "stop")))
        answer.finish()
        await settle()
        assert not connection.sent
        connection.resume()
        await settle()
        assert connection.complete
        answer.close()

    run(body())
