"""From tokens to text: incremental detokenization of a whole step at once, and stop strings.

A decoder works on a window of tokens, not on the completion, so that a token costs the same however long the completion
has become:

    tokens   ... a b c [ d e f g h i j k ] l        [ ]: the window; l: the new token
    text               "once upon a time" " there"

The text of the window is known up to some character; what decoding it together with the new tokens adds to that is new.
Now and then the window moves on. It never starts with the new token, because some decoders strip the space in front of
the first word they are given, and it never starts inside a character.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from outboard.engine.core import Tokenizer
from outboard.protocol.sampling import SamplingParams

__all__ = ["BatchDetokenizer", "TextState"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PROMPT_TAIL = 5  # tokens of the prompt to decode the first tokens after; as many as in vLLM
STRIDE = 6  # the window moves on by so many tokens, and holds up to twice as many
PATIENCE = 16  # tokens to wait for a character to become whole; four bytes is the longest, and a token is at least one
LONGEST_UNFINISHED = 3  # tokens of a character that is not whole, and U+FFFD characters that it can show as

# What a step still has to do for a state.
_IDLE, _QUEUED, _LAST, _DONE = range(4)


class TextState:
    """The text of one completion, as far as it has been generated.

    Args:
        params: `stop`, `include_stop_str_in_output`, `min_tokens` and `skip_special_tokens` are used.
        prompt_tail: the end of the prompt's token ids, a few or all: the completion is decoded as what follows it.

    Attributes:
        text_delta: text that is ready and not taken yet; whoever takes it sets it to "". It ends neither in part of a
            character nor in what may become a stop string that is to be left out. All deltas together are the text.
        stop_reason: the stop string that was found, else None. The text has ended then, and further tokens are ignored.
        include_stop: whether what stops the completion is part of its text.
        error: what the tokenizer raised for this completion alone, else None. Further tokens are ignored.

    The stop string that is complete first wins, the longest of those that are complete at the same character. So the
    result does not depend on how the text is cut into tokens and messages. As in vLLM, a stop string counts if it ends
    after the text of the first `min_tokens` tokens; it may begin before.
    """

    __slots__ = (
        "_bound",
        "_context",
        "_fresh",
        "_grown",
        "_mark",
        "_partial",
        "_phase",
        "_seen",
        "_skip_special_tokens",
        "_stop_begins",
        "_stops",
        "_window",
        "error",
        "include_stop",
        "stop_reason",
        "text_delta",
    )

    def __init__(self, params: SamplingParams, prompt_tail: Sequence[int] = ()) -> None:
        self.text_delta = ""
        self.stop_reason: str | None = None
        self.error: Exception | None = None
        self._phase = _IDLE
        self._skip_special_tokens = params.skip_special_tokens

        self._window = list(prompt_tail[-PROMPT_TAIL:])
        self._context = len(self._window)  # leading tokens whose own text is not known yet, or 0
        self._seen = 0  # characters of the window's text that are known; counted from the context's end until it is
        self._mark = len(self._window)  # where in the window the next one starts: a place between characters
        self._grown = len(self._window)  # the window's length when it last yielded text

        self._stops = sorted(params.stop or (), key=len, reverse=True)
        self._stop_begins = frozenset(stop[0] for stop in self._stops)
        self.include_stop = params.include_stop_str_in_output
        self._partial = ""  # the end of the text so far, where it may be the beginning of a stop string
        self._bound = params.min_tokens if self._stops else 0  # tokens to come in whose text no stop string ends
        self._fresh = 0  # tokens of this step, counted only while there is a bound

    def _extra_sequences(self) -> list[list[int]]:
        """What must be decoded in this step beside the window: its context, and what of it comes before the bound."""
        sequences = []
        if self._context:
            sequences.append(self._window[: self._context])
        if 0 < self._bound < self._fresh:
            sequences.append(self._window[: self._bound - self._fresh])
        return sequences

    def _feed_with_extra(self, text: str, extra: Iterator[str]) -> None:
        """Takes the text of the window, and those of `_extra_sequences` from `extra`."""
        if self._context:
            self._seen += len(next(extra))
            self._context = 0
        before_bound = 0
        if self._bound:
            crossed = self._bound < self._fresh
            before_bound = len(next(extra).rstrip(REPLACEMENT) if crossed else text)
            self._bound = max(0, self._bound - self._fresh)
            self._fresh = 0
        self._feed(text, before_bound)

    def _feed(self, text: str, before_bound: int = 0) -> None:
        """Takes the text of the window; no stop string may end in its first `before_bound` characters."""
        last = self._phase == _LAST
        self._phase = _DONE if last else _IDLE
        seen = self._seen
        length = len(self._window)
        end = len(text)
        settled = True
        if not last and text.endswith(REPLACEMENT):
            end, settled = _unfinished(text, seen, length - self._grown)

        new = text[seen:end]
        if new:
            self._seen = end
            self._grown = length
            if settled and length - self._mark >= STRIDE:
                self._move_window(unseen=len(text) - end)
        elif settled and length - self._grown >= PATIENCE:  # tokens without text, such as skipped special ones
            del self._window[self._grown : length - LONGEST_UNFINISHED]
        if self._stops and (self._partial or not self._stop_begins.isdisjoint(new)):
            self._search_stops(new, max(0, before_bound - seen), last)
        else:
            self.text_delta += new

    def _feed_plain(self, text: str) -> None:
        """As `_feed`, where nothing can stop it and no character is unfinished: the usual case."""
        new = text[self._seen :]
        if not new:
            self._feed(text)
            return
        self._phase = _IDLE
        self._seen = len(text)
        self._grown = length = len(self._window)
        if length - self._mark >= STRIDE:
            self._move_window(unseen=0)
        self.text_delta += new

    def _move_window(self, unseen: int) -> None:
        del self._window[: self._mark]
        self._mark = self._grown = self._context = len(self._window)
        self._seen = -unseen  # the end of the text is the same in both windows

    def _search_stops(self, new: str, before_bound: int, last: bool) -> None:
        """Adds `new` to the text, up to a stop string or to what may become one."""
        text = self._partial + new
        delivered = len(self._partial) if self.include_stop else 0
        searched = len(self._partial) + before_bound
        end = limit = len(text)
        for stop in self._stops:
            start = text.find(stop, max(0, searched + 1 - len(stop)), limit)
            if start >= 0:
                self.stop_reason = stop
                self._phase = _DONE
                end = start + len(stop) if self.include_stop else start
                limit = start + len(stop) - 1  # those to come are no longer than this one: they must end before it
        if not last and self.stop_reason is None:
            partial = _partial_stop(text, self._stops)
            self._partial = text[partial:]
            if not self.include_stop:
                end = partial
        self.text_delta += text[delivered:end]


def _unfinished(text: str, seen: int, waited: int) -> tuple[int, bool]:
    """Up to where a text that ends in U+FFFD is final, and whether the window may move on all the same.

    The run of U+FFFD at its end may stand for a character that is not whole yet. Once too many tokens have come for
    that, the run is text, but for the few at its end that may stand for the next character.
    """
    if seen >= len(text):
        return seen, True
    end = len(text.rstrip(REPLACEMENT))
    if end > seen or waited < PATIENCE:
        return end, False
    end = len(text) - LONGEST_UNFINISHED
    if end <= seen and waited >= 2 * PATIENCE:
        end = len(text)
    return end, end > seen


def _partial_stop(text: str, stops: list[str]) -> int:
    """Where the longest end of `text` begins that is the beginning of a stop string, but not all of it."""
    found = len(text)
    for stop in stops:
        first = stop[0]
        start = text.find(first, max(0, len(text) + 1 - len(stop)), found)
        while start >= 0:
            if stop.startswith(text[start:]):
                found = start
                break
            start = text.find(first, start + 1, found)
    return found


class BatchDetokenizer:
    """Detokenizes what one message of an engine core brought, with one call of the tokenizer.

    One call matters: a real tokenizer takes 74 us for one short sequence and 0.8 us each for 256 at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def step(self, batch: Iterable[tuple[TextState, Sequence[int], bool]]) -> None:
        """Adds new tokens to completions; then their `text_delta`, `stop_reason` and `error` are up to date.

        Args:
            batch: a state, its new tokens (or none) and whether they are its last. A state may occur several times.
        """
        queued: list[TextState] = []
        for state, tokens, finished in batch:
            phase = state._phase
            if phase == _DONE:
                continue
            if phase == _IDLE:
                state._phase = _QUEUED
                queued.append(state)
            if finished:
                state._phase = _LAST
            state._window += tokens
            if state._bound:
                state._fresh += len(tokens)

        self._decode(queued)

    def step_each(self, states: Sequence[TextState], tokens: Sequence[int]) -> None:
        """As `step`, with one new token for each of these states, none of which is its last."""
        queued: list[TextState] = []
        for state, token in zip(states, tokens, strict=True):
            if state._phase == _DONE:
                continue
            if state._phase == _IDLE:
                state._phase = _QUEUED
                queued.append(state)
            state._window.append(token)
            if state._bound:
                state._fresh += 1
        self._decode(queued)

    def _decode(self, queued: list[TextState]) -> None:
        plain = [state for state in queued if state._skip_special_tokens]
        if plain:
            self._advance(plain, True)
        if len(plain) < len(queued):
            self._advance([state for state in queued if not state._skip_special_tokens], False)

    def _advance(self, states: list[TextState], skip_special_tokens: bool) -> None:
        sequences = [state._window for state in states]
        for state in [state for state in states if state._context or state._bound]:
            sequences += state._extra_sequences()
        try:
            texts = self._tokenizer.decode(sequences, skip_special_tokens)
            if len(texts) != len(sequences):
                raise ValueError(f"the tokenizer made {len(texts)} texts of {len(sequences)} sequences")
        except Exception as error:
            if len(states) > 1:
                for state in states:
                    self._advance([state], skip_special_tokens)
            else:
                states[0].error = error
                states[0]._phase = _DONE
            return

        extra = iter(texts[len(states) :])
        for state, text in zip(states, texts, strict=False):
            if state._context or state._bound:
                state._feed_with_extra(text, extra)
            elif state._phase == _LAST or state._stops or text.endswith(REPLACEMENT):
                state._feed(text)
            else:
                state._feed_plain(text)
