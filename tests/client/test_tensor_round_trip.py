"""Arrays through a real engine core and back: in the body, in frames, in shared memory."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outboard import (
    AsyncMPClient,
    EngineConfig,
    EngineCoreRequest,
    EngineDeadError,
    RemoteError,
    SyncMPClient,
    TransportConfig,
    UtilityTimeoutError,
)
from outboard.protocol.messages import AbortRequests, EngineCoreRequestType
from support import Run
from tensor_engines import TensorEngine

KIB, MIB = 1 << 10, 1 << 20
INLINE, FRAME = 256, 4 * KIB  # bytes up to which arrays are in the body, and in frames
SMALL = TransportConfig(inline_bytes=INLINE, shared_memory_bytes=FRAME)

DTYPES = [
    "?",
    "i1",
    "u2",
    "i8",
    "f2",
    "f4",
    "f8",
    "c8",
    "c16",
    ">i4",
    ">f2",
    ">f8",
    ">c8",
    "M8[ns]",
    "m8[s]",
    "S3",
    "U2",
]


async def until(condition: Callable[[], bool]) -> None:
    """Waits, within a bound, for what happens without telling: a message leaves, an object dies."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        gc.collect()
        await asyncio.sleep(0.005)


def all_free(client: Any) -> bool:
    memory = client._membership.links[0]._memory
    return (memory.pool.held, memory.reader.held) == (0, 0)


async def nothing_held(client: Any) -> None:
    await until(lambda: all_free(client) and not client.pending_messages)
    assert not client.utility_results and not client.stats()["requests"] and not client.stats()["outbox"]


def on_client(run: Run, body: Any, transport: TransportConfig = SMALL, **options: Any) -> None:
    async def main() -> None:
        client = await AsyncMPClient.launch(EngineConfig(engine=TensorEngine, options=options, transport=transport))
        try:
            await body(client)
        finally:
            await asyncio.to_thread(client.shutdown)

    run(main())


async def finished(client: AsyncMPClient, request_id: str) -> Any:
    """The output that ends this request."""
    while True:
        for output in (await client.get_output_async()).outputs:
            if output.request_id == request_id and output.finish_reason is not None:
                return output


# --- any array -------------------------------------------------------------------------------------------------------

Echo = Callable[[Any], Any]


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    """What an engine core answers to a utility call with this value."""
    with asyncio.Runner() as runner:
        config = EngineConfig(engine=TensorEngine, transport=SMALL)
        client = runner.run(AsyncMPClient.launch(config))
        try:

            async def call(value: Any) -> Any:
                (answer,), _ = await client.call_utility_async("echo", value, timeout=10)
                return answer

            yield lambda value: runner.run(call(value))
            runner.run(nothing_held(client))
        finally:
            client.shutdown()


def filled(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of valid values, hardly two the same next to each other."""
    numbers = np.arange(int(np.prod(shape))) % 113
    if dtype.kind == "m" or dtype.kind == "M":
        return numbers.astype("i8").astype(dtype).reshape(shape)
    return (numbers % 2 if dtype.kind == "b" else numbers).astype(dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=4))
    size = draw(st.sampled_from([0, INLINE, INLINE + 1, FRAME, FRAME + 1, 20 * KIB]))
    if shape:
        rest = max(1, int(np.prod(shape[1:])) * dtype.itemsize)
        shape[0] *= max(1, size // rest // max(shape[0], 1))
    array = filled(dtype, tuple(shape))
    view = draw(
        st.sampled_from(["as it is", "step", "reversed", "transposed", "fortran", "block", "broadcast", "read-only"])
    )
    if view == "step" and array.ndim:
        array = array[::2]
    elif view == "reversed" and array.ndim:
        array = array[..., ::-1]
    elif view == "transposed":
        array = array.T
    elif view == "fortran":
        array = np.asfortranarray(array)
    elif view == "block" and array.ndim:
        array = array[1:-1]
    elif view == "broadcast":
        array = np.broadcast_to(array, (2, *array.shape))
    elif view == "read-only":
        array.flags.writeable = False
    return array


nested = st.recursive(
    arrays() | st.none() | st.integers(-5, 5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)


def assert_same(got: Any, sent: Any) -> None:
    assert type(got) is type(sent)
    if isinstance(sent, np.ndarray):
        assert (got.dtype, got.dtype.str, got.shape) == (sent.dtype, sent.dtype.str, sent.shape)
        np.testing.assert_array_equal(got, sent)
        assert not got.flags.writeable
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        for key in sent:
            assert_same(got[key], sent[key])
    elif isinstance(sent, list):
        assert len(got) == len(sent)
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    else:
        assert got == sent


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=nested)
def test_any_array_anywhere_comes_back(echo: Echo, value: Any) -> None:
    assert_same(echo(value), value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, INLINE, FRAME, 3 * MIB])
def test_every_dtype_in_every_way(echo: Echo, dtype: str, count: int) -> None:
    array = filled(np.dtype(dtype), (count // np.dtype(dtype).itemsize + (count == 1),))
    assert_same(echo(array), array)


# --- which way, and how it ends --------------------------------------------------------------------------------------


def test_by_default_one_mib_is_a_frame_and_more_is_shared(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        memory: Any = client._membership.links[0]._memory
        for size, shared in [(64 * KIB, 0), (64 * KIB + 1, 0), (MIB, 0), (MIB + 1, 1)]:
            answer = (await client.call_utility_async("echo", np.full(size, 7, np.uint8)))[0][0]
            assert answer.nbytes == size and (answer == 7).all()
            await until(lambda shared=shared: memory.pool.held == 0)  # type: ignore[misc]
            assert memory.reader.held == shared
            assert (memory.pool.reserved > 0) == shared
            del answer
            await nothing_held(client)

    on_client(run, body, TransportConfig())


def test_requests_and_their_results(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        big = np.random.default_rng(0).integers(0, 255, (500, 700), dtype=np.uint8)
        await client.add_request_async(EngineCoreRequest(request_id="r", inputs={"image": big[:, ::-1], "n": 1}))
        output = await finished(client, "r")
        np.testing.assert_array_equal(output.result["image"], big[:, ::-1])
        del output
        await nothing_held(client)

    on_client(run, body)


def test_the_blocking_client_has_the_same_ways(run: Run) -> None:
    client = SyncMPClient(EngineConfig(engine=TensorEngine, transport=SMALL))
    try:
        array = np.arange(100_000)
        np.testing.assert_array_equal(client.call_utility("echo", array)[0][0], array)
        run(nothing_held(client))
    finally:
        client.shutdown()


def test_only_the_bytes_of_a_view_travel(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        big = np.zeros((1000, 64 * KIB), np.uint8)
        for view in (big[3], big[5:7, ::2]):
            await client.call_utility_async("echo", view)
        memory: Any = client._membership.links[0]._memory
        assert memory.pool.reserved <= 512 * KIB  # one slot for each

    on_client(run, body)


@pytest.mark.parametrize("size", [MIB, MIB + 1], ids=["frames", "slots, then frames"])
def test_2000_tensors_in_flight_leave_nothing(size: int) -> None:
    async def main() -> None:
        async with asyncio.timeout(50):
            client = await AsyncMPClient.launch(EngineConfig(engine=TensorEngine))
            try:
                array = np.arange(size, dtype=np.uint8)

                async def call() -> bool:
                    answer = (await client.call_utility_async("echo", array))[0][0]
                    return len(answer) == size and answer[-2:].tolist() == array[-2:].tolist()

                assert all(await asyncio.gather(*(call() for _ in range(2000))))
                await nothing_held(client)
            finally:
                await asyncio.to_thread(client.shutdown)

    asyncio.run(main())


@pytest.mark.parametrize("limit", [0, MIB], ids=["off", "full"])
def test_where_shared_memory_has_no_room_arrays_are_frames(run: Run, limit: int) -> None:
    async def body(client: AsyncMPClient) -> None:
        array = np.full(300 * KIB, 3, np.uint8)
        held = [(await client.call_utility_async("echo", array))[0][0] for _ in range(10)]  # every slot is a view here
        for _ in range(5):
            await client.call_utility_async("keep", array)  # and there
        assert all((array == 3).all() for array in held)
        assert await client.call_utility_async("drop") == [3 * 300 * KIB] * 5
        memory = client._membership.links[0]._memory
        if limit:
            assert memory.reader is not None and memory.reader.held == 2
            held.clear()
            await nothing_held(client)
            assert memory.pool is not None and memory.pool.reserved == limit
        else:
            assert memory.pool is None

    transport = TransportConfig(inline_bytes=INLINE, shared_memory_bytes=FRAME, shared_memory_limit=limit)
    on_client(run, body, transport)


def test_late_replies_and_aborted_requests_free_their_slots(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        array = np.zeros(MIB, np.uint8)
        for _ in range(3):
            with pytest.raises(UtilityTimeoutError):
                await client.call_utility_async("later", 0.1, array, timeout=0.02)
        for number in range(20):
            await client.add_request_async(EngineCoreRequest(request_id=str(number), inputs=array))
        await client.abort_requests_async([str(number) for number in range(20)])
        await client.call_utility_async("later", 0.2, None)
        while not client.outputs_queue.empty():  # messages are handed on, whoever they are for
            client.outputs_queue.get_nowait()
        await nothing_held(client)

    on_client(run, body)


def test_requests_taken_back_from_the_outbox_free_their_slots(run: Run) -> None:
    async def body(client: AsyncMPClient) -> None:
        engine = psutil.Process(client.core_engines[0].pid)
        engine.suspend()
        try:
            names = [str(number) for number in range(10)]
            array = np.zeros(20 * KIB, np.uint8)
            while not client.stats()["outbox"]:  # until the sockets take no more
                await client._send_input(
                    EngineCoreRequestType.ABORT, AbortRequests(client._membership.links[0].epoch, [10**6] * 10000)
                )
            for name in names:
                await client.add_request_async(EngineCoreRequest(request_id=name, inputs=array))
            memory: Any = client._membership.links[0]._memory
            assert memory.pool.held == 10
            await client.abort_requests_async(names)
            assert memory.pool.held == 0
        finally:
            engine.resume()
        await client.call_utility_async("count")

    on_client(run, body, TransportConfig(inline_bytes=INLINE, shared_memory_bytes=FRAME, high_water_mark=2))


def test_views_outlive_the_engine_core_and_the_client(run: Run) -> None:
    kept = []

    async def body(client: AsyncMPClient) -> None:
        kept.append((await client.call_utility_async("echo", np.full(MIB, 9, np.uint8)))[0][0])
        memory = client._membership.links[0]._memory
        psutil.Process(client.core_engines[0].pid).kill()
        with pytest.raises(EngineDeadError):
            await client.call_utility_async("never")
        assert memory.pool is not None and memory.pool.lease(1) is None  # the epoch is over

    on_client(run, body)
    assert (kept[0] == 9).all()


# --- torch -----------------------------------------------------------------------------------------------------------


def test_torch_tensors_come_back(run: Run) -> None:
    torch = pytest.importorskip("torch")

    async def body(client: AsyncMPClient) -> None:
        for size in (0, 1, 100, 1000, 100_000):
            for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool):
                tensor = (torch.arange(size) % 3).to(dtype)
                answer = (await client.call_utility_async("echo", {"x": tensor}))[0][0]["x"]
                assert answer.dtype == dtype
                assert torch.equal(answer.view(torch.uint8), tensor.view(torch.uint8))
                answer.zero_()  # its memory is its own
        made = await client.call_utility_async("bfloat16", 5000)
        assert made[0].sum() == 7500
        await client.add_request_async(EngineCoreRequest(request_id="r", inputs=[torch.ones(2, 3)]))
        output = await finished(client, "r")
        assert torch.equal(output.result[0], torch.ones(2, 3))
        del answer, made, output
        await nothing_held(client)

    on_client(run, body, torch=True)


def test_an_engine_core_without_torch_fails_that_call_and_that_request_alone(run: Run) -> None:
    torch = pytest.importorskip("torch")

    async def body(client: AsyncMPClient) -> None:
        tensor = torch.zeros(100_000)
        with pytest.raises(RemoteError, match="import torch"):
            await client.call_utility_async("echo", 1, [tensor, np.zeros(MIB)])
        await client.add_request_async(EngineCoreRequest(request_id="r", inputs=tensor))
        output = await finished(client, "r")
        assert output.finish_reason == "error" and "import torch" in output.error
        assert await client.call_utility_async("count") == 0
        await nothing_held(client)

    on_client(run, body)


def test_a_client_without_torch_fails_that_call_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")

    async def body(client: AsyncMPClient) -> None:
        monkeypatch.delitem(sys.modules, "torch")
        for size in (10, 100_000):
            with pytest.raises(RemoteError, match="import torch"):
                await client.call_utility_async("bfloat16", size)
        assert await client.call_utility_async("count") == 0
        await nothing_held(client)
        monkeypatch.undo()

    on_client(run, body, torch=True)
