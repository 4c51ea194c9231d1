"""What is known of a request of the server once it has ended: metrics, logs and traces are made of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

__all__ = ["OnRequest", "RequestRecord"]


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request.

    Attributes:
        request_id: as echoed to the client.
        path: of its URL.
        status: of HTTP; 499: the client went away before there was one.
        started: `time.time()` at which it came.
        duration: seconds until its end.
        streamed: whether its answer was.
        key: index of the API key that it showed.
        finish_reasons: how its completions ended.
        error: code of the error that it ended with; "": none.
        prompts, prompt_tokens, completion_tokens, cached_tokens: counts.
        queue_time: longest that a part of it waited in the engine core, seconds; None: it was not scheduled.
        time_to_first_token: seconds; None: there was none.
        prompt: its text; None: not to be logged.
        trace_parent, trace_state: W3C headers; "": it had none.
    """

    request_id: str
    path: str
    status: int = 499
    started: float = 0.0
    duration: float = 0.0
    streamed: bool = False
    key: int | None = None
    finish_reasons: list[str] = []
    error: str = ""
    prompts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_time: float | None = None
    time_to_first_token: float | None = None
    prompt: str | None = None
    trace_parent: str = ""
    trace_state: str = ""

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds from each token of one completion to the next; None where there are fewer than two."""
        completions = max(1, len(self.finish_reasons))
        steps = self.completion_tokens / completions - 1
        if self.time_to_first_token is None or steps <= 0:
            return None
        return (self.duration - self.time_to_first_token) / steps


OnRequest = Callable[[RequestRecord], None]
