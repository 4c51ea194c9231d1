"""`AsyncMPClient`: drives an engine core in another process from one asyncio event loop."""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Awaitable, Generator, Sequence
from typing import Any, Self

from outboard.client.base import MPClient
from outboard.client.monitor import EngineMonitor
from outboard.client.pending import CallFuture, PendingTable
from outboard.client.receiver import OutputSink, Receiver
from outboard.config import EngineConfig
from outboard.errors import ClientClosedError, InvalidRequestError, UtilityError, UtilityTimeoutError
from outboard.protocol.codec import MsgpackEncoder
from outboard.protocol.messages import (
    AbortRequests,
    AddRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    SchedulerStats,
    UtilityCall,
)
from outboard.transport.outbox import Outbox
from outboard.transport.reader import SocketReader

__all__ = ["AsyncMPClient"]


class AsyncMPClient(MPClient):
    """Drives an engine core in a process of its own from asyncio; all in one event loop, without a thread.

    It may be built outside a loop: it then attaches to the loop of the first call. Built inside a running one it blocks
    that loop until the engine core is ready; `await AsyncMPClient.launch(config)` does not. After an engine's death
    every call raises `EngineDeadError`, for ever.

    A subclass may define `process_engine_outputs(client, outputs)`, which sees every message with outputs or scheduler
    stats before it is delivered: a plain function, or a coroutine function (messages then pass in order through one
    task). Utility results go past it, so that it may itself make utility calls. One that defines the coroutine function
    `eep_process_engine_core_notification(client, data)` gets the notifications of elastic scaling,
    `(type, dp_rank)`, each in a task of its own.

    Args, raises: as `MPClient`.

    Attributes:
        outputs_queue: messages that `get_output_async` will return.
    """

    def __init__(
        self, config: EngineConfig | str | type[Any], *, client_index: int = 0, cancel_fd: int | None = None
    ) -> None:
        super().__init__(config, client_index=client_index, cancel_fd=cancel_fd)
        resources = self._resources
        engine = self.core_engines[0]
        self._pending = PendingTable()
        self.outputs_queue: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()
        self._encoder = MsgpackEncoder(self.config.transport.inline_bytes)
        self._receiver = Receiver(self, self._pending, self.outputs_queue, self._epoch, resources)
        reader = SocketReader(self._output_socket, self._receiver.on_message)
        resources.reader = reader
        resources.monitor = EngineMonitor(resources.process, reader, self._receiver, engine.rank, engine.incarnation)
        self._outbox = resources.outbox = Outbox(self._input_socket, engine.identity, resources.call_later)
        if _running_loop() is not None:
            self._ensure_output_queue_task()

    @classmethod
    async def launch(cls, config: EngineConfig | str | type[Any], *, client_index: int = 0) -> Self:
        """Starts an engine core without blocking the loop; the client, attached to it.

        Cancelling stops start-up: when `CancelledError` comes out, the process is gone.

        Raises: as the constructor.
        """
        read_fd, write_fd = os.pipe()
        start = asyncio.ensure_future(asyncio.to_thread(cls, config, client_index=client_index, cancel_fd=read_fd))
        try:
            client = await asyncio.shield(start)
        except asyncio.CancelledError:
            os.write(write_fd, b"x")
            await asyncio.wait([start])
            if start.exception() is None:  # it was ready just then
                await asyncio.to_thread(start.result().shutdown, 0)
            raise
        finally:
            os.close(read_fd)
            os.close(write_fd)
        client._ensure_output_queue_task()
        return client

    # --- requests ---

    async def add_request_async(self, request: EngineCoreRequest) -> int:
        """As `add_request`. Never suspends: cancellation cannot come in between."""
        return self.add_request(request)

    def add_request(self, request: EngineCoreRequest) -> int:
        """Sends a request to the engine core; its handle, which is never used again.

        Stamps `client_index` and, where it is 0, `arrival_time`. Call it on the loop.

        Raises:
            DuplicateRequestError: a request with this id is in flight.
            InvalidRequestError: a token id is no 32-bit int, or something in it cannot be sent.
            EngineDeadError: the engine core is gone.
        """
        self._ensure_output_queue_task()
        self.validate_alive()
        request.client_index = self.client_index
        request.arrival_time = request.arrival_time or time.time()
        handle = self._pending.add_request(request.request_id)
        try:
            frames = self._encoder.encode(
                AddRequest(
                    self._epoch,
                    handle,
                    request.request_id,
                    _pack_token_ids(request.prompt_token_ids),
                    request.sampling_params,
                    request.inputs,
                    request.client_index,
                    request.arrival_time,
                )
            )
        except (TypeError, ValueError, OverflowError) as error:
            self._pending.end_request(handle)
            raise InvalidRequestError(f"request {request.request_id!r} cannot be sent: {error}") from error
        self._outbox.send([EngineCoreRequestType.ADD.value, *frames], key=handle)
        return handle

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Ends requests: no output of theirs is delivered any more. Unknown and finished ids are no error."""
        self._ensure_output_queue_task()
        self.abort_handles([self._pending.handles[name] for name in request_ids if name in self._pending.handles])

    def abort_handles(self, handles: Sequence[int]) -> None:
        """As `abort_requests_async`, by handle. Call it on the loop."""
        known = [handle for handle in handles if self._pending.end_request(handle) is not None]
        # One that is still in the outbox is taken back; an abort would overtake nothing, but it would be for nothing.
        sent = [handle for handle in known if not self._outbox.take_back(handle)]
        if sent:
            self._send_input(EngineCoreRequestType.ABORT, AbortRequests(self._epoch, sent))

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next message with outputs or scheduler stats. Cancelling it loses nothing.

        Raises:
            EngineDeadError: the engine core is gone, and all that it had sent has been returned.
            RuntimeError: an output sink is set and gets the messages instead.
        """
        self._ensure_output_queue_task()
        if self._receiver.has_sink:
            raise RuntimeError("an output sink is set: it gets the messages, get_output_async does not")
        message = await self.outputs_queue.get()
        if message is None:
            self.outputs_queue.put_nowait(None)  # for whoever asks next
            self.validate_alive()
            raise AssertionError("the queue ended without a failure")
        return message

    def set_output_sink(self, sink: OutputSink | None) -> None:
        """Gives every message to `sink(message)` on the loop from now on, and at the end one `EngineDeadError`.

        Messages that wait in the queue come first. A bound method is held weakly. A sink that raises ends the client as
        a dead engine core does. None: messages go to `get_output_async` again.
        """
        self._receiver.set_sink(sink)

    # --- utility calls ---

    async def call_utility_async(
        self,
        method: str,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
        rank: int | None = None,
    ) -> Any:
        """Calls an `@utility` method of the engine core; its result.

        Args:
            method: its name.
            *args: positional arguments: msgpack values and numpy arrays.
            kwargs: keyword arguments.
            timeout: seconds until `UtilityTimeoutError`; None: no limit.
            rank: which engine core; None: the only one.

        Cancelling forgets the call; the engine core runs it all the same.

        Raises:
            UtilityNotFoundError: no such method; names those there are.
            RemoteError: it raised; has the remote type, message and traceback.
            UtilityTimeoutError: no answer in time.
            UtilityError: an argument cannot be sent.
            EngineDeadError: the engine core is gone, or went before it answered.
        """
        if rank not in (None, self.core_engines[0].rank):
            raise ValueError(f"no engine core of rank {rank}; there is rank {self.core_engines[0].rank}")
        self._ensure_output_queue_task()
        self.validate_alive()
        future: CallFuture = asyncio.get_running_loop().create_future()
        call_id = self._pending.add_call(future)
        try:
            try:
                call = UtilityCall(self._epoch, call_id, method, list(args), kwargs or {})
                self._send_input(EngineCoreRequestType.UTILITY, call)
            except (TypeError, ValueError, OverflowError) as error:
                raise UtilityError(f"the arguments of {method!r} cannot be sent: {error}") from error
            async with asyncio.timeout(timeout) as scope:
                return await future  # type: ignore[misc]
        except TimeoutError:
            if not scope.expired():
                raise
            raise UtilityTimeoutError(f"utility call {method!r} was not answered within {timeout:g} s") from None
        finally:
            self._pending.end_call(call_id)

    # --- state ---

    def validate_alive(self) -> None:
        """Raises `EngineDeadError`, an instance of its own, if the engine core is gone."""
        if self._receiver.failure is not None:
            raise self._receiver.failure.copy()

    @property
    def utility_results(self) -> dict[int, CallFuture]:
        """Utility calls that wait: call id -> future."""
        return self._pending.utility_results

    @property
    def pending_messages(self) -> Sequence[tuple[Any, Any]]:
        """(tracker, frames) of messages whose buffers ZeroMQ has not let go of."""
        self._outbox.free_sent()
        return self._outbox.tracked

    @property
    def output_queue_task(self) -> asyncio.Future[None] | None:
        """A future that owns the reader: cancelling it cancels reading. None until a loop is attached."""
        return self._receiver.reading

    @property
    def scheduler_stats(self) -> SchedulerStats:
        """The latest load that the engine core reported."""
        return self._receiver.scheduler_stats

    def stats(self) -> dict[str, Any]:
        """Counters: messages received, messages dropped by reason, requests and utility calls in flight."""
        return {
            "received": self._receiver.received,
            "dropped": dict(self._receiver.dropped),
            "requests": len(self._pending.request_ids),
            "utility_calls": len(self._pending.utility_results),
            "outbox": len(self._outbox),
        }

    # --- inside ---

    def _ensure_output_queue_task(self) -> None:
        """Attaches to the running loop, where that has not happened yet."""
        loop = asyncio.get_running_loop()
        resources = self._resources
        if resources.loop is loop:
            return
        if resources.loop is not None:
            raise RuntimeError("this client belongs to another event loop; build one client for each loop")
        resources.loop = loop
        self._receiver.attach(loop)
        if self._receiver.failure is None:
            assert resources.reader is not None and resources.monitor is not None  # the constructor made them
            resources.reader.attach(loop)
            resources.monitor.attach(loop)

    def _send_input(self, request_type: EngineCoreRequestType, message: Any) -> Awaitable[None]:
        """Sends a message; the awaitable is done: ZeroMQ or the outbox holds it."""
        self._outbox.send([request_type.value, *self._encoder.encode(message)])
        return _DONE

    def _stop_reading(self) -> None:
        engine = self.core_engines[0]
        self._receiver.fail(
            ClientClosedError(
                "the client was shut down", rank=engine.rank, pid=engine.pid, phase="stopping", exit_code=None
            )
        )
        self._receiver.detach()
        self._resources.stop_reading()


class _Done:
    """An awaitable with nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


_DONE = _Done()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _pack_token_ids(token_ids: Sequence[int]) -> bytes:
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids.tobytes()
    return array("i", token_ids).tobytes()
