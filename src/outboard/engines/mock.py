"""`MockEngine`: tokens at a set pace and next to no cost, to put load on everything around an engine."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import Any

from outboard.engine.core import EngineCore, OutputBatch, Tokenizer
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.errors import EngineOptionError, InvalidRequestError, PromptTooLongError
from outboard.protocol.messages import EngineCoreRequest, EngineInfo, SchedulerStats

__all__ = ["MockEngine"]

_FIRST_TOKEN = ord("a")
_CYCLE = 26
# A step that waits for an acknowledgement returns after this, so that aborts and the end of the process get through.
_ACK_WAIT_MS = 50


class MockEngine(EngineCore):
    """Produces `max_tokens` tokens for every request: token `i` is `97 + i % 26`, that is "abc...zab...".

    A request that is resumed goes on counting where it was.
    Requests that start at the same step say the same, so that a step costs the same for one request and for many.

    Args:
        step_ms: milliseconds between steps. Deadlines are absolute: a late step does not delay those after it.
        tokens_per_step: tokens that each request gets in a step.
        max_num_seqs: requests that run at once; more wait in order of arrival.
        vocab_size: what to report as the vocabulary's size; at least 123, so that the tokens are in it.
        max_model_len: most tokens of prompt and completion together; None: no limit.
        window: stop while this many steps have not been acknowledged; 0: never stop.
        ack_path: a FIFO out of which one byte a step acknowledges the oldest; needed where there is a window.
        start_after: do nothing until this many requests have been added, ended ones included.
    """

    def __init__(
        self,
        step_ms: float = 0.0,
        tokens_per_step: int = 1,
        max_num_seqs: int = 4096,
        vocab_size: int = 256,
        max_model_len: int | None = None,
        window: int = 0,
        ack_path: str = "",
        start_after: int = 0,
    ) -> None:
        for name, value, least in (
            ("step_ms", step_ms, 0),
            ("tokens_per_step", tokens_per_step, 1),
            ("max_num_seqs", max_num_seqs, 1),
            ("vocab_size", vocab_size, _FIRST_TOKEN + _CYCLE),
            ("max_model_len", 2 if max_model_len is None else max_model_len, 2),
            ("window", window, 0),
            ("start_after", start_after, 0),
        ):
            if not value >= least:
                raise EngineOptionError(f"{name} must be at least {least}, not {value}")
        if bool(window) != bool(ack_path):
            raise EngineOptionError("window and ack_path need each other")
        self._step_seconds = step_ms / 1000
        self._tokens_per_step = tokens_per_step
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._start_after = start_after
        self._acks = _Acknowledgements(ack_path, window) if window else None
        self._deadline: float | None = None
        self._added = 0
        # A tick is one token for every running request; a step has `tokens_per_step` of them.
        self._tick = 0
        self._waiting: dict[str, tuple[int, int]] = {}  # tokens that there were, tokens to come
        self._running: dict[str, tuple[int, int]] = {}
        self._by_start: dict[int, dict[str, None]] = {}
        self._by_end: dict[int, dict[str, None]] = {}
        self._ids: list[str] = []  # of the running requests, in the order of `_by_start`; empty: to be made again

    def add_request(self, request: EngineCoreRequest) -> None:
        limit = request.sampling_params.max_tokens
        if self._max_model_len is not None:
            room = self._max_model_len - len(request.prompt_token_ids)
            if room < 1:
                raise PromptTooLongError(
                    f"the prompt has {len(request.prompt_token_ids)} tokens, max_model_len is {self._max_model_len}"
                )
            limit = room if limit is None else min(limit, room)
        if limit is None:
            raise InvalidRequestError("max_tokens must be set: this engine would never stop, it has no max_model_len")
        if not self._running and not self._waiting:
            self._deadline = None
        self._waiting[request.request_id] = (request.num_output_tokens, limit)
        self._added += 1

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._running:
                self._remove(request_id)
            else:
                self._waiting.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._running or self._waiting) and self._added >= self._start_after

    def step(self, outputs: OutputBatch) -> None:
        if self._acks is not None and not self._acks.take():
            self._deadline = None
            return
        if self._waiting:
            self._admit(outputs)
        if self._step_seconds:
            self._pace()
        for _ in range(self._tokens_per_step):
            self._produce(outputs)

    def info(self) -> EngineInfo:
        return EngineInfo(
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            max_num_seqs=self._max_num_seqs,
            model="mock",
            exact_resume=True,
        )

    def scheduler_stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._waiting), len(self._running))

    def shutdown(self) -> None:
        if self._acks is not None:
            self._acks.close()

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> Tokenizer:
        return ByteTokenizer()

    def _admit(self, outputs: OutputBatch) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            request_id = next(iter(self._waiting))
            said, limit = self._waiting.pop(request_id)
            end = self._tick + limit - 1
            start = (self._tick - said) % _CYCLE
            self._running[request_id] = (start, end)
            self._by_start.setdefault(start, {})[request_id] = None
            self._by_end.setdefault(end, {})[request_id] = None
            self._ids = []
            outputs.scheduled(request_id)

    def _remove(self, request_id: str) -> None:
        start, end = self._running.pop(request_id)
        self._ids = []
        for group, key in ((self._by_start, start), (self._by_end, end)):
            del group[key][request_id]
            if not group[key]:
                del group[key]

    def _pace(self) -> None:
        now = time.monotonic()
        self._deadline = (now if self._deadline is None else self._deadline) + self._step_seconds
        if self._deadline > now:
            time.sleep(self._deadline - now)

    def _produce(self, outputs: OutputBatch) -> None:
        tick = self._tick
        self._tick += 1
        if tick in self._by_end:
            for request_id in list(self._by_end[tick]):
                token = _FIRST_TOKEN + (tick - self._running[request_id][0]) % _CYCLE
                self._remove(request_id)
                outputs.add(request_id, (token,), "length")
        if not self._running:
            return
        if not self._ids:  # they change only as requests come and go
            self._ids = [request_id for group in self._by_start.values() for request_id in group]
        tokens: list[int] = []
        for start, group in self._by_start.items():
            tokens += [_FIRST_TOKEN + (tick - start) % _CYCLE] * len(group)
        outputs.extend(self._ids, tokens)


class _Acknowledgements:
    """Counts the steps that may still be taken before a reader has acknowledged earlier ones."""

    def __init__(self, path: str, window: int) -> None:
        # Opened for writing too: with a writer of its own the FIFO never ends, whoever comes and goes.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._credit = window

    def take(self) -> bool:
        """Takes the right to one step; False if none was to be had within 50 ms."""
        if not self._credit:
            if not self._poll.poll(_ACK_WAIT_MS):
                return False
            self._credit = len(os.read(self._fd, 65536))
        self._credit -= 1
        return True

    def close(self) -> None:
        os.close(self._fd)
