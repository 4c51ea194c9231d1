"""One set of behaviours, over every kind of client: in process, blocking, asyncio."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from faulty import CallableEngine, DyingEngine, Line, Point
from outboard import (
    AsyncMPClient,
    ClientClosedError,
    ConfigError,
    DuplicateRequestError,
    EngineConfig,
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    EngineOptionError,
    EngineStartupError,
    InprocClient,
    InvalidRequestError,
    RemoteError,
    SamplingParams,
    SyncMPClient,
    TransportConfig,
    UnsupportedError,
    UtilityError,
    UtilityNotFoundError,
    UtilityTimeoutError,
)
from outboard.config import Sockets
from support import children

pytestmark = pytest.mark.usefixtures("nothing_left")


class Blocking:
    """The asyncio client behind the blocking clients' methods."""

    def __init__(self, config: EngineConfig) -> None:
        self.runner = asyncio.Runner()
        try:
            self.client = self.run(AsyncMPClient.launch(config))
        except BaseException:
            self.runner.close()
            raise

    def run(self, awaitable: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(30):
                return await awaitable

        return self.runner.run(bounded())

    def add_request(self, request: EngineCoreRequest) -> Any:
        return self.run(self.client.add_request_async(request))

    def abort_requests(self, ids: list[str]) -> Any:
        return self.run(self.client.abort_requests_async(ids))

    def get_output(self, timeout: float | None = None) -> Any:
        return self.run(asyncio.wait_for(self.client.get_output_async(), timeout))

    def call_utility(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.client.call_utility_async(*args, **kwargs))

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.client.collective_rpc_async(*args, **kwargs))

    def shutdown(self, timeout: float | None = None) -> None:
        self.client.shutdown(timeout)
        self.runner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


KINDS: dict[str, Callable[[EngineConfig], Any]] = {"inproc": InprocClient, "sync": SyncMPClient, "async": Blocking}
Make = Callable[..., Any]


@pytest.fixture(params=list(KINDS))
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes a client of each kind; shuts it down afterwards."""
    made = []

    def make_one(engine: Any = "echo", **settings: Any) -> Any:
        client = KINDS[request.param](EngineConfig(engine=engine, **settings))
        client.kind = request.param
        made.append(client)
        return client

    yield make_one
    for client in made:
        client.shutdown()


def request(name: str = "r", prompt: Any = (1, 2, 3), max_tokens: int = 100) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=list(prompt), sampling_params=SamplingParams(max_tokens=max_tokens)
    )


def collect(client: Any, *names: str) -> dict[str, Any]:
    tokens: dict[str, list[Any]] = {name: [] for name in names}
    going = set(names)
    while going:
        for output in client.get_output(timeout=10).outputs:
            if output.request_id in tokens:
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    tokens[output.request_id].append(output.finish_reason)
                    going.discard(output.request_id)
    return tokens


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# --- requests --------------------------------------------------------------------------------------------------------


def test_requests_run_to_their_end(make: Make) -> None:
    client = make()
    assert client.engine_info.model == "echo"
    handles = [client.add_request(request(f"r{i}", range(i + 1))) for i in range(30)]
    assert handles == list(range(30))
    assert collect(client, *(f"r{i}" for i in range(30))) == {f"r{i}": [*range(i + 1), "stop"] for i in range(30)}
    stats = client.stats()
    assert stats["requests"] == stats["utility_calls"] == 0
    assert stats["dropped"] == {}


def test_ids_in_flight_and_ids_reused(make: Make) -> None:
    client = make(options={"step_ms": 1.0})
    client.add_request(request())
    with pytest.raises(DuplicateRequestError, match="'r'"):
        client.add_request(request())
    client.abort_requests(["r", "unknown"])
    client.add_request(request(prompt=[7]))
    assert collect(client, "r") == {"r": [7, "stop"]}
    client.abort_requests(["r"])


def test_bad_requests_fail_alone(make: Make) -> None:
    client = make()
    bad = request("bad")
    bad.inputs = object()
    with pytest.raises(InvalidRequestError, match="object"):
        client.add_request(bad)
    with pytest.raises(InvalidRequestError):
        client.add_request(request("bad", [1 << 40]))
    client.add_request(request("empty", []))
    client.add_request(request())
    assert collect(client, "r", "empty") == {"r": [1, 2, 3, "stop"], "empty": ["error"]}


def test_get_output_waits_at_most_its_timeout(make: Make) -> None:
    client = make()
    if client.kind == "inproc":
        assert client.get_output(timeout=0.05).outputs == []  # nothing in flight: nothing to wait for
        return
    with pytest.raises(TimeoutError):
        client.get_output(timeout=0.05)


# --- utility calls ---------------------------------------------------------------------------------------------------


def test_utility_results_and_errors(make: Make) -> None:
    client = make(CallableEngine)
    call = client.call_utility
    assert call("echo", 1, "two", kwargs={"three": [None, 4.5]}) == [[1, "two"], {"three": [None, 4.5]}]
    assert call("later", 0.02, "value") == "value"
    with pytest.raises(RemoteError, match="no such thing") as remote:
        call("boom")
    assert "in boom" in remote.value.remote_traceback
    with pytest.raises(RemoteError, match="object"):
        call("unsendable")
    with pytest.raises(UtilityNotFoundError, match=r"'nope'.*echo"):
        call("nope")
    with pytest.raises(UtilityError, match="object"):
        call("echo", object())
    started = time.monotonic()
    with pytest.raises(UtilityTimeoutError, match=r"'never'.*0\.2"):
        call("never", timeout=0.2)
    assert time.monotonic() - started < 5
    with pytest.raises(UtilityTimeoutError):
        call("later", 0.05, "late", timeout=0.01)
    assert call("later", 0.1, "after") == "after"
    with pytest.raises(ValueError, match="rank 3"):
        call("echo", rank=3)
    assert call("echo", rank=0) == [[], {}]
    assert client.utility_results == {}


def test_values_keep_their_types(make: Make) -> None:
    client = make(CallableEngine)
    assert client.call_utility("move", Point(1, 2.5, ("a", "b")), (3, 4)) == Point(4, 6.5, ("a", "b"))
    points = client.call_utility("line", [Point(0, 0.0, ()), Point(1, 1.0, ())])
    assert points == Line([Point(0, 0.0, ()), Point(1, 1.0, ())])
    array = np.arange(12, dtype=np.float16).reshape(3, 4)
    back = client.call_utility("echo", {"deep": [array]})[0][0]["deep"][0]
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype
    assert client.call_utility("line_later", [Point(5, 5.0, ())]).points[0] == Point(5, 5.0, ())
    with pytest.raises(UtilityError, match="'point'"):
        client.call_utility("move", {"x": "not a number"}, (1, 2))


def test_collective_rpc_has_one_result_a_worker(make: Make) -> None:
    client = make(CallableEngine)
    assert client.collective_rpc("echo", args=(1,), kwargs={"k": 2}) == [[[1], {"k": 2}]]
    assert client.collective_rpc("move", 5.0, (Point(1, 1.0, ()), (1, 1))) == [Point(2, 2.0, ())]
    with pytest.raises(UtilityNotFoundError, match="nope"):
        client.collective_rpc("nope")


# --- controls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_and_resume_account_for_every_token(make: Make, mode: str) -> None:
    client = make(options={"step_ms": 1.0})
    names = [f"r{i}" for i in range(8)]
    for name in names:
        client.add_request(request(name, range(40)))
    first = client.get_output(timeout=10)
    before: dict[str, list[Any]] = {name: [] for name in [*names, "late"]}

    def note(message: Any) -> None:
        for output in message.outputs:
            before[output.request_id] += output.new_token_ids
            if output.finish_reason:
                before[output.request_id].append(output.finish_reason)

    note(first)
    assert client.call_utility("is_paused") is False
    client.call_utility("pause_generation", mode, timeout=10)
    assert client.call_utility("is_paused") is True
    client.add_request(request("late", [9]))
    stats = client.call_utility("get_stats")
    assert stats["paused"] is True
    assert stats["held"] == 1
    assert stats["requests"] == (9 if mode == "keep" else 1)
    while not client.outputs_queue.empty():
        note(client.get_output(timeout=10))
    ends = {"abort": "abort", "wait": "stop", "keep": None}[mode]
    for name in names:
        tokens = [token for token in before[name] if isinstance(token, int)]
        assert tokens == list(range(len(tokens)))
        assert (before[name][-1] == ends) if ends else all(isinstance(token, int) for token in before[name])
    assert before["late"] == []
    client.call_utility("resume_generation")
    while before["late"][-1:] != ["stop"] or (mode == "keep" and any(before[name][-1:] != ["stop"] for name in names)):
        note(client.get_output(timeout=10))
    assert before["late"] == [9, "stop"]
    if mode != "abort":
        assert all(before[name] == [*range(40), "stop"] for name in names)


def test_a_held_request_can_be_aborted_and_a_second_pause_escalates(make: Make) -> None:
    client = make(options={"step_ms": 1.0})
    client.call_utility("pause_generation", "keep")
    client.add_request(request("held"))
    client.abort_requests(["held"])
    client.add_request(request("kept", range(5)))
    assert client.call_utility("get_stats")["held"] == 1
    client.call_utility("pause_generation", "abort")
    client.call_utility("resume_generation")
    client.call_utility("resume_generation")
    assert collect(client, "kept") == {"kept": [0, 1, 2, 3, 4, "stop"]}
    with pytest.raises(UtilityError, match=r"abort.*wait.*keep.*sideways"):
        client.call_utility("pause_generation", "sideways")


def test_what_an_engine_cannot_do_is_unsupported(make: Make) -> None:
    client = make()
    for method in ("sleep", "wake_up", "reset_prefix_cache"):
        with pytest.raises(UnsupportedError, match="EchoEngine"):
            client.call_utility(method)
    assert client.call_utility("is_sleeping") is False
    assert client.call_utility("is_paused") is False


def test_sleep_aborts_and_holds_until_awake(make: Make) -> None:
    client = make("faulty:SleepyEngine", options={"step_ms": 1.0})
    client.add_request(request("r", range(50)))
    client.get_output(timeout=10)
    client.call_utility("sleep", 2)
    assert client.call_utility("is_sleeping") is True
    client.add_request(request("late", [1]))
    with pytest.raises(UtilityError, match="wake_up"):
        client.call_utility("resume_generation")
    client.call_utility("wake_up", ["weights"])
    assert client.call_utility("is_sleeping") is True
    client.call_utility("wake_up")
    assert client.call_utility("is_sleeping") is False
    tokens = collect(client, "late", "r")
    assert tokens["late"] == [1, "stop"]
    assert tokens["r"][-1] == "abort"


def test_profiles(make: Make, tmp_path: Any) -> None:
    client = make()
    path = str(tmp_path / "x.prof")
    assert client.call_utility("start_profile", path) == path
    with pytest.raises(UtilityError, match="already"):
        client.call_utility("start_profile")
    client.add_request(request())
    collect(client, "r")
    assert client.call_utility("stop_profile") == path
    import pstats

    assert any("step" in function for _, _, function in pstats.Stats(path).stats)  # type: ignore[attr-defined]
    with pytest.raises(UtilityError, match="start_profile"):
        client.call_utility("stop_profile")


# --- the end ---------------------------------------------------------------------------------------------------------


def test_an_exception_in_a_step_ends_everything_for_ever(make: Make) -> None:
    client = make(DyingEngine, options={"how": "exception", "step_ms": 1.0})
    client.add_request(request("r", max_tokens=1000))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="boom") as caught:
            while True:
                client.get_output(timeout=10)
        assert caught.value.remote_type == "RuntimeError"
        assert "in die" in caught.value.remote_traceback
    with pytest.raises(EngineDeadError):
        client.add_request(request("s"))
    with pytest.raises(EngineDeadError):
        client.call_utility("never")
    assert client.stats()["requests"] == 0


def test_shutdown_ends_what_comes_after(make: Make) -> None:
    client = make()
    client.add_request(request())
    client.shutdown()
    client.shutdown()
    with pytest.raises(ClientClosedError):
        client.validate_alive()
    if client.kind != "async":  # its loop has closed too
        with pytest.raises(ClientClosedError):
            client.add_request(request("s"))
        with pytest.raises(ClientClosedError):
            while True:
                client.get_output(timeout=5)


def test_start_up_errors(make: Make) -> None:
    with pytest.raises(EngineOptionError, match="max_num_seqs"):
        make(options={"nope": 1})
    with pytest.raises(EngineStartupError, match="boom"):
        make(DyingEngine, options={"when": "init", "how": "exception"})


# --- what only some kinds have ----------------------------------------------------------------------------------------


def test_make_client_picks_the_kind() -> None:
    for multiprocess, asyncio_mode, kind in (
        (True, True, AsyncMPClient),
        (True, False, SyncMPClient),
        (False, False, InprocClient),
    ):
        client = EngineCoreClient.make_client(multiprocess, asyncio_mode, EngineConfig(engine="echo"))
        assert type(client) is kind
        client.shutdown()
    with pytest.raises(ConfigError, match="multiprocess_mode"):
        EngineCoreClient.make_client(False, True, EngineConfig(engine="echo"))


def test_sync_calls_from_many_threads() -> None:
    client = SyncMPClient(CallableEngine)
    answers: list[Any] = []

    def call(number: int) -> None:
        for i in range(50):
            answers.append((number, i, client.call_utility("echo", number, i, timeout=20)))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 400
    assert all(answer == [[number, i], {}] for number, i, answer in answers)
    client.shutdown()


def test_sync_waiters_in_other_threads_end_with_the_engine() -> None:
    client = SyncMPClient(CallableEngine)
    ended: list[EngineDeadError] = []

    def wait(function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except EngineDeadError as error:
            ended.append(error)

    threads = [threading.Thread(target=wait, args=(client.call_utility, "never")) for _ in range(10)]
    threads += [threading.Thread(target=wait, args=(client.get_output,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(client.utility_results) == 10)
    started = time.monotonic()
    os.kill(client.core_engines[0].pid, signal.SIGKILL)
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - started < 2
    assert len(ended) == 13
    assert len(set(map(id, ended))) == 13
    assert all(error.exit_code == -signal.SIGKILL for error in ended)
    client.shutdown()


def test_the_sync_client_retries_what_a_stopped_engine_did_not_take() -> None:
    client = SyncMPClient(EngineConfig(engine="echo", transport=TransportConfig(high_water_mark=10)))
    os.kill(client.core_engines[0].pid, signal.SIGSTOP)
    names = [f"r{i}" for i in range(200)]
    for name in names:
        client.add_request(request(name, [5] * 2000, 1))
    assert client.stats()["outbox"] > 0
    os.kill(client.core_engines[0].pid, signal.SIGCONT)
    assert collect(client, *names) == {name: [5, "length"] for name in names}
    client.shutdown()


@pytest.mark.parametrize("sockets", ["unix", "zmq"])
@pytest.mark.usefixtures("as_configured")
def test_an_engine_core_can_be_reached_as_soon_as_there_is_a_client(sockets: Sockets) -> None:
    """One that was stopped before ZeroMQ had connected would look idle for ever."""
    for _ in range(3):
        client = SyncMPClient(EngineConfig(engine="echo", transport=TransportConfig(sockets=sockets)))
        client.add_request(request("r", [5], 1))
        assert client.stats()["outbox"] == 0
        client.shutdown(0)


def test_the_sync_client_tells_of_pending_messages_while_its_thread_sends() -> None:
    """Under the lock, or they would change while they are listed."""
    client = SyncMPClient("echo")
    told = threading.Thread(target=lambda: client.pending_messages, daemon=True)
    with client._lock:
        told.start()
        told.join(0.05)
        assert told.is_alive()
    told.join(5)
    assert not told.is_alive()
    assert client.pending_messages == []
    client.shutdown()


def test_dropping_a_sync_client_ends_thread_and_child() -> None:
    client = SyncMPClient("echo")
    reference = weakref.ref(client)
    client.add_request(request())
    collect(client, "r")
    del client
    gc.collect()
    assert reference() is None
    psutil.wait_procs(children(), 5)
    until(lambda: not [t for t in threading.enumerate() if t.name == "outboard-output"])


def test_a_sync_client_is_shut_down_while_another_thread_waits() -> None:
    client = SyncMPClient("echo")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.get_output()
        except ClientClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    client.shutdown()
    thread.join(5)
    assert len(errors) == 1
    assert not [t for t in threading.enumerate() if t.name == "outboard-output"]
