"""The client's contract (docs/architecture.md, "What a client promises"), line by line, over real processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import os
import random
import signal
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from faulty import CallableEngine, DyingEngine
from outboard import (
    AsyncMPClient,
    ClientClosedError,
    DuplicateRequestError,
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineState,
    InvalidRequestError,
    RemoteError,
    SamplingParams,
    TransportConfig,
    UtilityError,
    UtilityNotFoundError,
    UtilityTimeoutError,
)
from outboard.client.pending import _process_utility_output
from outboard.config import Sockets
from outboard.protocol.messages import ErrorReport, UtilityOutput
from support import Run, children

pytestmark = pytest.mark.usefixtures("nothing_left")


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 16) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=list(prompt), sampling_params=SamplingParams(max_tokens=max_tokens)
    )


async def collect(client: AsyncMPClient, *names: str) -> dict[str, list[int]]:
    """The tokens of these requests, read until all have finished."""
    tokens: dict[str, list[int]] = {name: [] for name in names}
    open_names = set(names)
    while open_names:
        for output in (await client.get_output_async()).outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                open_names.remove(output.request_id)
    return tokens


def on_client(run: Run, body: Any, engine: Any = "echo", **settings: Any) -> None:
    """Runs `body(client)` on a client that is shut down afterwards."""

    async def main() -> None:
        client = await AsyncMPClient.launch(EngineConfig(engine=engine, **settings))
        try:
            await body(client)
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())


# --- 1: one event loop carries everything ----------------------------------------------------------------------------


def test_streaming_starts_no_thread(run: Run) -> None:
    async def main() -> None:
        client = AsyncMPClient("echo")
        try:
            before = threading.active_count()  # the launcher's is one of them; no output passes through it
            await client.add_request_async(request())
            assert (await collect(client, "r"))["r"] == [1, 2, 3]
            assert threading.active_count() == before
        finally:
            client.shutdown()
        assert threading.active_count() < before

    run(main())


# --- 2: built outside a loop -----------------------------------------------------------------------------------------


def test_built_outside_a_loop_it_attaches_with_the_first_call(run: Run) -> None:
    client = AsyncMPClient("echo")
    assert client.output_queue_task is None

    async def main() -> None:
        await client.add_request_async(request())
        assert isinstance(client.output_queue_task, asyncio.Future)
        task = client.output_queue_task
        client._ensure_output_queue_task()
        assert client.output_queue_task is task
        assert (await collect(client, "r"))["r"] == [1, 2, 3]

    try:
        run(main())
    finally:
        client.shutdown()


def test_built_inside_a_loop_it_reads_at_once(run: Run) -> None:
    async def main() -> None:
        client = AsyncMPClient("echo")
        try:
            assert client.output_queue_task is not None
            with pytest.raises(RuntimeError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, client.get_output_async())
        finally:
            client.shutdown()

    run(main())


@pytest.mark.parametrize("call", ["add", "output", "utility", "abort"])
def test_a_death_before_the_first_call_is_not_lost(run: Run, call: str) -> None:
    client = AsyncMPClient("echo")
    os.kill(client.core_engines[0].pid, signal.SIGKILL)
    client._resources.group.wait_for(EngineState.DEAD, timeout=10)

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="SIGKILL") as caught:
                if call == "add":
                    await client.add_request_async(request())
                elif call == "output":
                    await client.get_output_async()
                elif call == "utility":
                    await client.call_utility_async("x")
                else:
                    await client.abort_requests_async(["x"])
                    client.validate_alive()
            assert caught.value.exit_code == -signal.SIGKILL

    try:
        run(main())
    finally:
        client.shutdown()


def test_what_came_before_the_death_can_still_be_read(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        await client.add_request_async(request(prompt=tuple(range(50)), max_tokens=50))
        while client.outputs_queue.qsize() < 2:
            await asyncio.sleep(0)
        os.kill(client.core_engines[0].pid, signal.SIGKILL)
        await asyncio.wait_for(asyncio.shield(client.output_queue_task), 5)  # type: ignore[arg-type]
        seen: list[int] = []
        with pytest.raises(EngineDeadError):
            while True:
                for output in (await client.get_output_async()).outputs:
                    seen += output.new_token_ids
        assert seen == list(range(len(seen)))
        assert len(seen) >= 1

    on_client(run, body, options={"step_ms": 5.0})


def test_cancelling_output_queue_task_cancels_reading(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        waiting = asyncio.ensure_future(client.get_output_async())
        call = asyncio.ensure_future(client.call_utility_async("never"))
        await asyncio.sleep(0)
        assert client.output_queue_task is not None
        client.output_queue_task.cancel()
        for task in (waiting, call):
            with pytest.raises(EngineDeadError, match="cancelled"):
                await asyncio.wait_for(task, 1)
        with pytest.raises(EngineDeadError, match="cancelled"):
            await client.add_request_async(request())

    on_client(run, body, CallableEngine)


# --- 3: dropping the client ------------------------------------------------------------------------------------------


def test_dropping_the_last_reference_stops_the_child(run: Run) -> None:
    async def main() -> None:
        client = AsyncMPClient("echo")
        pid = client.core_engines[0].pid
        await client.add_request_async(request())
        await collect(client, "r")
        reference = weakref.ref(client)
        del client
        gc.collect()
        assert reference() is None
        await asyncio.to_thread(psutil.wait_procs, children(), 5)
        assert not psutil.pid_exists(pid)

    run(main())


def test_dropping_a_client_whose_loop_is_closed(run: Run) -> None:
    async def main() -> AsyncMPClient:
        client = AsyncMPClient("echo")
        await client.add_request_async(request())
        await collect(client, "r")
        return client

    reference = weakref.ref(run(main()))
    gc.collect()
    assert reference() is None


def test_dropping_a_client_in_another_thread(run: Run) -> None:
    async def main() -> None:
        box = [AsyncMPClient("echo")]
        await box[0].add_request_async(request())
        await collect(box[0], "r")
        await asyncio.to_thread(box.clear)
        await asyncio.to_thread(gc.collect)
        await asyncio.to_thread(psutil.wait_procs, children(), 5)

    run(main())


def test_a_forked_copy_that_drops_the_client_does_nothing() -> None:
    client = AsyncMPClient("echo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads
        pid = os.fork()
    if pid == 0:
        client.shutdown()
        client._finalizer()
        os._exit(0)
    os.waitpid(pid, 0)

    async def main() -> None:
        await client.add_request_async(request())
        assert (await collect(client, "r"))["r"] == [1, 2, 3]

    asyncio.run(main())
    client.shutdown()


# --- 4, 5: utility calls ---------------------------------------------------------------------------------------------


def test_utility_calls_end_by_result_error_timeout_or_cancellation(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        call = client.call_utility_async
        assert await call("echo", 1, "two", kwargs={"three": [3.0, None]}) == [[1, "two"], {"three": [3.0, None]}]
        assert await call("later", 0.01, "value") == "value"
        with pytest.raises(RemoteError, match="no such thing") as remote:
            await call("boom")
        assert remote.value.remote_type == "LookupError"
        assert "in boom" in remote.value.remote_traceback
        with pytest.raises(RemoteError, match="object"):
            await call("unsendable")
        with pytest.raises(UtilityNotFoundError, match=r"'nope'.*echo.*never"):
            await call("nope")
        with pytest.raises(UtilityNotFoundError):
            await call("not_a_utility")
        with pytest.raises(UtilityError, match="object"):
            await call("echo", object())
        with pytest.raises(UtilityTimeoutError, match=r"'never'.*0\.05"):
            await call("never", timeout=0.05)
        with pytest.raises(ValueError, match="rank 3"):
            await call("echo", rank=3)
        task = asyncio.ensure_future(call("never"))
        await asyncio.sleep(0)
        assert len(client.utility_results) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not client.utility_results
        assert await call("echo", rank=0) == [[], {}]

    on_client(run, body, CallableEngine)


def test_concurrent_utility_calls_get_their_own_answers(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        answers = await asyncio.gather(*(client.call_utility_async("echo", i) for i in range(200)))
        assert [answer[0] for answer in answers] == [[i] for i in range(200)]
        slow_first = await asyncio.gather(
            client.call_utility_async("later", 0.05, "slow"), client.call_utility_async("echo", "fast")
        )
        assert slow_first == ["slow", [["fast"], {}]]

    on_client(run, body, CallableEngine)


def test_a_late_answer_is_dropped_quietly(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: AsyncMPClient) -> None:
        with pytest.raises(UtilityTimeoutError):
            await client.call_utility_async("later", 0.1, "late", timeout=0.01)
        assert await client.call_utility_async("later", 0.15, "after") == "after"
        assert client.stats()["dropped"] == {}

    on_client(run, body, CallableEngine)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_call_is_registered_before_it_is_sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(client: AsyncMPClient) -> None:
        seen: list[int] = []
        post = client._membership.links[0].sender._post
        monkeypatch.setattr(
            client._membership.links[0].sender,
            "_post",
            lambda *args: (seen.append(len(client.utility_results)), post(*args)),
        )
        await client.call_utility_async("echo")
        assert seen == [1]

    on_client(run, body, CallableEngine)


@pytest.mark.parametrize("kind", ["asyncio", "concurrent"])
def test_utility_outputs_fill_futures_of_both_kinds(kind: str) -> None:
    loop = asyncio.new_event_loop()
    try:
        make: Any = loop.create_future if kind == "asyncio" else concurrent.futures.Future
        table = {0: make(), 1: make(), 2: make()}
        ok, failed, gone = table[0], table[1], table[2]
        gone.cancel()
        _process_utility_output(UtilityOutput(0, "fine"), table)
        _process_utility_output(UtilityOutput(1, error=ErrorReport("KeyError", "x", "tb")), table)
        _process_utility_output(UtilityOutput(2, "late"), table)
        _process_utility_output(UtilityOutput(99, "unknown"), table)
        assert ok.result() == "fine"
        assert isinstance(failed.exception(), RemoteError)
        assert not table
    finally:
        loop.close()


# --- 6: what reaches get_output_async --------------------------------------------------------------------------------


def test_only_outputs_and_stats_reach_get_output_async(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        await client.call_utility_async("echo")
        assert client.outputs_queue.empty()

    on_client(run, body, CallableEngine)

    async def with_requests(client: AsyncMPClient) -> None:
        await client.add_request_async(request())
        messages = []
        while not (messages and messages[-1].finished):
            messages.append(await client.get_output_async())
        assert all(message.handles or message.scheduler_stats for message in messages)
        assert any(message.scheduler_stats and message.scheduler_stats.running == 1 for message in messages)

    on_client(run, with_requests, options={"step_ms": 20.0})


def test_a_message_names_requests_that_finish_behind_it(run: Run) -> None:
    """Ids are known for a message that is read after its request has ended."""

    async def body(client: AsyncMPClient) -> None:
        await client.add_request_async(request())
        while client.stats()["requests"]:
            await asyncio.sleep(0)
        assert (await collect(client, "r"))["r"] == [1, 2, 3]

    on_client(run, body)


def test_a_cancelled_get_output_async_loses_nothing(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        await client.add_request_async(request(prompt=tuple(range(200)), max_tokens=200))
        seen: list[int] = []
        while len(seen) < 200:
            task = asyncio.ensure_future(client.get_output_async())
            await asyncio.sleep(0.0005)
            if not task.cancel():
                seen += [token for output in task.result().outputs for token in output.new_token_ids]
            else:
                with pytest.raises(asyncio.CancelledError):
                    await task
            while not client.outputs_queue.empty():
                message = await client.get_output_async()
                seen += [token for output in message.outputs for token in output.new_token_ids]
        assert seen == list(range(200))

    on_client(run, body, options={"step_ms": 0.2})


# --- 7, 8: the end ---------------------------------------------------------------------------------------------------

WAYS = [
    ("exception", 1, "RuntimeError: boom"),
    ("_exit", 7, "exit code 7"),
    ("sigkill", -signal.SIGKILL, "SIGKILL"),
    ("sigsegv", -signal.SIGSEGV, "SIGSEGV"),
    ("abort", -signal.SIGABRT, "SIGABRT"),
]


@pytest.mark.parametrize(("how", "code", "text"), WAYS)
def test_death_in_step_3_ends_100_waiters_with_all_the_facts(run: Run, how: str, code: int, text: str) -> None:
    async def body(client: AsyncMPClient) -> None:
        calls = [asyncio.ensure_future(client.call_utility_async("never")) for _ in range(50)]
        await asyncio.sleep(0)
        for i in range(50):
            await client.add_request_async(request(f"r{i}", max_tokens=100))
        readers = [asyncio.ensure_future(collect(client, f"x{i}")) for i in range(3)]
        started = time.monotonic()
        for task in calls:
            with pytest.raises(EngineDeadError) as caught:
                await asyncio.wait_for(task, 5)
        assert time.monotonic() - started < 2
        error = caught.value
        assert (error.rank, error.pid, error.phase) == (0, client.core_engines[0].pid, "running")
        assert error.incarnation == 0
        assert error.exit_code == code
        assert text in error.reason
        assert f"about to die by {how}" in error.stderr_tail
        assert f"about to die by {how}" in str(error)
        if how == "exception":
            assert error.remote_type == "RuntimeError"
            assert "in die" in error.remote_traceback
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        errors = []
        for _ in range(2):  # sticky
            with pytest.raises(EngineDeadError) as again:
                while True:
                    await client.get_output_async()
            errors.append(again.value)
            with pytest.raises(EngineDeadError):
                await client.add_request_async(request("late"))
            with pytest.raises(EngineDeadError):
                await client.call_utility_async("never")
        assert errors[0] is not errors[1]
        stats = client.stats()
        assert stats["requests"] == stats["utility_calls"] == 0

    on_client(run, body, DyingEngine, options={"how": how, "step_ms": 2.0})


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_hook_that_raises_ends_the_client(run: Run, coroutine: bool) -> None:
    class Sync(AsyncMPClient):
        @staticmethod
        def process_engine_outputs(client: AsyncMPClient, outputs: EngineCoreOutputs) -> None:
            raise KeyError("hook")

    class Coroutine(AsyncMPClient):
        @staticmethod
        async def process_engine_outputs(client: AsyncMPClient, outputs: EngineCoreOutputs) -> None:
            await asyncio.sleep(0)
            raise KeyError("hook")

    async def main() -> None:
        client = await (Coroutine if coroutine else Sync).launch("echo")
        try:
            await client.add_request_async(request())
            with pytest.raises(EngineDeadError, match="process_engine_outputs raised KeyError") as caught:
                await asyncio.wait_for(client.get_output_async(), 1)
            assert isinstance(caught.value.__cause__, KeyError)
        finally:
            client.shutdown()

    run(main())


def test_a_gap_in_the_sequence_ends_the_client_and_junk_does_not(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        receiver = client._membership.links[0].receiver
        encode = client._membership.links[0].sender._encoder.encode
        for junk in (b"", b"\xc1", os.urandom(50), *encode([1, 2, 3])):
            receiver.on_message(junk, ())
        receiver.on_message(encode(EngineCoreOutputs(0, 12345, 0, 0.0))[0], ())
        assert client.stats()["dropped"] == {"undecodable": 4, "other epoch": 1}
        await client.add_request_async(request())
        assert (await collect(client, "r"))["r"] == [1, 2, 3]
        receiver.on_message(encode(EngineCoreOutputs(0, client._membership.links[0].epoch, 0, 0.0))[0], ())
        assert client.stats()["dropped"]["repeated"] == 1
        expected = receiver._expected
        receiver.on_message(encode(EngineCoreOutputs(0, client._membership.links[0].epoch, expected + 2, 0.0))[0], ())
        with pytest.raises(EngineDeadError, match=f"messages {expected} to {expected + 1} .* lost"):
            while True:
                await asyncio.wait_for(client.get_output_async(), 1)

    on_client(run, body)


def test_the_engine_says_that_it_is_dead_and_hangs_on_its_way_out(run: Run) -> None:
    from outboard.protocol.messages import EngineCoreDead

    async def body(client: AsyncMPClient) -> None:
        report = ErrorReport("MyError", "it hurts", "Traceback: it hurts")
        dead = client._membership.links[0].sender._encoder.encode(
            EngineCoreDead(0, client._membership.links[0].epoch, report)
        )[0]
        client._membership.links[0].receiver.on_message(dead, ())
        with pytest.raises(EngineDeadError, match="it hurts") as caught:
            await asyncio.wait_for(client.get_output_async(), 1)
        assert caught.value.remote_type == "MyError"

    on_client(run, body)


# --- 9: sending ------------------------------------------------------------------------------------------------------


def test_send_input_is_done_once_the_message_is_held(run: Run) -> None:
    from outboard.protocol.messages import AbortRequests, EngineCoreRequestType

    async def body(client: AsyncMPClient) -> None:
        await client._send_input(EngineCoreRequestType.ABORT, AbortRequests(client._membership.links[0].epoch, [5]))

    on_client(run, body)


@pytest.mark.parametrize("sockets", ["unix", "zmq"])
@pytest.mark.usefixtures("as_configured")
def test_buffers_live_until_they_have_left_and_no_longer(run: Run, sockets: Sockets) -> None:
    async def body(client: AsyncMPClient) -> None:
        array = np.arange(200_000, dtype=np.float32)  # large enough for a frame, too small for shared memory
        reference = weakref.ref(array)
        os.kill(client.core_engines[0].pid, signal.SIGSTOP)
        calls = [asyncio.ensure_future(client.call_utility_async("echo", array)) for _ in range(20)]
        await asyncio.sleep(0)
        assert len(client.pending_messages) > 0
        del array
        gc.collect()
        assert reference() is not None
        os.kill(client.core_engines[0].pid, signal.SIGCONT)
        for answer in await asyncio.gather(*calls):
            np.testing.assert_array_equal(answer[0][0], np.arange(200_000, dtype=np.float32))
        del answer, calls
        for _ in range(100):
            gc.collect()
            if not client.pending_messages and reference() is None:
                break
            await asyncio.sleep(0.01)
        assert len(client.pending_messages) == 0
        assert reference() is None

    on_client(run, body, CallableEngine, transport=TransportConfig(sockets=sockets))


# --- 10, 11: requests ------------------------------------------------------------------------------------------------


def test_client_index_is_stamped_and_reaches_the_engine(run: Run) -> None:
    async def main() -> None:
        client = await AsyncMPClient.launch("echo", client_index=3)
        try:
            one = request()
            await client.add_request_async(one)
            assert one.client_index == 3
            assert one.arrival_time > 0
            await collect(client, "r")
        finally:
            client.shutdown()

    run(main())


def test_cancelled_adds_leave_no_trace(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        handles = 0
        for i in range(300):
            task = asyncio.ensure_future(client.add_request_async(request(f"r{i}")))
            if i % 2:
                await asyncio.sleep(0)
            task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            handles += not isinstance(result, asyncio.CancelledError)
            assert client._pending._next_handle == handles
        assert 0 < handles < 300
        while client.stats()["requests"]:
            await asyncio.wait_for(client.get_output_async(), 5)
        assert not client._pending.request_ids
        assert not client._pending.handles

    on_client(run, body)


def test_a_request_id_in_flight_is_refused_and_reusable_after_its_end(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        first = await client.add_request_async(request())
        with pytest.raises(DuplicateRequestError, match="'r'"):
            await client.add_request_async(request())
        await collect(client, "r")
        second = await client.add_request_async(request(prompt=(7,)))
        assert second > first
        assert (await collect(client, "r"))["r"] == [7]

    on_client(run, body)


def test_an_id_reused_at_once_after_an_abort_gets_only_its_own_tokens(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        for i in range(100):
            await client.add_request_async(request(prompt=(1,) * 50, max_tokens=50))
            if i % 3:
                await asyncio.sleep(0.001)
            await client.abort_requests_async(["r"])
            await client.add_request_async(request(prompt=(2, 3)))
            while not client.outputs_queue.empty():  # from before the abort
                client.outputs_queue.get_nowait()
            assert (await collect(client, "r"))["r"] == [2, 3]

    on_client(run, body)


def test_aborting_what_is_not_there_is_a_no_op(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        await client.abort_requests_async(["never seen"])
        await client.add_request_async(request())
        await collect(client, "r")
        await client.abort_requests_async(["r"])
        await client.add_request_async(request("s", prompt=(1,) * 1000, max_tokens=1000))
        await client.abort_requests_async(["s"])
        await client.abort_requests_async(["s", "s"])
        await client.add_request_async(request("t"))
        assert (await collect(client, "t"))["t"] == [1, 2, 3]
        assert client.scheduler_stats.running == 0

    on_client(run, body)


def test_an_abort_takes_back_an_unsent_add(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        os.kill(client.core_engines[0].pid, signal.SIGSTOP)
        big = tuple(range(2000))
        names = [f"r{i}" for i in range(200)]
        for name in names:
            await client.add_request_async(request(name, prompt=big))
        held = client.stats()["outbox"]
        assert held > 0
        await client.abort_requests_async(names[-held:])
        assert client.stats()["outbox"] == 0
        os.kill(client.core_engines[0].pid, signal.SIGCONT)
        await client.abort_requests_async(names)
        await client.add_request_async(request("last"))
        assert (await collect(client, "last"))["last"] == [1, 2, 3]

    on_client(run, body, transport=TransportConfig(high_water_mark=10))


def test_a_request_that_cannot_be_sent_fails_alone(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        bad = request()
        bad.inputs = object()
        with pytest.raises(InvalidRequestError, match="object"):
            await client.add_request_async(bad)
        with pytest.raises(InvalidRequestError):
            await client.add_request_async(request(prompt=(1 << 40,)))
        assert client.stats()["requests"] == 0
        await client.add_request_async(request())
        assert (await collect(client, "r"))["r"] == [1, 2, 3]

    on_client(run, body)


def test_an_undecodable_add_fails_that_request_alone(run: Run) -> None:
    from outboard.protocol.messages import EngineCoreRequestType

    async def body(client: AsyncMPClient) -> None:
        handle = client._pending.add_request("bad")
        frames = client._membership.links[0].sender._encoder.encode(
            [client._membership.links[0].epoch, handle, "bad", b"", {"not": "params"}]
        )
        client._membership.links[0].outbox.send([EngineCoreRequestType.ADD.value, *frames])
        await client.add_request_async(request())
        outputs: dict[str, Any] = {}
        while len(outputs) < 2:
            for output in (await client.get_output_async()).outputs:
                if output.finish_reason:
                    outputs[output.request_id] = output
        assert outputs["bad"].finish_reason == "error"
        assert "undecodable" in outputs["bad"].error
        assert outputs["r"].finish_reason == "stop"

    on_client(run, body)


# --- hooks and sinks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coroutine", [False, True])
def test_process_engine_outputs_sees_every_message_in_order_before_it_is_delivered(run: Run, coroutine: bool) -> None:
    seen: list[EngineCoreOutputs] = []

    class Sync(AsyncMPClient):
        @staticmethod
        def process_engine_outputs(client: AsyncMPClient, outputs: EngineCoreOutputs) -> None:
            assert isinstance(client, Sync)
            seen.append(outputs)

    class Coroutine(AsyncMPClient):
        @staticmethod
        async def process_engine_outputs(client: AsyncMPClient, outputs: EngineCoreOutputs) -> None:
            await asyncio.sleep(0.001)
            seen.append(outputs)

    async def main() -> None:
        client = await (Coroutine if coroutine else Sync).launch("echo")
        try:
            await client.add_request_async(request(prompt=tuple(range(20)), max_tokens=20))
            got = []
            while not (got and got[-1].finished):
                got.append(await client.get_output_async())
                assert got[-1] is seen[len(got) - 1]
            assert [message.sequence for message in got] == sorted(message.sequence for message in got)
        finally:
            client.shutdown()

    run(main())


def test_elastic_notifications_go_to_their_hook_each_in_a_task(run: Run) -> None:
    from outboard.protocol.messages import EEP_NOTIFICATION_CALL_ID

    seen: list[Any] = []
    gate = asyncio.Event()

    class Elastic(AsyncMPClient):
        @staticmethod
        async def eep_process_engine_core_notification(client: AsyncMPClient, data: Any) -> None:
            await gate.wait()
            seen.append(data)
            if data[0] == "BAD":
                raise ValueError("hook")

    async def main() -> None:
        client = await Elastic.launch("echo")
        try:
            for payload in (["A", 0], ["BAD", 1], None, ["malformed"], ["B", 2]):
                output = UtilityOutput(EEP_NOTIFICATION_CALL_ID, payload)
                client._membership.links[0].receiver._on_utility_output(output)
            await asyncio.sleep(0)
            assert seen == []
            gc.collect()  # the tasks are kept referenced
            gate.set()
            while len(seen) < 3:
                await asyncio.sleep(0)
            assert sorted(seen) == [("A", 0), ("B", 2), ("BAD", 1)]
            assert client.stats()["dropped"] == {"malformed notification": 1}
            await client.add_request_async(request())
            assert (await collect(client, "r"))["r"] == [1, 2, 3]
        finally:
            client.shutdown()

    run(main())


def test_an_output_sink_gets_every_message_and_the_end(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        seen: list[Any] = []
        await client.add_request_async(request())
        while client.outputs_queue.qsize() < 2:
            await asyncio.sleep(0)
        client.set_output_sink(seen.append)
        with pytest.raises(RuntimeError, match="sink"):
            await client.get_output_async()
        while not seen[-1].finished:
            await asyncio.sleep(0)
        assert [token for message in seen for token in message.tokens] == [1, 2, 3]
        os.kill(client.core_engines[0].pid, signal.SIGKILL)
        async with asyncio.timeout(1):
            while not isinstance(seen[-1], EngineDeadError):
                await asyncio.sleep(0.001)

    on_client(run, body)


def test_a_bound_method_as_sink_is_held_weakly(run: Run) -> None:
    class Holder:
        def sink(self, message: object) -> None:
            pass

    async def body(client: AsyncMPClient) -> None:
        holder = Holder()
        reference = weakref.ref(holder)
        client.set_output_sink(holder.sink)
        del holder
        assert reference() is None
        await client.add_request_async(request())
        while client.stats()["requests"]:
            await asyncio.sleep(0)

    on_client(run, body)


# --- 12: shutdown ----------------------------------------------------------------------------------------------------


def test_shutdown_is_idempotent_and_ends_all_that_waits(run: Run) -> None:
    async def main() -> None:
        client = await AsyncMPClient.launch(CallableEngine)
        pid = client.core_engines[0].pid
        call = asyncio.ensure_future(client.call_utility_async("never"))
        output = asyncio.ensure_future(client.get_output_async())
        await asyncio.sleep(0)
        client.shutdown()
        client.shutdown()
        for task in (call, output):
            with pytest.raises(ClientClosedError):
                await asyncio.wait_for(task, 1)
        with pytest.raises(ClientClosedError):
            await client.add_request_async(request())
        assert not psutil.pid_exists(pid)

    run(main())


def test_shutdown_from_another_thread_and_after_the_loop_has_closed(run: Run) -> None:
    clients = []

    async def main() -> None:
        for _ in range(2):
            clients.append(await AsyncMPClient.launch("echo"))
        await asyncio.to_thread(clients[0].shutdown)
        assert clients[0]._resources.group.engines[0].death.exit_code == 0

    run(main())
    clients[1].shutdown()
    assert clients[1]._resources.group.engines[0].death.exit_code == 0


def test_shutdown_kills_an_engine_that_does_not_stop(run: Run) -> None:
    async def main() -> None:
        client = await AsyncMPClient.launch(CallableEngine)
        call = asyncio.ensure_future(client.call_utility_async("block", 60.0))
        assert not (await asyncio.wait([call], timeout=0.1))[0]
        started = time.monotonic()
        client.shutdown(timeout=0.3)
        assert time.monotonic() - started < 5
        assert client._resources.group.engines[0].death.exit_code == -signal.SIGKILL
        with pytest.raises(ClientClosedError):
            await call

    run(main())


def test_50_starts_and_stops_leave_nothing(short_tmp: Path) -> None:
    descriptors: list[int] = []
    for _ in range(50):
        client = AsyncMPClient("echo")
        client.shutdown()
        assert not children()
        assert not list(short_tmp.iterdir())
        descriptors.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208
    assert descriptors[1:] == descriptors[:1] * 49


# --- many times ------------------------------------------------------------------------------------------------------


def test_10000_random_cancellations_leave_nothing(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: AsyncMPClient) -> None:
        rng = random.Random(11)

        async def one(i: int) -> None:
            task: asyncio.Task[Any] = asyncio.ensure_future(
                client.call_utility_async("is_paused")
                if rng.random() < 0.5
                else client.add_request_async(request(f"r{i}", max_tokens=5))
            )
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for start in range(0, 10_000, 100):
            await asyncio.gather(*(one(i) for i in range(start, start + 100)))
        while client.stats()["requests"]:
            await asyncio.wait_for(client.get_output_async(), 5)
        assert await client.call_utility_async("is_paused", timeout=5) is False
        assert not client.utility_results
        assert not client._pending.request_ids
        assert not client._pending.handles
        assert client.stats()["dropped"] == {}

    on_client(run, body)
    gc.collect()
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


def test_an_id_reused_10000_times_right_after_its_abort(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        for i in range(10_000):
            await client.add_request_async(request(prompt=(i % 256,) * 3))
            if i % 7 == 0:
                await asyncio.sleep(0)
            if i == 9_999:
                break
            await client.abort_requests_async(["r"])
            while not client.outputs_queue.empty():
                client.outputs_queue.get_nowait()
        assert (await collect(client, "r"))["r"] == [9_999 % 256] * 3
        assert client.stats()["requests"] == 0

    on_client(run, body)
