"""From a message's columns to the slots of its requests: the hot path of the front end.

One dict lookup a token and no object: a list or a tuple for each would have the garbage collector go through all
streams again and again before their readers have run, which with 10,000 of them takes more time than all else. What a
slot needs beyond adding the token and waking its reader (detokenization, call-backs, the end) is gathered and done once
a message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from outboard.client.delivery import FailedOutputs
from outboard.engine.core import Tokenizer
from outboard.errors import EngineDeadError, OutboardError, SlowReaderError
from outboard.frontend.slot import OnText, RequestState, Slot
from outboard.frontend.slot_table import SlotTable
from outboard.frontend.text import BatchDetokenizer
from outboard.frontend.waiter import Waiter, WakeBatch
from outboard.protocol.messages import EngineCoreOutputs, OutputExtras
from outboard.protocol.sampling import FinishReason

__all__ = ["Dispatcher"]

logger = logging.getLogger("outboard.frontend")


class Dispatcher:
    """Owns the table handle -> slot; its `on_message` is the client's output sink.

    Args:
        loop: the one that readers run on.
        abort_handles: ends requests in the engine core.
        tokenizer: None where the engine has none.
        stream_buffer_bytes: results that one slot may hold for its reader.

    Attributes:
        requests: requests that have not ended, by the user's id.
        ended: set whenever one of them has; whoever waits clears it.
        failed: how many ended with an error of their own while the engine went on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        abort_handles: Callable[[Sequence[int]], None],
        tokenizer: Tokenizer | None,
        stream_buffer_bytes: int,
    ) -> None:
        self._loop = loop
        self._wake_batch = WakeBatch(loop)
        self._abort_handles = abort_handles
        self._detokenizer = BatchDetokenizer(tokenizer) if tokenizer is not None else None
        self._eos = frozenset(tokenizer.eos_token_ids) if tokenizer is not None else frozenset()
        self._stream_buffer_bytes = stream_buffer_bytes
        self._slots = SlotTable()
        self.requests: dict[str, RequestState] = {}
        self.ended = asyncio.Event()
        self.failed = 0

    def add(self, slot: Slot, handle: int) -> None:
        """Enters a slot; its outputs may come from now on."""
        slot.handle = handle
        slot.open = True
        self._slots.add(slot)
        request = slot.request
        if request.waiter is None and request.on_output is None:
            request.waiter = Waiter(self._loop, self._wake_batch)
        if not request.final_only:
            slot.waiter = request.waiter
        request.slots.append(slot)
        request.unfinished += 1
        self.requests[request.request_id] = request

    def abort(self, slots: Sequence[Slot]) -> None:
        """Ends the slots that have not ended, with "abort"; columns that still come for them are dropped."""
        ended = [slot for slot in slots if slot.handle in self._slots]
        for slot in ended:
            self._end(slot, "abort")
        self._abort_handles([slot.handle for slot in ended])
        self._notify(ended)

    def on_message(self, message: EngineCoreOutputs | EngineDeadError) -> None:
        """Takes a message from the client, or the error that ends everything."""
        if not isinstance(message, EngineCoreOutputs):
            self._fail_all(message)
            return
        if isinstance(message, FailedOutputs):
            self._fail_some(message)
            return
        slots = self._slots.find(message.handles)
        apart: dict[Slot, OnText | None] = {}
        if message.finished is not None or message.extras is not None:
            apart = _set_apart(message, slots)
        touched: list[Slot] = []
        woken: list[Waiter] = []
        texts: list[Slot] = []
        text_tokens: list[int] = []
        by_token = slots if message.counts is None else _by_token(slots, message.counts)
        for slot, token in zip(by_token, message.tokens, strict=True):
            if slot is None:
                continue
            if slot.direct:
                if slot.on_text is not None:
                    texts.append(slot)
                    text_tokens.append(token)
                    continue
                if not slot.fresh:
                    touched.append(slot)
                slot.fresh.append(token)
                continue
            token_ids = slot.token_ids
            if type(token_ids) is list:
                token_ids.append(token)
            elif token_ids is None:
                slot.token_ids = token
            else:
                slot.token_ids = [token_ids, token]  # type: ignore[list-item]  # an int: `isinstance` takes longer
            waiter = slot.waiter
            if waiter is not None:
                callback = waiter.callback
                if callback is not None:  # as `Waiter.wake`, for all of the message at once
                    waiter.callback = None
                    waiter.woken = callback
                    woken.append(waiter)
        if woken:
            self._wake_batch.add(woken)
        if message.extras is not None:
            self._take_extras(message.extras, slots)
        for position, reason, stop_reason in message.finished or ():
            ended = slots[position]
            if ended is not None and ended.finish_reason is None:
                self._end(ended, reason, stop_reason)
        for slot, on_text in apart.items():
            slot.on_text = on_text
            if not slot.fresh:  # no token came with what is told of it
                touched.append(slot)
        if touched:
            self._advance(touched)
        if texts:
            self._advance_texts(texts, text_tokens)

    @staticmethod
    def _take_extras(extras: OutputExtras, slots: list[Slot | None]) -> None:
        for position, queue_time in extras.queue_times.items():
            if (slot := slots[position]) is not None and slot.request.metrics.queue_time is None:
                slot.request.metrics.queue_time = queue_time
        for position, count in extras.num_cached_tokens.items():
            if (slot := slots[position]) is not None:
                slot.request.metrics.num_cached_tokens += count
        for position, logprobs in extras.logprobs.items():
            if (slot := slots[position]) is not None:
                slot.add_logprobs(logprobs)
        for position, behind in extras.resumed.items():
            if (slot := slots[position]) is not None:
                slot.request.metrics.resumed_at += (behind,)
        for position, error in extras.errors.items():
            if (slot := slots[position]) is not None:
                slot.error = error
        for position, result in extras.results.items():
            if (slot := slots[position]) is not None:
                slot.add_result(result)

    # --- what is done once a message ---

    def _advance(self, touched: Sequence[Slot]) -> None:
        """Moves the fresh tokens of these slots on: through the detokenizer, to readers and call-backs."""
        if self._detokenizer is not None:
            self._detokenizer.step(
                (slot.text_state, slot.fresh, False)
                if slot.finish_reason is None
                else (slot.text_state, self._tokens_with_text(slot), True)
                for slot in touched
                if slot.text_state is not None
            )
        stopped = []
        texts: list[Slot] = []
        others: list[Slot] = []
        for slot in touched:
            state = slot.text_state
            if slot.on_text is not None and not slot.more and not (state is None or state.stop_reason or state.error):
                texts.append(slot)
                continue
            others.append(slot)
            slot.absorb_fresh()
            if state is not None:
                slot.text += state.text_delta
                state.text_delta = ""
                if state.stop_reason is not None and slot.stop_reason is None:
                    stopped += self._end_by_text(slot, "stop", state.stop_reason)
                elif state.error is not None and slot.error is None:
                    slot.error = f"the tokenizer failed: {type(state.error).__name__}: {state.error}"
                    stopped += self._end_by_text(slot, "error", None)
            if slot.result_bytes > self._stream_buffer_bytes and slot.is_behind and slot.handle in self._slots:
                stopped += self._overflow(slot)
        if stopped:
            self._abort_handles(stopped)
        if others:
            self._notify(others)
        for slot in texts:
            if not slot.more:  # else another call-back ended it just now
                slot.taken += len(slot.fresh)
                slot.fresh = []
                state = slot.text_state
                if state is not None and state.text_delta and slot.on_text is not None:
                    text, state.text_delta = state.text_delta, ""
                    try:
                        slot.on_text(text)
                    except Exception:
                        self._give_up(slot.request)

    def _advance_texts(self, slots: list[Slot], tokens: list[int]) -> None:
        """As `_advance`, for a token each of slots that are called back with texts: most tokens of a server."""
        assert self._detokenizer is not None  # or there would be no texts
        states = [slot.text_state for slot in slots]
        self._detokenizer.step_each(states, tokens)  # type: ignore[arg-type]
        stopped: list[Slot] = []
        for slot, state, token in zip(slots, states, tokens, strict=True):
            on_text = slot.on_text
            assert state is not None and on_text is not None  # or it would not be here
            if state.stop_reason is not None or state.error is not None:
                slot.fresh.append(token)
                stopped.append(slot)
            elif not slot.more:  # else another call-back ended it just now
                slot.taken += 1
                text = state.text_delta
                if text:
                    state.text_delta = ""
                    try:
                        on_text(text)
                    except Exception:
                        self._give_up(slot.request)
        if stopped:
            self._advance(stopped)  # which adds nothing to a text that has ended

    def _tokens_with_text(self, slot: Slot) -> list[int]:
        """The fresh tokens without the one that stopped it: as in vLLM it is among the tokens, not in the text."""
        fresh = slot.fresh
        if fresh and slot.finish_reason == "stop" and (fresh[-1] == slot.stop_reason or fresh[-1] in self._eos):
            state = slot.text_state
            if state is not None and not state.include_stop:
                return fresh[:-1]
        return fresh

    def _end_by_text(self, slot: Slot, reason: FinishReason, stop_reason: str | None) -> list[int]:
        """Ends a slot for what its text is; the handles to abort in the engine core."""
        running = slot.handle in self._slots
        if running:
            self._end(slot, reason, stop_reason)
        else:  # the engine core ended it with this message: the text decides why
            slot.finish(reason, stop_reason)
        return [slot.handle] if running else []

    def _overflow(self, slot: Slot) -> list[int]:
        """Ends the whole request of a slot whose reader is too slow; the handles to abort in the engine core."""
        request = slot.request
        error = SlowReaderError(
            f"request {request.request_id!r}: its reader is behind by {slot.result_bytes} bytes of results, more than "
            f"stream_buffer_bytes={self._stream_buffer_bytes} allows; read faster, or raise it in TransportConfig"
        )
        return self._fail(request, error)

    def _notify(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            request = slot.request
            if request.on_output is not None:
                self._call_back(request)
            elif slot.token_ids is not None and (slot.finish_reason is not None or not request.final_only):
                request.wake()

    def _call_back(self, request: RequestState) -> None:
        stream = request.stream
        if stream is None:
            return
        if not request.unfinished:
            request.stream = None
        try:
            stream.emit()
        except Exception:
            self._give_up(request)

    def _give_up(self, request: RequestState) -> None:
        """Its call-back raised."""
        logger.exception("the call-back of request %r raised; the request is aborted", request.request_id)
        request.stream = None
        request.on_output = None
        self.abort(request.slots)

    # --- ends ---

    def _end(self, slot: Slot, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        slot.finish(reason, stop_reason)
        self._slots.pop(slot.handle)
        request = slot.request
        request.unfinished -= 1
        if not request.unfinished:
            self._forget(request)

    def _forget(self, request: RequestState) -> None:
        del self.requests[request.request_id]
        self.ended.set()

    def _fail(self, request: RequestState, error: OutboardError) -> list[int]:
        """Ends a whole request with an error; the handles of completions that had not ended."""
        running = [slot.handle for slot in request.slots if self._slots.pop(slot.handle) is not None]
        self.failed += 1
        self._forget(request)
        request.fail(error)
        return running

    def _fail_some(self, message: FailedOutputs) -> None:
        """Ends the requests of which a completion was lost; where there were others, they are aborted."""
        assert message.cause is not None  # its maker gave it one
        for slot in self._slots.find(message.handles):
            if slot is None or slot.handle not in self._slots:  # or another completion of its request was here before
                continue
            request = slot.request
            self._abort_handles(self._fail(request, message.cause))
            if request.on_output is not None:
                self._call_back(request)

    def _fail_all(self, error: EngineDeadError) -> None:
        requests = list(self.requests.values())
        self._slots.clear()
        self.requests.clear()
        self.ended.set()
        for request in requests:
            request.fail(error)
            if request.on_output is not None:
                self._call_back(request)


def _set_apart(message: EngineCoreOutputs, slots: list[Slot | None]) -> dict[Slot, OnText | None]:
    """Slots of which the message tells more than tokens, with their `on_text`, to be put back: that is no mere text."""
    positions = [position for position, _, _ in message.finished or ()]
    if message.extras is not None:
        positions += [*message.extras.logprobs, *message.extras.results]
    apart: dict[Slot, OnText | None] = {}
    for position in positions:
        slot = slots[position]
        if slot is not None and slot not in apart:
            apart[slot] = slot.on_text
            slot.on_text = None
    return apart


def _by_token(slots: list[Slot | None], counts: list[int]) -> list[Slot | None]:
    """A slot for each token, of slots that have so many each."""
    found: list[Slot | None] = []
    for slot, count in zip(slots, counts, strict=True):
        if count == 1:
            found.append(slot)
        else:
            found += [slot] * count
    return found
