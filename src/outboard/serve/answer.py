"""The answer to a request while it is made: written as a stream of events, or once as a document."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from outboard.frontend.outputs import CompletionOutput, RequestOutput
from outboard.frontend.slot import OnText
from outboard.serve.errors import ApiError, to_api_error
from outboard.serve.exchange import Exchange
from outboard.serve.formats import DONE, Format, Usage
from outboard.serve.outlet import Outlet

__all__ = ["Answer", "StreamedAnswer", "WholeAnswer"]

_encode_text = msgspec.json.Encoder().encode


# What a log probability takes in an event, roughly.
_LOGPROB_BYTES = 64


def _merge(held: dict[int, CompletionOutput], choice: int, new: CompletionOutput) -> None:
    """Adds what is new of a choice to what is held of it."""
    so_far = held.get(choice)
    if so_far is None:
        held[choice] = new
        return
    so_far.text += new.text
    so_far.token_ids += new.token_ids
    if new.logprobs is not None:
        so_far.logprobs = (so_far.logprobs or []) + new.logprobs
    so_far.finish_reason, so_far.stop_reason = new.finish_reason, new.stop_reason


def _not_written(event: bytes) -> bool:
    return False


class Answer(ABC):
    """What is told of the outputs of one request of the API. Belongs to its loop.

    Args:
        exchange: to answer.
        form: of the answer.

    Attributes:
        id: of it, unique.
        status: of HTTP; 0: nothing was written yet.
        usage: counts so far; the caller keeps them.
        counts_always: whether they are to be right with every output, not just at the end.
    """

    def __init__(self, exchange: Exchange, form: Format) -> None:
        self._outlet = Outlet(exchange.send, self._on_busy, self._on_free, exchange.write_chunk)
        self._exchange = exchange
        self._form = form
        self.id = form.id
        self._headers = exchange.answer_headers
        self.status = 0
        self.usage = Usage()
        self.counts_always = False

    @abstractmethod
    def add(self, base: int, output: RequestOutput) -> None:
        """Takes an output in; its completions are the choices from `base` on."""

    def text_writer(self, choice: int) -> OnText | None:
        """What takes further texts of a choice that has had an output, with no output made of them."""
        return None

    @abstractmethod
    def finish(self) -> None:
        """All outputs are in."""

    @abstractmethod
    def fail(self, error: ApiError) -> None:
        """Ends it with an error."""

    def close(self) -> None:
        """Lets go of the connection."""
        self._outlet.close()

    def cut(self) -> None:
        """Ends the connection; what it has not taken is lost."""
        self.close()
        self._exchange.cut()

    @abstractmethod
    def _on_busy(self) -> None:
        """The connection takes no more for now."""

    @abstractmethod
    def _on_free(self) -> None:
        """It takes more again."""

    def _write_document(self, status: int, body: bytes, more: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *more]
        self._outlet.start(status, headers + self._headers, body, False)

    def _write_error(self, error: ApiError) -> None:
        self._write_document(error.status, error.body, error.headers)


class WholeAnswer(Answer):
    """One document at the end."""

    def __init__(self, exchange: Exchange, form: Format) -> None:
        super().__init__(exchange, form)
        self._texts: dict[int, list[str]] = {}  # by choice
        self._completions: dict[int, CompletionOutput] = {}  # by choice; all but their texts

    def add(self, base: int, output: RequestOutput) -> None:
        for one in output.outputs:
            choice = base + one.index
            self._texts.setdefault(choice, []).append(one.text)
            one.text = ""
            _merge(self._completions, choice, one)

    def text_writer(self, choice: int) -> OnText | None:
        return self._texts.setdefault(choice, []).append

    def finish(self) -> None:
        for choice, one in self._completions.items():
            one.text = "".join(self._texts[choice])
        completions = [one for _, one in sorted(self._completions.items())]
        self._write_document(200, self._form.document(completions, self.usage), [])

    def fail(self, error: ApiError) -> None:
        self._write_error(error)

    def _on_busy(self) -> None:
        pass  # it is written as a whole

    def _on_free(self) -> None:
        pass  # there is nothing more to write


class StreamedAnswer(Answer):
    """Server-sent events, one write a message of the engine core.

    The head goes out with the first output, so that a request that never gets that far has a status of its own. While
    the connection takes no more, what is new merges; where that becomes too much, or lasts too long, `on_slow` is
    called.

    Args:
        exchange, form: as `Answer`.
        with_usage: the stream ends with an event of counts.
        with_all_usage: every event has them.
        slow_bytes: text that may be held back.
        slow_timeout: seconds that the connection may take.
        on_slow: ends the request and the connection.
        on_error: ends the request with an error, where something cannot be written.
    """

    def __init__(
        self,
        exchange: Exchange,
        form: Format,
        *,
        with_usage: bool,
        with_all_usage: bool,
        slow_bytes: int,
        slow_timeout: float,
        on_slow: Callable[[], None],
        on_error: Callable[[Exception], object],
    ) -> None:
        super().__init__(exchange, form)
        self._with_usage = with_usage
        self.counts_always = with_all_usage
        self._slow_bytes = slow_bytes
        self._slow_timeout = slow_timeout
        self._on_slow = on_slow
        self._on_error = on_error
        self._opened: set[int] = set()  # choices that had an event
        self._held: dict[int, CompletionOutput] = {}  # by choice, while the connection takes no more
        self._held_bytes = 0
        self._last: bytes | None = None  # what is to be written behind that
        self._timer: asyncio.TimerHandle | None = None

    def add(self, base: int, output: RequestOutput) -> None:
        outputs = output.outputs
        if self._outlet.busy:
            for one in outputs:
                self._hold(base + one.index, one)
            self._check_held()
            return
        events = b"".join(self._event(base + one.index, one) for one in outputs)
        if events or not self.status:  # what follows may come to `text_writer`, which writes no head
            self._write(events)

    def text_writer(self, choice: int) -> OnText | None:
        if self.counts_always:
            return None
        outlet = self._outlet
        write_chunk = self._exchange.write_chunk or _not_written
        before, behind = self._form.around_text(choice)

        def on_text(text: str) -> None:
            # The hot path: nearly all tokens come here.
            try:
                if outlet.busy:
                    self._hold(choice, CompletionOutput(0, text, []))
                    self._check_held()
                elif not write_chunk(event := before + _encode_text(text) + behind):
                    outlet.body(event)
            except Exception as error:
                self._on_error(error)

        return on_text

    def finish(self) -> None:
        self._end((self._form.usage_event(self.usage) if self._with_usage else b"") + DONE)

    def fail(self, error: ApiError) -> None:
        if not self.status:
            self._write_error(error)
        else:
            self._end(b"data: " + error.body + b"\n\n" + DONE)

    def close(self) -> None:
        self._stop_timer()
        super().close()

    def _end(self, last: bytes) -> None:
        if self._outlet.busy:
            self._last = last
        else:
            self._write(last, more_body=False)

    def _write(self, events: bytes, more_body: bool = True) -> None:
        if self.status:
            self._outlet.body(events, more_body)
            return
        self.status = 200
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        # Proxies such as nginx hold answers back unless they are told.
        headers.append((b"x-accel-buffering", b"no"))
        self._outlet.start(200, headers + self._headers, events, more_body)

    def _event(self, choice: int, new: CompletionOutput) -> bytes:
        opening = b""
        if choice not in self._opened:
            self._opened.add(choice)
            opening = self._form.opening(choice)
        if not new.text and new.finish_reason is None and new.logprobs is None:
            return opening
        return opening + self._form.event(choice, new, self.usage if self.counts_always else None)

    # --- while the connection takes no more ---

    def _hold(self, choice: int, new: CompletionOutput) -> None:
        self._held_bytes += len(new.text) + sum(_LOGPROB_BYTES * len(one) for one in new.logprobs or ())
        _merge(self._held, choice, new)

    def _check_held(self) -> None:
        if self._held_bytes > self._slow_bytes:
            self._on_slow()

    def _on_busy(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._slow_timeout, self._on_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_free(self) -> None:
        self._stop_timer()
        held, self._held, self._held_bytes = self._held, {}, 0
        try:
            events = b"".join(self._event(choice, new) for choice, new in held.items())
        except Exception as error:
            ended, self._last = self._last is not None, None
            self._on_error(error)
            if ended:  # that has told nobody, then
                self.fail(to_api_error(error))
            return
        last, self._last = self._last, None
        if last is not None:
            self._write(events + last, more_body=False)
        elif events:
            self._write(events)
