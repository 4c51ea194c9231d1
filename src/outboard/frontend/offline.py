"""`LLM`: many prompts at once, without asyncio."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec
from tqdm import tqdm

from outboard.client.async_mp import AsyncMPClient
from outboard.errors import EngineDeadError, OutboardError
from outboard.frontend.llm import AsyncLLM, EngineLike
from outboard.frontend.outputs import CompletionOutput, RequestOutput
from outboard.frontend.prompt import Prompt
from outboard.protocol.sampling import SamplingParams

__all__ = ["LLM"]

P = ParamSpec("P")
R = TypeVar("R")

Messages = Sequence[dict[str, Any]]


def _blocking(
    method: Callable[Concatenate[AsyncLLM, P], Awaitable[R]],
) -> Callable[Concatenate[LLM, P], R]:
    """A method of `AsyncLLM` as one that blocks."""

    def call(self: LLM, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(method(self._llm, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


class LLM:
    """An engine in a process of its own, for offline use: prompts in, finished outputs out, in order.

        with LLM("openvino") as llm:
            for output in llm.generate(["The capital of France is", "One, two,"]):
                print(output.outputs[0].text)

    The engine starts with the first call, or with `with`. Not to be used inside a running event loop: use `AsyncLLM`
    there. Belongs to one thread.

    Args:
        engine: an `EngineConfig`, or an engine name, reference or class with default settings.
        options: with a bare engine, the keyword arguments of its constructor.
    """

    def __init__(self, engine: EngineLike, *, options: dict[str, Any] | None = None) -> None:
        self._llm = AsyncLLM(engine, options=options)
        self._runner: asyncio.Runner | None = None

    def __enter__(self) -> Self:
        self._run(self._llm.start())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        # The loop is ours alone and does not run: the client goes with it, as dropped clients do.
        if self._runner is not None:
            self._runner.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The finished outputs of all prompts, in their order.

        A prompt that cannot be served, or whose engine core was restarted, does not lose the others: its output has
        `finish_reason` "error" and `error`.
        Ctrl-C aborts what runs and raises `KeyboardInterrupt`; the engine can be used again.

        Args:
            prompts: one prompt or many; each is text, token ids, or chat messages.
            sampling_params: for all, or one for each; default `SamplingParams()`.
            use_tqdm: show a progress bar with tokens a second on stderr.

        Raises:
            ValueError: as many parameters as prompts are needed.
            EngineDeadError: the engine core is gone.
        """
        many = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(many)
        else:
            params = list(sampling_params)
        if len(params) != len(many):
            raise ValueError(f"{len(many)} prompts need as many sampling parameters, or one for all, not {len(params)}")
        return self._run(self._generate(many, params, use_tqdm))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or many: `[{"role": "user", "content": "..."}]` each."""
        one = bool(messages) and isinstance(messages[0], dict)
        return self.generate([messages] if one else messages, sampling_params, use_tqdm)  # type: ignore[arg-type]

    def shutdown(self, timeout: float | None = None) -> None:
        """Stops the engine core and frees everything. Idempotent. Args: as `AsyncLLM.shutdown`."""
        self._run(self._llm.shutdown(timeout))
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    collective_rpc = _blocking(AsyncLLM.collective_rpc)
    pause_generation = _blocking(AsyncLLM.pause_generation)
    resume_generation = _blocking(AsyncLLM.resume_generation)
    is_paused = _blocking(AsyncLLM.is_paused)
    sleep = _blocking(AsyncLLM.sleep)
    wake_up = _blocking(AsyncLLM.wake_up)
    is_sleeping = _blocking(AsyncLLM.is_sleeping)
    reset_prefix_cache = _blocking(AsyncLLM.reset_prefix_cache)
    start_profile = _blocking(AsyncLLM.start_profile)
    stop_profile = _blocking(AsyncLLM.stop_profile)
    get_stats = _blocking(AsyncLLM.get_stats)

    @property
    def client(self) -> AsyncMPClient:
        """The client underneath; its calls belong to this object's own event loop. Raises as `AsyncLLM.client`."""
        return self._llm.client

    def _run(self, awaitable: Awaitable[R]) -> R:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_as_coroutine(awaitable))

    async def _generate(
        self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        await self._llm.start()
        with tqdm(total=len(prompts), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:
            progress = _Progress(bar)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._generate_one(prompt, one, progress))
                        for prompt, one in zip(prompts, params, strict=True)
                    ]
            except ExceptionGroup as errors:  # the engine's death is told to every one of them
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _generate_one(self, prompt: Prompt, params: SamplingParams, progress: _Progress) -> RequestOutput:
        stream = self._llm.generate(prompt, msgspec.structs.replace(params, output_kind="final_only"))
        try:
            output = await anext(stream)
        except OutboardError as error:
            if isinstance(error, EngineDeadError) and not error.retryable:
                raise
            failed = CompletionOutput(0, "", [], "error", error=str(error))
            output = RequestOutput(stream.request_id, [failed], True, stream.prompt, stream.prompt_token_ids)
        progress.ended(output)
        return output


class _Progress:
    """A progress bar over prompts, with the rate of generated tokens behind it."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar
        self._tokens = 0

    def ended(self, output: RequestOutput) -> None:
        self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = self._bar.format_dict["elapsed"] or 1e-9
        self._bar.set_postfix_str(f"{self._tokens / elapsed:.1f} tokens/s", refresh=False)
        self._bar.update(1)


async def _as_coroutine(awaitable: Awaitable[R]) -> R:
    return await awaitable


def _as_list(prompts: Any) -> list[Prompt]:
    """Many prompts as a list; one prompt (text, token ids or messages) as a list of it."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, dict))):
        return [prompts]
    return list(prompts)
