"""One request of the API, from its prompts to the end of its answer."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Sequence

from outboard.errors import OutboardError, RequestFailedError
from outboard.frontend.llm import AsyncLLM
from outboard.frontend.outputs import RequestMetrics, RequestOutput
from outboard.frontend.prompt import Prompt
from outboard.frontend.stream import RequestStream
from outboard.observe.record import RequestRecord
from outboard.protocol.sampling import SamplingParams
from outboard.serve.answer import Answer
from outboard.serve.errors import ApiError, to_api_error
from outboard.serve.limits import Ticket

__all__ = ["Generation"]

logger = logging.getLogger("outboard.serve")

# Prompts that are encoded and sent before others get their turn on the loop.
_AT_ONCE = 8


class Generation:
    """The requests to the engine that one request of the API makes, and their outputs on the way to its answer.

    Outputs come by call-backs, while a message of the engine core is dispatched. Belongs to its loop.

    Args:
        llm: has the engine.
        answer: gets the outputs.
        ticket: of the admitted request.
        record: filled in.
        timeout: seconds until it ends with an error, if it has not ended.
    """

    def __init__(self, llm: AsyncLLM, answer: Answer, ticket: Ticket, record: RequestRecord, timeout: float) -> None:
        self._llm = llm
        self._answer = answer
        self._ticket = ticket
        self._record = record
        self._began = time.monotonic()
        self._streams: list[RequestStream] = []
        self._unfinished = 0
        self._ended = False
        self._timer = asyncio.get_running_loop().call_later(timeout, self._expire, timeout)

    @property
    def ended(self) -> bool:
        """Whether nothing more is wanted of the engine."""
        return self._ended

    @property
    def completion_tokens(self) -> int:
        """Tokens of its completions so far."""
        return sum(stream.num_generation_tokens for stream in self._streams)

    async def begin(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Sends the prompts to the engine. What is wrong with one ends it all, in the answer.

        Cancelling leaves what was sent to `close`.
        """
        self._unfinished = self._record.prompts = len(prompts)
        for number, prompt in enumerate(prompts):
            if number and number % _AT_ONCE == 0:
                await asyncio.sleep(0)
                if self._ended:
                    return
            try:
                stream = await self._llm.submit(
                    prompt,
                    params,
                    functools.partial(self._on_output, number * params.n),
                    on_text=self._answer.text_writer(number) if params.n == 1 else None,
                    request_id=self._answer.id if len(prompts) == 1 else f"{self._answer.id}-{number}",
                )
            except Exception as error:
                self.fail(error)
                return
            self._streams.append(stream)
            count = len(stream.prompt_token_ids or ())
            self._answer.usage.prompt_tokens += count
            self._record.prompt_tokens += count
            if self.ended:  # its time was over meanwhile, or another prompt failed
                stream.abort()
                return

    def fail(self, error: Exception) -> bool:
        """Ends it with an error, unless it has ended; whether it did."""
        if not isinstance(error, (OutboardError, ApiError)):
            logger.error("request %s failed", self._record.request_id, exc_info=error)
        if self._ended:
            return False
        told = to_api_error(error)
        self._record.error = told.code or told.type
        self._end()
        self._answer.fail(told)
        return True

    def close(self) -> None:
        """The answer is complete, or nobody is there to read it."""
        if not self._ended:
            self._record.error = "client_disconnected"
            self._end()
        self._answer.close()
        record = self._record
        record.status = self._answer.status or record.status
        record.completion_tokens = self.completion_tokens

    def slow(self) -> None:
        """The client does not read: ends it and the connection, without the rest of the answer."""
        self._record.error = self._record.error or "slow_reader"
        if not self._ended:
            self._end()
        self._answer.cut()

    # --- inside ---

    def _on_output(self, base: int, output: RequestOutput | OutboardError) -> None:
        if self._ended:
            return
        if not isinstance(output, RequestOutput):
            self.fail(output)
            return
        try:
            self._take(base, output)
        except Exception as error:
            self.fail(error)

    def _take(self, base: int, output: RequestOutput) -> None:
        self._ticket.started()
        if self._record.time_to_first_token is None and output.metrics is not None:
            self._record.time_to_first_token = output.metrics.time_to_first_token
        outputs = output.outputs
        if (len(outputs) > 1 or outputs[0].finish_reason is not None) and not self._note_ends(output):
            return
        if self._answer.counts_always:
            self._answer.usage.completion_tokens = self.completion_tokens
        self._answer.add(base, output)
        if output.finished and not self._ended:  # the client may have been too slow for it
            self._unfinished -= 1
            if not self._unfinished:
                self._answer.usage.completion_tokens = self.completion_tokens
                self._answer.finish()  # which may fail
                self._end()

    def _note_ends(self, output: RequestOutput) -> bool:
        """Takes note of completions that ended; False where that ends it all."""
        for one in output.outputs:
            if one.finish_reason == "error":
                why = one.error or "the engine ended the request with an error"
                refused = one.stop_reason == "invalid_request"
                self.fail(ApiError(400, why, code="invalid_request") if refused else RequestFailedError(why))
                return False
            if one.finish_reason == "abort":
                self.fail(ApiError(503, "the request was ended by the server", "server_error", "aborted"))
                return False
            if one.finish_reason is not None:
                self._record.finish_reasons.append(one.finish_reason)
        if output.finished and output.metrics is not None:
            self._note_metrics(output.metrics)
        return True

    def _note_metrics(self, metrics: RequestMetrics) -> None:
        record = self._record
        self._answer.usage.cached_tokens += metrics.num_cached_tokens
        record.cached_tokens += metrics.num_cached_tokens
        if metrics.queue_time is not None:
            record.queue_time = max(record.queue_time or 0.0, metrics.queue_time)

    def _expire(self, timeout: float) -> None:
        self.fail(ApiError(504, f"not finished within {timeout:g} s", "server_error", "deadline_exceeded"))

    def _end(self) -> None:
        """Nothing more is wanted of the engine."""
        self._ended = True
        self._timer.cancel()
        self._ticket.end()
        self._record.duration = time.monotonic() - self._began
        for stream in self._streams:
            stream.abort()
