"""`outboard generate`: one prompt, streamed to stdout."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer

from outboard.cli.options import exit_status, parse_options
from outboard.config import EngineConfig, FaultConfig, ParallelConfig
from outboard.errors import RequestFailedError
from outboard.frontend.llm import AsyncLLM
from outboard.frontend.outputs import RequestOutput
from outboard.frontend.prompt import Prompt
from outboard.frontend.signals import ShutdownSignals
from outboard.launch.thread_signals import leave_signals_to_main
from outboard.protocol.sampling import SamplingParams

__all__ = ["generate"]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue, or with --chat the user's message.")],
    engine: Annotated[
        str, typer.Option(help="A name (see `outboard engines`), module:Class or path.py:Class.")
    ] = "openvino",
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the engine; may be given again.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
    data_parallel_size: Annotated[int, typer.Option(help="Engine cores to start; one of them answers.")] = 1,
    shutdown_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the answer may go on after Ctrl-C or SIGTERM.")
    ] = FaultConfig().shutdown_timeout,
) -> None:
    """Generates text with an engine in a process of its own.

    Text goes to stdout as it comes, a summary to stderr. After Ctrl-C the answer may go on to its end, for a while;
    a second one stops at once.
    """
    with exit_status():
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, output_kind="delta")
        faults = FaultConfig(shutdown_timeout=shutdown_timeout)
        parallel = ParallelConfig(data_parallel_size=data_parallel_size)
        config = EngineConfig(engine=engine, options=parse_options(option or []), parallel=parallel, faults=faults)
        prompt = prompt.encode(errors="replace").decode()  # an argument that is no UTF-8 has lone surrogates
        asked: Prompt = [{"role": "user", "content": prompt}] if chat else prompt
        with _no_news_of_deaths():
            status = asyncio.run(_generate(config, asked, params, as_json))
    if status:
        raise typer.Exit(status)


@contextmanager
def _no_news_of_deaths() -> Iterator[None]:
    """The death of the engine core is what the command itself ends with, and prints."""
    logger = logging.getLogger("outboard.launch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


async def _generate(config: EngineConfig, prompt: Prompt, params: SamplingParams, as_json: bool) -> int:
    # No thread of this program takes the signals that the main one is to act upon, even while a write blocks it.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(initializer=leave_signals_to_main))
    text: list[str] = []
    token_ids: list[int] = []
    last: RequestOutput | None = None
    llm = AsyncLLM(config)
    async with ShutdownSignals(llm) as signals, llm:
        signals.on_drain = _tell
        started = time.monotonic()
        async for last in llm.generate(prompt, params):
            text.append(last.outputs[0].text)
            token_ids += last.outputs[0].token_ids
            if not as_json:
                sys.stdout.write(text[-1])
                sys.stdout.flush()
        seconds = time.monotonic() - started
        pids = [engine.pid for engine in llm.client.core_engines]
    if last is None or not last.finished:  # a signal ended it before
        return signals.exit_status
    completion = last.outputs[0]
    if completion.finish_reason == "error":
        raise RequestFailedError(completion.error or "the engine ended the request with an error")
    if as_json:
        print(_as_json(last, "".join(text), token_ids, seconds, pids))
        return signals.exit_status
    if text and not "".join(text).endswith("\n"):
        print(flush=True)
    first = last.metrics.time_to_first_token if last.metrics else None
    print(
        f"{len(token_ids)} tokens, {len(token_ids) / seconds:.1f} tokens/s, "
        f"first after {(first or 0) * 1000:.0f} ms, finish reason {completion.finish_reason}, "
        f"engine pid {', '.join(map(str, pids))}",
        file=sys.stderr,
    )
    return signals.exit_status


def _tell(received: signal.Signals) -> None:
    again = "Ctrl-C" if received is signal.SIGINT else received.name
    typer.echo(f"outboard: finishing; {again} again stops at once", err=True)


def _as_json(last: RequestOutput, text: str, token_ids: list[int], seconds: float, pids: list[int]) -> str:
    completion, metrics = last.outputs[0], last.metrics
    document: dict[str, Any] = {
        "request_id": last.request_id,
        "prompt": last.prompt,
        "text": text,
        "token_ids": token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "prompt_tokens": len(last.prompt_token_ids or ()),
        "completion_tokens": len(token_ids),
        "tokens_per_second": round(len(token_ids) / seconds, 1),
        "time_to_first_token": metrics.time_to_first_token if metrics else None,
        "queue_time": metrics.queue_time if metrics else None,
        "engine_pids": pids,
    }
    return msgspec.json.encode(document).decode()
