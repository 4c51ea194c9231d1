"""`AsyncMPClient`: drives an engine core in another process from one asyncio event loop."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Self

from outboard.client.async_delivery import AsyncDelivery, OutputSink
from outboard.client.base import MPClient
from outboard.client.delivery import Delivery
from outboard.config import EngineConfig
from outboard.errors import UtilityTimeoutError
from outboard.launch.group import EngineAddresses
from outboard.protocol.control import EngineState, EngineStatus
from outboard.protocol.messages import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType

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
        self,
        config: EngineConfig | str | type[Any] | None = None,
        *,
        addresses: EngineAddresses | None = None,
        client_index: int = 0,
        cancel_fd: int | None = None,
    ) -> None:
        self.outputs_queue: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()
        super().__init__(config, addresses=addresses, client_index=client_index, cancel_fd=cancel_fd)
        self._reading_ended = False
        self._ending = threading.RLock()  # guards the end: without a running loop, threads may come to it at once
        self._resources.stop_tasks = self._delivery.detach
        if _running_loop() is not None:
            self._ensure_output_queue_task()

    def _make_delivery(self) -> Delivery:
        self._delivery = AsyncDelivery(self, self.outputs_queue, self._fail())
        return self._delivery

    @classmethod
    async def launch(
        cls,
        config: EngineConfig | str | type[Any] | None = None,
        *,
        addresses: EngineAddresses | None = None,
        client_index: int = 0,
        **more: Any,
    ) -> Self:
        """Starts the engine cores, or joins those that run, without blocking the loop; the client, attached to it.

        Cancelling stops start-up: when `CancelledError` comes out, the process is gone.

        Args: as the constructor, those of subclasses too.

        Raises: as the constructor.
        """
        read_fd, write_fd = os.pipe()
        build = functools.partial(
            cls, config, addresses=addresses, client_index=client_index, cancel_fd=read_fd, **more
        )
        # A future, not a task: whoever cancels all tasks must not cancel it.
        start = asyncio.get_running_loop().run_in_executor(None, build)
        try:
            client = await asyncio.shield(start)
        except asyncio.CancelledError:
            os.write(write_fd, b"x")
            while not start.done():
                try:
                    await asyncio.wait([start])
                except asyncio.CancelledError:
                    pass  # once more: the process must be gone before this returns
            if start.exception() is None:  # it was ready just then
                start.result().shutdown(0)
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
        return self._membership.traffic.add_request(request)

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Ends requests: no output of theirs is delivered any more. Unknown and finished ids are no error."""
        self._ensure_output_queue_task()
        self._membership.traffic.abort_requests(request_ids)

    def abort_handles(self, handles: Sequence[int]) -> None:
        """As `abort_requests_async`, by handle. Call it on the loop."""
        self._membership.traffic.abort(handles)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next message with outputs or scheduler stats. Cancelling it loses nothing.

        Raises:
            EngineDeadError: the engine core is gone, and all that it had sent has been returned.
            RuntimeError: an output sink is set and gets the messages instead.
        """
        self._ensure_output_queue_task()
        if self._delivery.has_sink:
            raise RuntimeError("an output sink is set: it gets the messages, get_output_async does not")
        message = await self.outputs_queue.get()
        if message is None:
            self.outputs_queue.put_nowait(None)  # for whoever asks next
            self.validate_alive()
            raise AssertionError("the queue ended without a failure")
        return message

    def set_output_sink(self, sink: OutputSink | None, *, request_ids: bool = True) -> None:
        """Gives every message to `sink(message)` on the loop from now on, and at the end one `EngineDeadError`.

        Messages that wait in the queue come first. A bound method is held weakly. A sink that raises ends the client as
        a dead engine core does. None: messages go to `get_output_async` again.

        Args:
            sink: a function of a message.
            request_ids: whether it needs the user's request ids, as `EngineCoreOutputs.outputs` does; handles alone
                are cheaper.
        """
        self._delivery.set_sink(sink, request_ids)

    # --- utility calls ---

    async def call_utility_async(
        self,
        method: str,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
        rank: int | str | None = None,
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
        rank = self._check_rank(rank)
        loop = self._ensure_output_queue_task()
        self.validate_alive()
        future: asyncio.Future[Any] = loop.create_future()
        call_id = self._membership.traffic.call(future, method, args, kwargs, rank)
        try:
            if timeout is None:
                return self._typed(method, await future)
            async with asyncio.timeout(timeout) as scope:
                result = await future
        except TimeoutError:
            if timeout is None or not scope.expired():
                raise
            raise UtilityTimeoutError(f"utility call {method!r} was not answered within {timeout:g} s") from None
        finally:
            self._pending.end_call(call_id)
        return self._typed(method, result)

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a `@utility` method on every worker of the engine; one result a worker, at least one.

        Args, raises: as `call_utility_async`.
        """
        results: list[Any] = await self.call_utility_async(
            "collective_rpc", method, timeout, list(args), kwargs, timeout=timeout
        )
        return [self._typed(method, result) for result in results]

    # --- state ---

    @property
    def output_queue_task(self) -> asyncio.Future[None] | None:
        """A future that owns the reader: cancelling it cancels reading. None until a loop is attached."""
        return self._delivery.reading

    async def wait_for_state(self, *states: EngineState, rank: int = 0) -> EngineStatus:
        """Waits until an engine core is in one of these states; its status. Bound it with `asyncio.timeout`.

        A rank that does not exist, or not any more, may come.

        Raises:
            EngineDeadError: the client has ended, and the state is none of these.
        """
        loop = self._ensure_output_queue_task()
        reached: asyncio.Future[EngineStatus] = loop.create_future()

        def look(status: EngineStatus) -> None:
            if reached.done():
                return
            if status.rank == rank and status.state in states:
                reached.set_result(status)
            elif (ended := self._membership.failure) is not None:
                last = self._membership.roster.told.get(rank)
                if last is not None and last.state in states:
                    reached.set_result(last)
                else:
                    reached.set_exception(ended.copy())

        unsubscribe = self.subscribe(look)
        try:
            known = self._membership.roster.told.get(rank)
            if known is not None:
                look(known)
            else:
                self.validate_alive()
            return await reached
        finally:
            unsubscribe()

    # --- inside ---

    def _ensure_output_queue_task(self) -> asyncio.AbstractEventLoop:
        """Attaches to the running loop, where that has not happened yet; the loop."""
        loop = asyncio.get_running_loop()
        resources = self._resources
        if resources.loop is loop:
            return loop
        if resources.loop is not None:
            raise RuntimeError("this client belongs to another event loop; build one client for each loop")
        resources.loop = loop
        self._delivery.attach(loop)
        if self._membership.failure is None:
            self._membership.attach(loop)
        return loop

    def _send_input(self, request_type: EngineCoreRequestType, message: Any) -> Awaitable[None]:
        """Sends a message; the awaitable is done: the socket or the outbox holds it."""
        self._membership.links[0].sender.send(request_type, message)
        return _DONE

    def _stop_reading(self) -> None:
        self._on_loop(self._end_reading)

    def _end_reading(self) -> None:
        with self._ending:
            self._membership.fail(self._closed_error())
            self._delivery.detach()
            self._membership.stop_reading()
            self._reading_ended = True

    def _on_loop(self, function: Callable[[], None]) -> None:
        """Calls `function` on the loop and waits, if that runs in another thread; else here."""
        loop = self._resources.loop
        if loop is None or not loop.is_running() or _running_loop() is loop:
            function()
            return
        done = threading.Event()

        def call() -> None:
            try:
                function()
            finally:
                done.set()

        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:  # it was closed in between
            function()
            return
        # A loop that stops before its turn comes never calls.
        deadline = time.monotonic() + self.config.faults.shutdown_timeout
        while not done.wait(0.05) and not self._reading_ended:  # another shutdown, on the loop, may come first
            if not loop.is_running() or time.monotonic() > deadline:
                function()
                return


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
