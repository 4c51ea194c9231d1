"""What a stream yields. Shapes and names follow vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from outboard.protocol.sampling import FinishReason

__all__ = ["CompletionOutput", "RequestMetrics", "RequestOutput"]


class CompletionOutput(msgspec.Struct, gc=False):
    """One completion of a prompt: all of it so far, or what is new, as `output_kind` says.

    Attributes:
        index: 0 to n - 1.
        text: text of the tokens; "" with `detokenize=False`.
        token_ids: the tokens.
        finish_reason: "stop", "length", "abort" or "error" at the end, else None.
        stop_reason: the stop string or stop token that ended it; None for the end-of-sequence token. With "error":
            "invalid_request" where the engine refused the request.
        logprobs: one dict a token: token id -> log probability; None unless asked for.
        result: output of an engine that is not a language model.
        error: why it ended with "error".
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None
    result: Any = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, gc=False):
    """Times of one request; one object a stream, filled in as the request goes on.

    Attributes:
        arrival_time: `time.time()` at which the front end got it.
        queue_time: seconds that it waited in the engine core; None until it is scheduled.
        time_to_first_token: seconds from arrival until the front end had the first token; None until then.
        e2e_latency: seconds from arrival until the end; None until then.
        num_prompt_tokens, num_cached_tokens: counts over all completions.
        num_generation_tokens: the same; complete with the last output.
        resumed_at: behind how many tokens another incarnation of the engine core went on, each time one had died. With
            `EngineInfo.exact_resume` what follows is what the first would have said, else a continuation of its own.
    """

    arrival_time: float = 0.0
    queue_time: float | None = None
    time_to_first_token: float | None = None
    e2e_latency: float | None = None
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_cached_tokens: int = 0
    resumed_at: tuple[int, ...] = ()


class RequestOutput(msgspec.Struct, gc=False):
    """What one request has produced.

    Attributes:
        request_id: the user's name for the request.
        outputs: its completions; with "delta" only those that have something new.
        finished: whether all completions have ended; this is then the last output.
        prompt, prompt_token_ids: what was asked.
        metrics: times and counts.
    """

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    metrics: RequestMetrics | None = None
