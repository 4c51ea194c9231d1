"""AsyncLLM over real processes: streams, cancellation, bad input, death."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import time
from typing import Any

import pytest

from faulty import CallableEngine, DyingEngine, ResultsEngine
from outboard import (
    AsyncLLM,
    ClientClosedError,
    ConfigError,
    DuplicateRequestError,
    EngineConfig,
    EngineDeadError,
    EngineInfo,
    EngineNotFoundError,
    EngineOptionError,
    InvalidRequestError,
    OutboardError,
    PromptTooLongError,
    RequestOutput,
    SamplingParams,
    SlowReaderError,
    TransportConfig,
)
from support import Run

pytestmark = pytest.mark.usefixtures("nothing_left")

DELTA = SamplingParams(max_tokens=1000, output_kind="delta", detokenize=False)


def on_llm(run: Run, body: Any, engine: Any = "echo", **settings: Any) -> None:
    async def main() -> None:
        async with AsyncLLM(EngineConfig(engine=engine, **settings)) as llm:
            await body(llm)

    run(main())


async def tokens_of(stream: Any) -> list[int]:
    return [token async for output in stream for token in output.outputs[0].token_ids]


async def idle(llm: AsyncLLM) -> None:
    """Waits until the engine core says that nothing is running."""
    async with asyncio.timeout(5):
        while llm.client.scheduler_stats.running or llm.client.stats()["requests"]:
            await asyncio.sleep(0.001)


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detokenize", [True, False])
def test_output_kinds(run: Run, detokenize: bool) -> None:
    async def body(llm: AsyncLLM) -> None:
        prompt = "héllo 😀!"
        ids = list(prompt.encode())
        for kind in ("cumulative", "delta", "final_only"):
            params = SamplingParams(max_tokens=100, output_kind=kind, detokenize=detokenize)  # type: ignore[arg-type]
            outputs = [output async for output in llm.generate(prompt, params)]
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert {output.prompt for output in outputs} == {prompt}
            assert list(outputs[-1].prompt_token_ids or ()) == ids
            completions = [output.outputs[0] for output in outputs]
            assert completions[-1].finish_reason == "stop"
            if kind == "final_only":
                assert len(outputs) == 1
            if kind == "delta":
                assert [token for completion in completions for token in completion.token_ids] == ids
                assert "".join(completion.text for completion in completions) == (prompt if detokenize else "")
            else:
                assert completions[-1].token_ids == ids
                assert completions[-1].text == (prompt if detokenize else "")
                assert all(prompt.startswith(completion.text) for completion in completions)

    on_llm(run, body)


def test_prompts_as_text_token_ids_and_chat_messages(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        assert await tokens_of(llm.generate("abc", DELTA)) == [97, 98, 99]
        assert await tokens_of(llm.generate([1, 2, 3], DELTA)) == [1, 2, 3]
        assert await tokens_of(llm.generate((7,), DELTA)) == [7]
        outputs = [output async for output in llm.generate([{"role": "user", "content": "hi"}], DELTA)]
        ids = [token for output in outputs for token in output.outputs[0].token_ids]
        assert outputs[-1].prompt_token_ids == ids
        text = bytes(ids).decode()
        assert "user" in text
        assert "hi" in text

    on_llm(run, body)


def test_metrics(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        outputs = [output async for output in llm.generate([1, 2, 3], DELTA)]
        metrics = outputs[-1].metrics
        assert metrics is not None
        assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (3, 3)
        assert metrics.queue_time is not None
        assert metrics.time_to_first_token is not None
        assert metrics.e2e_latency is not None
        assert 0 <= metrics.queue_time <= metrics.time_to_first_token <= metrics.e2e_latency < 5
        assert abs(metrics.arrival_time - time.time()) < 10

    on_llm(run, body)


def test_n_completions_of_one_prompt(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        params = SamplingParams(n=3, max_tokens=10, output_kind="final_only")
        outputs = [output async for output in llm.generate("abc", params)]
        assert len(outputs) == 1
        assert [(c.index, c.text, c.finish_reason) for c in outputs[0].outputs] == [
            (i, "abc", "stop") for i in range(3)
        ]
        texts = ["", "", ""]
        params = SamplingParams(n=3, max_tokens=10, output_kind="delta")
        async for output in llm.generate("xyz", params, request_id="same"):
            for completion in output.outputs:
                texts[completion.index] += completion.text
            last = output
        assert texts == ["xyz"] * 3
        assert last.finished
        async with asyncio.timeout(5):
            async for _ in llm.generate([5] * 500, SamplingParams(n=4, max_tokens=500, output_kind="delta")):
                break
        gc.collect()
        await idle(llm)

    on_llm(run, body)


def test_stop_strings_end_the_request_in_the_engine_too(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        prompt = "one two three" + "x" * 2000
        params = SamplingParams(max_tokens=5000, stop=["o th", "zzz"], output_kind="delta")
        text = ""
        async for output in llm.generate(prompt, params):
            text += output.outputs[0].text
            last = output
        assert text == "one tw"
        assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "o th")
        params = SamplingParams(max_tokens=5000, stop="two", include_stop_str_in_output=True)
        outputs = [output async for output in llm.generate(prompt, params)]
        assert outputs[-1].outputs[0].text == "one two"
        await idle(llm)

    on_llm(run, body, options={"step_ms": 0.1})


def test_a_stop_string_ends_a_request_that_would_never_end_in_the_engine(run: Run) -> None:
    """Asked of the engine core itself: what the front end knows of the request ended with the stream."""

    async def body(llm: AsyncLLM) -> None:
        async def running() -> int:
            count: int = (await llm.client.call_utility_async("get_stats", timeout=5))["running"]
            return count

        params = SamplingParams(max_tokens=2**31, stop="hij", output_kind="delta")
        streams = [llm.generate([1], params) for _ in range(3)]
        firsts = [await anext(stream) for stream in streams]
        other = llm.generate([1], SamplingParams(max_tokens=2**31, output_kind="delta"))
        await anext(other)
        assert await running() >= 1
        for output, stream in zip(firsts, streams, strict=True):
            text = output.outputs[0].text
            async for output in stream:  # nothing, where the first was late and had it all
                text += output.outputs[0].text
            assert (text, output.outputs[0].stop_reason) == ("abcdefg", "hij")
        async with asyncio.timeout(2):
            while await running() != 1:  # the one with no stop string
                await asyncio.sleep(0.005)
        await other.aclose()

    on_llm(run, body, "mock", options={"step_ms": 2.0})


def test_a_stop_token_is_among_the_tokens_but_not_in_the_text(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        for include, text in ((False, "abc"), (True, "abcd")):
            params = SamplingParams(stop_token_ids=[ord("d")], include_stop_str_in_output=include)
            completion = [output async for output in llm.generate("abcdef", params)][-1].outputs[0]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", ord("d"))
            assert (completion.text, bytes(completion.token_ids)) == (text, b"abcd")

    on_llm(run, body)


def test_64_at_once_every_token_accounted_for(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        prompts = [[(i * 7 + j) % 256 for j in range(20 + i)] for i in range(64)]
        results = await asyncio.gather(*(tokens_of(llm.generate(prompt, DELTA)) for prompt in prompts))
        assert results == prompts
        await idle(llm)

    on_llm(run, body)


def test_64_that_join_at_random_times_with_a_third_aborted(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        rng = random.Random(5)

        async def one(i: int) -> str:
            await asyncio.sleep(rng.random() * 0.2)
            prompt = [(i + j) % 256 for j in range(60)]
            seen: list[int] = []
            stop_at = rng.randrange(1, 50) if i % 3 == 0 else 1000
            reason = None
            async for output in llm.generate(prompt, DELTA, request_id=f"r{i}"):
                seen += output.outputs[0].token_ids
                reason = output.outputs[0].finish_reason
                if len(seen) >= stop_at and reason is None:
                    await llm.abort(f"r{i}")
            assert seen == prompt[: len(seen)]
            if i % 3:
                assert seen == prompt
            assert reason is not None
            return reason

        reasons = await asyncio.gather(*(one(i) for i in range(64)))
        assert reasons.count("abort") >= 15
        await idle(llm)

    on_llm(run, body, options={"step_ms": 1.0, "max_num_seqs": 32})


# --- cancellation, break, aclose, dropping ---------------------------------------------------------------------------


def test_cancelling_a_reader_in_the_iteration_that_delivered_to_it_loses_nothing(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        for _ in range(20):
            stream = llm.generate(list(range(100)), DELTA)
            seen = list((await anext(stream)).outputs[0].token_ids)
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            while stream._slots[0].token_ids is None:  # until the dispatcher has delivered; the task has not run yet
                await asyncio.sleep(0)
                if task.done():
                    seen += task.result().outputs[0].token_ids
                    task = asyncio.ensure_future(anext(stream))
                    await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            rest = [output async for output in stream]
            seen += [token for output in rest for token in output.outputs[0].token_ids]
            assert seen == list(range(len(seen)))
            assert rest[-1].outputs[0].finish_reason == "abort"
            assert rest[-1].finished
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        await idle(llm)

    on_llm(run, body, options={"step_ms": 1.0})


@pytest.mark.parametrize("way", ["cancel", "aclose", "abort", "drop", "break"])
def test_every_way_to_leave_a_stream_ends_the_request(run: Run, way: str) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.generate([9] * 1000, DELTA, request_id="r")
        async for output in stream:
            assert output.outputs[0].token_ids
            break
        async with asyncio.timeout(5):
            while llm.client.scheduler_stats.running != 1:
                await asyncio.sleep(0.001)
        if way == "cancel":
            await asyncio.sleep(0)
            while (task := asyncio.ensure_future(anext(stream))) and await asyncio.sleep(0) is None and task.done():
                pass
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif way == "aclose":
            await stream.aclose()
        elif way == "abort":
            await llm.abort("r")
        if way in ("drop", "break"):
            del stream
            gc.collect()
        else:
            rest = [output async for output in stream]
            assert rest[-1].outputs[0].finish_reason == "abort"
            assert rest[-1].finished
            await stream.aclose()  # again: a no-op
            await llm.abort("r")
        await idle(llm)
        assert await tokens_of(llm.generate([1], DELTA, request_id="r")) == [1]

    on_llm(run, body, options={"step_ms": 1.0})


def test_a_stream_that_is_never_read_sends_nothing(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.generate([1, 2], DELTA)
        await stream.aclose()
        assert llm.client.stats()["requests"] == 0
        del stream

    on_llm(run, body)


def test_a_slow_reader_gets_everything_merged(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.generate(list(range(200)), DELTA)
        first = await anext(stream)
        await idle(llm)
        rest = [output async for output in stream]
        assert len(rest) == 1
        assert first.outputs[0].token_ids + rest[0].outputs[0].token_ids == list(range(200))

    on_llm(run, body)


def test_a_second_reader_is_refused(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.generate([1] * 100, DELTA)
        await anext(stream)
        one = asyncio.ensure_future(anext(stream))
        two = asyncio.ensure_future(anext(stream))
        results = await asyncio.gather(one, two, return_exceptions=True)
        assert any(isinstance(result, RuntimeError) and "one" in str(result) for result in results)

    on_llm(run, body, options={"step_ms": 20.0})


# --- call-backs ------------------------------------------------------------------------------------------------------


def test_submit_calls_back_with_every_output(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        seen: list[RequestOutput | OutboardError] = []
        await llm.submit("hello", SamplingParams(max_tokens=10, output_kind="delta"), seen.append)
        gc.collect()  # nothing need be kept
        await idle(llm)
        outputs = [output for output in seen if isinstance(output, RequestOutput)]
        assert len(outputs) == len(seen)
        assert "".join(output.outputs[0].text for output in outputs) == "hello"
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        with pytest.raises(InvalidRequestError):
            await llm.submit("", None, seen.append)

        def bad(output: object) -> None:
            raise ValueError("callback")

        await llm.submit([1] * 500, DELTA, bad)
        await idle(llm)
        aborted: list[Any] = []
        stream = await llm.submit([1] * 500, DELTA, aborted.append)
        stream.abort()
        assert aborted[-1].outputs[0].finish_reason == "abort"
        await idle(llm)

    on_llm(run, body)


def test_submit_is_told_of_the_engines_death(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        seen: list[Any] = []
        await llm.submit([1] * 500, DELTA, seen.append)
        os.kill(llm.client.core_engines[0].pid, signal.SIGKILL)
        async with asyncio.timeout(2):
            while not (seen and isinstance(seen[-1], EngineDeadError)):
                await asyncio.sleep(0.001)

    on_llm(run, body, options={"step_ms": 5.0})


# --- results that are no tokens --------------------------------------------------------------------------------------


def test_results_arrive_one_by_one(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        outputs = [output async for output in llm.generate(inputs="go")]
        assert [output.outputs[0].result["left"] for output in outputs] == [2, 1, 0]
        assert [output.finished for output in outputs] == [False, False, True]
        stream = llm.generate(inputs="go")
        first = await anext(stream)
        await idle(llm)  # the others wait for their reader
        rest = [output async for output in stream]
        assert [output.outputs[0].result["left"] for output in [first, *rest]] == [2, 1, 0]
        assert [output.finished for output in rest] == [False, True]

    on_llm(run, body, ResultsEngine, options={"count": 3, "size": 10_000})


def test_a_reader_that_is_behind_by_too_many_bytes_loses_its_stream_alone(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        good = asyncio.ensure_future(tokens_of(llm.generate(inputs="go")))
        slow = llm.generate(inputs="go")
        await anext(slow)
        assert await good == []
        with pytest.raises(SlowReaderError, match=r"stream_buffer_bytes=200000"):
            async for _ in slow:
                pass
        with pytest.raises(SlowReaderError):
            await anext(slow)
        await idle(llm)

    on_llm(
        run,
        body,
        ResultsEngine,
        options={"count": 800, "size": 1000},
        transport=TransportConfig(stream_buffer_bytes=200_000),  # what one read brings, 64 KiB, is no lag
    )


# --- bad input -------------------------------------------------------------------------------------------------------


def test_bad_requests_fail_alone_with_an_error_that_says_what_to_do(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        others = [asyncio.ensure_future(tokens_of(llm.generate([i] * 40, DELTA))) for i in range(4)]
        cases: list[tuple[Any, type[Exception], str]] = [
            ("", InvalidRequestError, "empty"),
            ([], InvalidRequestError, "empty"),
            ([1, 256], InvalidRequestError, r"256.*0 to 255"),
            ([-1], InvalidRequestError, "-1"),
            ([1.5], InvalidRequestError, "token ids"),
            (["a"], InvalidRequestError, "token ids"),
            (5, InvalidRequestError, "token ids"),
            ([{"role": "user"}], InvalidRequestError, "content"),
            ([1] * 100, PromptTooLongError, r"100 tokens.*100.*at most 99"),
            ("x" * 101, PromptTooLongError, "101 characters"),
        ]
        for prompt, error, text in cases:
            stream = llm.generate(prompt, DELTA)
            with pytest.raises(error, match=text):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        for bad in ({"max_tokens": 0}, {"temperature": -1.0}, {"n": 0}, {"top_p": 0.0}, {"stop": [""]}):
            with pytest.raises(InvalidRequestError, match=next(iter(bad))):
                SamplingParams(**bad)  # type: ignore[arg-type]
        first = llm.generate([1] * 50, DELTA, request_id="same")
        await anext(first)
        with pytest.raises(DuplicateRequestError, match="'same'"):
            await anext(llm.generate([1], DELTA, request_id="same"))
        with pytest.raises(DuplicateRequestError, match="'same'"):
            await anext(llm.generate([1], SamplingParams(n=2), request_id="same"))
        assert await asyncio.gather(*others) == [[i] * 40 for i in range(4)]
        assert len(await tokens_of(first)) > 0
        await idle(llm)

    on_llm(run, body, options={"max_model_len": 100, "step_ms": 0.5})


def test_a_prompt_of_too_many_characters_is_not_even_encoded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from outboard.engines.byte_tokenizer import ByteTokenizer

    encoded: list[int] = []
    encode = ByteTokenizer.encode
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: (encoded.append(len(text)), encode(self, text))[1])

    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(PromptTooLongError):
            await anext(llm.generate("x" * 10_000_000))
        assert not encoded
        async for _ in llm.generate("x" * 5000, SamplingParams(max_tokens=1)):  # encoded in a thread
            pass
        assert encoded == [5000]

    on_llm(run, body, options={"max_model_len": 10_000})


def test_an_engine_that_refuses_a_request_ends_it_alone(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        outputs = [output async for output in llm.generate([1, 2, 3])]
        assert outputs[-1].outputs[0].finish_reason == "error"
        assert "takes no requests" in (outputs[-1].outputs[0].error or "")
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            await anext(llm.generate("text"))
        assert llm.tokenizer is None

    on_llm(run, body, CallableEngine)


@pytest.mark.parametrize(
    ("engine", "options", "error", "text"),
    [
        ("ecko", {}, EngineNotFoundError, r"'ecko'.*openvino, echo, mock"),
        ("no_such_module:X", {}, EngineNotFoundError, "no_such_module"),
        ("faulty:Nope", {}, EngineNotFoundError, "CallableEngine, DyingEngine"),
        ("/no/such/file.py:X", {}, EngineNotFoundError, "/no/such/file.py"),
        ("faulty:die", {}, EngineNotFoundError, "EngineCore"),
        ("echo", {"max_seqs": 1}, EngineOptionError, r"'max_seqs'.*max_num_seqs: int"),
        ("echo", {"max_num_seqs": "eight"}, EngineOptionError, r"'max_num_seqs'.*'eight'.*max_num_seqs: int"),
    ],
)
def test_a_wrong_engine_or_option(run: Run, engine: str, options: dict[str, Any], error: Any, text: str) -> None:
    async def main() -> None:
        with pytest.raises(error, match=text):
            async with AsyncLLM(engine, options=options):
                pass

    run(main())


def test_bad_arguments_of_asyncllm() -> None:
    with pytest.raises(ConfigError, match="options inside"):
        AsyncLLM(EngineConfig(engine="echo"), options={})
    with pytest.raises(RuntimeError, match="not been started"):
        _ = AsyncLLM("echo").client


# --- life ------------------------------------------------------------------------------------------------------------


def test_it_starts_with_the_first_request_and_ends_for_good(run: Run) -> None:
    async def main() -> None:
        llm = AsyncLLM("echo", options={"max_model_len": 50})
        first, second = await asyncio.gather(tokens_of(llm.generate([1], DELTA)), tokens_of(llm.generate([2], DELTA)))
        assert (first, second) == ([1], [2])
        assert llm.engine_info.max_model_len == 50
        await llm.check_health()
        running = llm.generate([1] * 49, DELTA)
        await anext(running)
        await llm.shutdown()
        await llm.shutdown()
        with pytest.raises((ClientClosedError, StopAsyncIteration)):
            while True:
                await anext(running)
        for call in (llm.check_health(), anext(llm.generate([1], DELTA)), llm.start()):
            with pytest.raises(ClientClosedError):
                await call

    run(main())


def test_engine_info_reaches_the_front_end(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        assert llm.engine_info == EngineInfo(max_model_len=77, vocab_size=99, model="callable", extra={"answer": 42})

    on_llm(run, body, CallableEngine)


def test_death_ends_every_stream_after_what_had_arrived(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        async def one(i: int) -> int:
            seen = []
            with pytest.raises(EngineDeadError, match="boom"):
                async for output in llm.generate([1], SamplingParams(max_tokens=1000, output_kind="delta")):
                    seen += output.outputs[0].token_ids
            return len(seen)

        counts = await asyncio.wait_for(asyncio.gather(*(one(i) for i in range(100))), 5)
        assert max(counts) > 0
        with pytest.raises(EngineDeadError, match="boom"):
            await llm.check_health()
        with pytest.raises(EngineDeadError, match="boom"):
            await anext(llm.generate([1]))

    on_llm(run, body, DyingEngine, options={"how": "exception", "step": 30, "step_ms": 5.0})


def test_cancelling_the_start_leaves_nothing(run: Run) -> None:
    async def main() -> None:
        llm = AsyncLLM(DyingEngine, options={"when": "hang"})
        task = asyncio.ensure_future(llm.start())
        done, _ = await asyncio.wait([task], timeout=0.5)
        assert not done
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
