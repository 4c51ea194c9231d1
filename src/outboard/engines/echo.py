"""`EchoEngine`: says the prompt again, one token a step. Needs no model; for first steps, tests and demonstrations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from outboard.engine.core import EngineCore, OutputBatch, Tokenizer
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.errors import EngineOptionError, InvalidRequestError, PromptTooLongError
from outboard.protocol.messages import EngineCoreRequest, EngineInfo, SchedulerStats

__all__ = ["EchoEngine"]


class EchoEngine(EngineCore):
    """Returns the prompt's tokens one a step; then the request ends with "stop", or with "length" where it is cut.

    A request that is resumed goes on where it was: what it has said already, at the prompt's end, is not said again.
    A request with an empty prompt and some `inputs` gets these back as its result.

    Args:
        max_num_seqs: requests that run at once; more wait in order of arrival.
        step_ms: how long a step takes, milliseconds.
        max_model_len: most tokens of prompt and completion together; None: no limit.
    """

    def __init__(self, max_num_seqs: int = 256, step_ms: float = 0.0, max_model_len: int | None = None) -> None:
        if max_num_seqs < 1:
            raise EngineOptionError(f"max_num_seqs must be at least 1, not {max_num_seqs}")
        if not step_ms >= 0:
            raise EngineOptionError(f"step_ms must be 0 or more, not {step_ms}")
        if max_model_len is not None and max_model_len < 2:
            raise EngineOptionError(f"max_model_len must be at least 2, or None, not {max_model_len}")
        self._max_num_seqs = max_num_seqs
        self._step_seconds = step_ms / 1000
        self._max_model_len = max_model_len
        self._waiting: dict[str, _Sequence] = {}
        self._running: dict[str, _Sequence] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        length = len(request.prompt_token_ids)
        said = request.num_output_tokens
        if not 0 <= said <= length - said:
            raise InvalidRequestError(f"{said} of {length} tokens cannot be what has been echoed of the others")
        if not length and request.inputs is None:
            raise InvalidRequestError("the prompt is empty and there are no inputs: nothing to echo")
        if self._max_model_len is not None and length >= self._max_model_len:
            raise PromptTooLongError(f"the prompt has {length} tokens, max_model_len is {self._max_model_len}")
        self._waiting[request.request_id] = _Sequence(request, self._max_model_len)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._running.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self, outputs: OutputBatch) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            request_id = next(iter(self._waiting))
            self._running[request_id] = self._waiting.pop(request_id)
            outputs.scheduled(request_id)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        going: list[str] = []
        tokens: list[int] = []
        ended: list[str] = []
        for request_id, sequence in self._running.items():
            if sequence.position == len(sequence.prompt):
                ended.append(request_id)
                outputs.add(request_id, finish_reason="stop", result=None if sequence.prompt else sequence.inputs)
                continue
            token = sequence.prompt[sequence.position]
            sequence.position += 1
            if sequence.position >= sequence.min_tokens and token in sequence.stop_token_ids:
                ended.append(request_id)
                outputs.add(request_id, (token,), "stop", stop_reason=token)
            elif sequence.position == len(sequence.prompt):
                ended.append(request_id)
                outputs.add(request_id, (token,), "stop")
            elif sequence.position == sequence.limit:
                ended.append(request_id)
                outputs.add(request_id, (token,), "length")
            else:
                going.append(request_id)
                tokens.append(token)
        if going:
            outputs.extend(going, tokens)
        for request_id in ended:
            del self._running[request_id]

    def info(self) -> EngineInfo:
        return EngineInfo(
            max_model_len=self._max_model_len,
            vocab_size=256,
            max_num_seqs=self._max_num_seqs,
            model="echo",
            exact_resume=True,
        )

    def scheduler_stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._waiting), len(self._running))

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> Tokenizer:
        return ByteTokenizer()


class _Sequence:
    """One request: its prompt, how much of it has been said, and where to end."""

    __slots__ = ("inputs", "limit", "min_tokens", "position", "prompt", "stop_token_ids")

    def __init__(self, request: EngineCoreRequest, max_model_len: int | None) -> None:
        params = request.sampling_params
        length, said = len(request.prompt_token_ids), request.num_output_tokens
        self.prompt = request.prompt_token_ids[: length - said]
        self.inputs = request.inputs
        self.position = said
        self.limit = None if params.max_tokens is None else said + params.max_tokens
        if max_model_len is not None:
            room = max_model_len - len(self.prompt)
            self.limit = room if self.limit is None else min(self.limit, room)
        self.min_tokens = said + params.min_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
