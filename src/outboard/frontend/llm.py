"""`AsyncLLM`: prompts in, streams of `RequestOutput` out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

from outboard.client.async_mp import AsyncMPClient
from outboard.client.data_parallel import DPLBAsyncMPClient
from outboard.client.scaling import OnProgress
from outboard.config import EngineConfig
from outboard.engine.controls import PauseMode
from outboard.engine.core import Tokenizer
from outboard.errors import ClientClosedError, ConfigError, InvalidRequestError, UnsupportedError
from outboard.frontend.prompt import Prompt
from outboard.frontend.running import RunningEngine
from outboard.frontend.slot import OnOutput, OnText, Slot
from outboard.frontend.stream import RequestStream
from outboard.launch.group import EngineAddresses
from outboard.protocol.control import EngineState, EngineStatus
from outboard.protocol.messages import EngineInfo
from outboard.protocol.sampling import SamplingParams

__all__ = ["AsyncLLM", "EngineLike"]

EngineLike: TypeAlias = "EngineConfig | str | type[Any]"


class AsyncLLM:
    """An engine in a process of its own, with prompts in and text out. Belongs to one event loop.

        async with AsyncLLM("openvino") as llm:
            async for output in llm.generate("The capital of France is"):
                print(output.outputs[0].text)

    Building it starts nothing; `async with`, `start` or the first request does. Leaving `async with` shuts down.

    Args:
        engine: an `EngineConfig`, or an engine name, reference or class with default settings.
        options: with a bare engine, the keyword arguments of its constructor.
        addresses: in place of an engine: of an `EngineGroup` (`launch_engines`) that runs already. It is joined, beside
            other front ends, and not ended.
        client_index: there, the index of this front end.
    """

    def __init__(
        self,
        engine: EngineLike | None = None,
        *,
        options: dict[str, Any] | None = None,
        addresses: EngineAddresses | None = None,
        client_index: int = 0,
    ) -> None:
        self._addresses = addresses
        self._client_index = client_index
        if (engine is None) == (addresses is None):
            raise ConfigError("give either an engine, which is started, or the addresses of a group")
        if addresses is not None:
            if options is not None:
                raise ConfigError("options are for an engine that is started; the group's are in its addresses")
            self.config = addresses.config
        elif isinstance(engine, EngineConfig):
            if options is not None:
                raise ConfigError("give options inside the EngineConfig, or a bare engine with options")
            self.config = engine
        else:
            assert engine is not None  # see above
            self.config = EngineConfig(engine=engine, options=options or {})
        self._start_lock = asyncio.Lock()
        self._running: RunningEngine | None = None
        self._launch: asyncio.Task[RunningEngine] | None = None
        self._draining = False
        self._closed = False
        self._cut = False  # whether we ended requests ourselves

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Starts the engine core and waits until it is ready. Idempotent. Cancelling stops start-up.

        Raises:
            ConfigError: the engine, an option or a model file is wrong.
            EngineStartupError: it died, failed or was too slow.
            ClientClosedError: it has been shut down.
        """
        async with self._start_lock:
            if self._closed:
                raise _shut_down()
            if self._running is None:
                self._launch = asyncio.ensure_future(
                    RunningEngine.launch(self.config, self._addresses, self._client_index)
                )
                try:
                    self._running = await self._launch
                except asyncio.CancelledError:
                    if _being_cancelled():
                        raise
                    raise _shut_down() from None  # it was shutdown that cancelled the launch
                finally:
                    self._launch = None

    async def shutdown(self, timeout: float | None = None) -> None:
        """Stops the engine core and frees everything. Idempotent; does not block the loop.

        Requests that run end with `ClientClosedError`.

        Args:
            timeout: seconds that the engine core gets to stop by itself; default `FaultConfig.shutdown_timeout`.
        """
        self._closed = True
        if self._launch is not None:
            self._launch.cancel()
        async with self._start_lock:
            running = self._running
        if running is not None:
            self._cut = self._cut or bool(running.in_flight)
            await asyncio.to_thread(running.client.shutdown, timeout)

    async def drain(self, timeout: float | None = None) -> bool:
        """Takes no new requests from now on, lets those in flight end, and then shuts down.

        New requests are refused with `ClientClosedError`; utility calls go on until the end. Requests that do not end
        in time end with `finish_reason` "abort": what had arrived of them stays readable, and nothing is raised. During
        start-up this is `shutdown`. Idempotent. A `shutdown` meanwhile ends the requests at once.

        Cancelling it ends the waiting alone: requests go on, new ones are refused still, and nothing is shut down until
        `drain` or `shutdown` is called again.

        Args:
            timeout: seconds that the requests get; default `FaultConfig.shutdown_timeout`. After them the engine core
                has `shutdown_timeout` to stop, as in `shutdown`.

        Returns:
            whether all requests ended by themselves.

        Raises:
            EngineDeadError: the engine core died before it was stopped. Everything has been freed all the same.
        """
        self._draining = True
        running = self._running
        if running is not None and not self._closed:
            try:
                failed = running.dispatcher.failed
                async with asyncio.timeout(self.config.faults.shutdown_timeout if timeout is None else timeout):
                    await running.wait_until_idle()
                self._cut = self._cut or running.dispatcher.failed != failed  # an engine core was restarted, say
            except TimeoutError:
                self._cut = True
                running.abort_requests(running.in_flight)
        await self.shutdown()
        if running is not None:
            try:
                running.client.validate_alive()
            except ClientClosedError:
                pass  # as it should be; a death that came before is another error
        return not self._cut

    def generate(
        self,
        prompt: Prompt = "",
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        inputs: Any = None,
        data_parallel_rank: int | None = None,
    ) -> RequestStream:
        """The outputs for a prompt, as an async iterator. The request is sent with its first `__anext__`.

        Args:
            prompt: text, token ids, or chat messages (`[{"role": "user", "content": "..."}]`).
            sampling_params: how to continue; default `SamplingParams()`.
            request_id: a name for it; must not be in flight. Default: a random one.
            inputs: input of an engine that is not a language model; msgpack values and numpy arrays.
            data_parallel_rank: the engine core that is to have it; default: whichever the client chooses.

        Returns:
            a stream of `RequestOutput`; see `RequestStream` for its errors and for what cancellation does.
        """
        return self._stream(prompt, sampling_params, request_id, inputs, data_parallel_rank, None)

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        on_output: OnOutput,
        request_id: str | None = None,
        *,
        on_text: OnText | None = None,
        inputs: Any = None,
        data_parallel_rank: int | None = None,
    ) -> RequestStream:
        """Sends a request whose outputs go to a callback, with no task to wake: for servers.

        `on_output(output)` is called on the loop while a message is dispatched, so it must be quick; an exception of
        its own aborts the request. The last call has an output with `finished`, or an `OutboardError`.

        Args:
            on_text: called as `on_text(text)` in place of `on_output`, where an output would tell of a text and tokens
                alone. The first output and the last one are never such, nor are those with log probabilities. Needs
                `n=1` and "delta" outputs; else it is not called.
            prompt, sampling_params, request_id, inputs, data_parallel_rank: as `generate`.

        Returns:
            the stream, whose `abort` ends the request; it need not be kept.

        Raises:
            InvalidRequestError: the request cannot be served; nothing was sent.
            EngineDeadError: the engine core is gone.
        """
        stream = self._stream(prompt, sampling_params, request_id, inputs, data_parallel_rank, on_output)
        stream.state.stream = stream
        if stream.params.n == 1 and stream.params.output_kind == "delta":
            stream.state.on_text = on_text
        try:
            await stream.begin()
        except BaseException:
            stream.state.stream = None
            raise
        if stream.closed:  # aborted before it was sent: no message will say so
            stream.state.stream = None
            stream.emit()
        return stream

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends requests as if their streams had been closed. Unknown and finished ids are no error."""
        if self._running is not None:
            ids = [request_id] if isinstance(request_id, str) else request_id
            self._running.abort_requests(ids)

    async def check_health(self) -> None:
        """Raises what is wrong: nothing is raised only where the engine core serves.

        Raises:
            EngineDeadError: it is gone; `EngineRestartedError`: and is being started again.
            EngineStalledError: it makes no progress.
            ClientClosedError: after shutdown.
        """
        await self.start()
        self.client.check_health()

    async def wait_for_state(self, *states: EngineState, rank: int = 0) -> EngineStatus:
        """Waits until an engine core is in one of these states; its status. Bound it with `asyncio.timeout`.

        `llm.client.subscribe` calls back with every change. Raises as `AsyncMPClient.wait_for_state`.
        """
        await self.start()
        return await self.client.wait_for_state(*states, rank=rank)

    @property
    def client(self) -> AsyncMPClient:
        """The client underneath: utility calls, statistics, process ids.

        Raises:
            RuntimeError: nothing has been started.
        """
        if self._running is None:
            raise RuntimeError("this AsyncLLM has not been started; use `async with`, or await start()")
        return self._running.client

    @property
    def engine_info(self) -> EngineInfo:
        """What the engine core reported of itself when it was ready."""
        return self.client.engine_info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer; None if it has none, or nothing has been started."""
        return self._running.tokenizer if self._running is not None else None

    # --- utility calls and controls ---

    @property
    def data_parallel_size(self) -> int:
        """How many ranks get requests."""
        client = self.client
        return client.data_parallel_size if isinstance(client, DPLBAsyncMPClient) else 1

    async def scale_elastic_ep(
        self,
        new_data_parallel_size: int,
        *,
        drain_timeout: float = 60.0,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Changes the number of ranks while they serve; streams go on.

        Args:
            new_data_parallel_size: how many there are to be.
            drain_timeout: seconds that ranks which leave get to end their requests.
            timeout, on_progress: as `DPLBAsyncMPClient.scale`.

        Raises, cancelling: as there.
        """
        await self.start()
        client = self.client
        if not isinstance(client, DPLBAsyncMPClient):
            raise UnsupportedError(
                "this front end has one rank for good: start it with ParallelConfig(max_size=...) above 1, and with "
                "internal balancing"
            )
        await client.scale(new_data_parallel_size, timeout=timeout, drain=drain_timeout, on_progress=on_progress)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a `@utility` method on every worker of the engine; one result a worker.

        Args, raises: as `AsyncMPClient.call_utility_async`.
        """
        await self.start()
        return await self.client.collective_rpc_async(method, timeout, args, kwargs)

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Has new requests wait, from now on until `resume_generation`.

        Args:
            mode: what becomes of those that run: "abort" ends them; "wait" lets them end, which this call waits for;
                "keep" freezes them until generation resumes.
        """
        await self._utility("pause_generation", mode)

    async def resume_generation(self) -> None:
        """Ends a pause. Without one it does nothing. Raises `UtilityError` if the engine sleeps."""
        await self._utility("resume_generation")

    async def is_paused(self) -> bool:
        """Whether new requests wait."""
        return bool(await self._utility("is_paused"))

    async def sleep(self, level: int = 1) -> None:
        """Aborts what runs, has new requests wait, and has the engine give memory back.

        Args:
            level: 1: weights may be kept elsewhere; 2: they may be dropped.

        Raises:
            UnsupportedError: the engine cannot; nothing has changed.
        """
        await self._utility("sleep", level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Wakes the engine; generation resumes once all of it is awake.

        Args:
            tags: what to wake, such as "weights" or "kv_cache"; None: all.
        """
        await self._utility("wake_up", tags)

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps, in part or whole."""
        return bool(await self._utility("is_sleeping"))

    async def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; whether it did. Raises `UnsupportedError` where there is none."""
        return bool(await self._utility("reset_prefix_cache"))

    async def start_profile(self, path: str | None = None) -> str:
        """Starts cProfile in the engine core; the file that `stop_profile` will write.

        Args:
            path: that file, on the engine core's host; default: one in its directory for temporary files.
        """
        return str(await self._utility("start_profile", path))

    async def stop_profile(self) -> str:
        """Stops the profile and writes it, for `pstats`; the file's path."""
        return str(await self._utility("stop_profile"))

    async def get_stats(self) -> dict[str, Any]:
        """Load and state: waiting, running, kv_cache_usage, requests, held, paused, sleeping, pid."""
        return dict(await self._utility("get_stats"))

    async def _utility(self, method: str, *args: Any) -> Any:
        await self.start()
        return await self.client.call_utility_async(method, *args)

    def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        inputs: Any,
        data_parallel_rank: int | None,
        on_output: OnOutput | None,
    ) -> RequestStream:
        name = secrets.token_hex(8) if request_id is None else request_id
        if not isinstance(name, str):
            raise InvalidRequestError(f"request_id must be a str, not {request_id!r}")
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling_params must be SamplingParams, not {params!r}")
        return RequestStream(self, name, params or SamplingParams(), prompt, inputs, data_parallel_rank, on_output)

    # --- for streams ---

    async def submit_stream(self, stream: RequestStream) -> None:
        """Sends the request of a stream."""
        if self._draining:
            raise ClientClosedError("this AsyncLLM is shutting down and takes no more requests", phase="stopping")
        if self._running is None or self._closed:
            await self.start()
        assert self._running is not None
        await self._running.submit(stream)

    def abort_slots(self, slots: Sequence[Slot]) -> None:
        """Ends the completions that have not ended."""
        if self._running is not None:
            self._running.dispatcher.abort(slots)


def _shut_down() -> ClientClosedError:
    return ClientClosedError("this AsyncLLM was shut down; build another one", phase="stopping")


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
