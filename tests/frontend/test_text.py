from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboard.engine.core import Tokenizer
from outboard.engines.byte_tokenizer import ByteTokenizer
from outboard.frontend.text import BatchDetokenizer, TextState
from outboard.protocol.sampling import SamplingParams

SPECIAL = 1_000_000
REPLACEMENT = "\ufffd"


class PieceTokenizer(Tokenizer):
    """Token `i` stands for the bytes `pieces[i]`, `SPECIAL` and above for `<s>`. Counts what it is asked to decode."""

    eos_token_ids: Sequence[int] = ()
    max_token_chars = 100

    def __init__(self, pieces: Sequence[bytes], strip_space: bool = False, errors: str = "replace") -> None:
        self.pieces = pieces
        self.strip_space = strip_space
        self.errors = errors
        self.calls: list[tuple[int, bool]] = []
        self.tokens_decoded = 0

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> str:
        raise NotImplementedError

    def decode(self, token_ids: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        self.calls.append((len(token_ids), skip_special_tokens))
        self.tokens_decoded += sum(map(len, token_ids))
        return [self._decode_one(sequence, skip_special_tokens) for sequence in token_ids]

    def _decode_one(self, sequence: list[int], skip_special_tokens: bool) -> str:
        special = b"" if skip_special_tokens else b"<s>"
        data = b"".join(special if token >= SPECIAL else self.pieces[token] for token in sequence)
        text = data.decode("utf-8", self.errors)
        return text[1:] if self.strip_space and text.startswith(" ") else text


class ByteFallbackTokenizer(PieceTokenizer):
    """As Llama's decoder: a run of one-byte tokens is text if all of it is valid, else each token is one U+FFFD."""

    def _decode_one(self, sequence: list[int], skip_special_tokens: bool) -> str:
        text = []
        for is_byte, tokens in groupby(sequence, lambda token: len(self.pieces[token]) == 1):
            run = b"".join(self.pieces[token] for token in tokens)
            try:
                text.append(run.decode())
            except UnicodeDecodeError:
                text.append(REPLACEMENT * len(run) if is_byte else run.decode("utf-8", "replace"))
        return "".join(text)


class FailingTokenizer(ByteTokenizer):
    """Raises for a batch with a token 13 in it, and leaves a sequence with a token 14 out of its answer."""

    def decode(self, token_ids: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        if any(13 in sequence for sequence in token_ids):
            raise RuntimeError("no token 13")
        return super().decode([sequence for sequence in token_ids if 14 not in sequence])


def stream(
    tokenizer: Tokenizer,
    chunks: Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    prompt_tail: Sequence[int] = (),
) -> tuple[list[str], TextState]:
    """The deltas that these chunks of tokens give, the last one finishing the completion."""
    detokenizer = BatchDetokenizer(tokenizer)
    state = TextState(params or SamplingParams(), prompt_tail)
    deltas = []
    for i, chunk in enumerate(chunks):
        detokenizer.step([(state, chunk, i == len(chunks) - 1)])
        deltas.append(state.text_delta)
        state.text_delta = ""
    return deltas, state


def split(draw: st.DrawFn, items: Sequence[Any], most: int = 5) -> list[Sequence[Any]]:
    sizes = st.integers(1, most)
    parts = []
    position = 0
    while position < len(items):
        size = draw(sizes)
        parts.append(items[position : position + size])
        position += size
    return parts


words = st.sampled_from(
    [
        "a",
        "b",
        "ab",
        " ",
        "  ",
        " the",
        "\n",
        "é",
        "e\u0301",
        "ñ",
        "日本",
        "😀",
        "👩‍👩‍👧",
        "🏳️‍🌈",
        "👍🏽",
        "\u200d",
        "नमस्ते",
        "\0",
    ]
)
texts = st.one_of(st.lists(words, min_size=10, max_size=40).map("".join), st.text(max_size=30))
texts_without_replacement = texts.map(lambda text: text.replace(REPLACEMENT, "?"))


@st.composite
def tokenized(draw: st.DrawFn, text: st.SearchStrategy[str] = texts) -> tuple[PieceTokenizer, list[list[int]]]:
    """A text as chunks of tokens. Tokens end at any byte, as those of a byte-level tokenizer with merges do."""
    pieces = [bytes(piece) for piece in split(draw, draw(text).encode(), draw(st.sampled_from([1, 3, 8])))]
    chunks = [list(chunk) for chunk in split(draw, range(len(pieces)), draw(st.sampled_from([1, 3, 40])))]
    return PieceTokenizer(pieces), chunks or [[]]


def whole(tokenizer: PieceTokenizer, chunks: Sequence[Sequence[int]]) -> str:
    return tokenizer.decode([[token for chunk in chunks for token in chunk]])[0]


@given(tokenized())
def test_deltas_together_are_the_text(case: tuple[PieceTokenizer, list[list[int]]]) -> None:
    tokenizer, chunks = case
    deltas, state = stream(tokenizer, chunks)
    assert "".join(deltas) == whole(tokenizer, chunks)
    assert state.stop_reason is None
    assert state.error is None


@given(tokenized(texts_without_replacement))
def test_each_delta_ends_at_the_last_whole_character(case: tuple[PieceTokenizer, list[list[int]]]) -> None:
    tokenizer, chunks = case
    deltas, _ = stream(tokenizer, chunks)
    for i in range(len(chunks)):
        assert "".join(deltas[: i + 1]) == whole(tokenizer, chunks[: i + 1]).rstrip(REPLACEMENT)


@given(st.data())
def test_bytes_that_are_no_text_at_all(data: st.DataObject) -> None:
    runs = st.sampled_from([b"\xff", b"\x80" * 20, b"\xf0\x9f\x98", b"\xef\xbf\xbd" * 9, b"a", "😀".encode(), b"\xc3"])
    tokens = list(data.draw(st.lists(st.one_of(runs, st.binary(max_size=2)), max_size=30).map(b"".join)))
    chunks = split(data.draw, tokens, data.draw(st.sampled_from([1, 3, 40]))) or [[]]
    deltas, _ = stream(ByteTokenizer(), chunks)
    assert "".join(deltas) == ByteTokenizer().decode([tokens])[0]


@given(st.data())
def test_a_decoder_that_strips_the_first_space_of_what_it_is_given(data: st.DataObject) -> None:
    pieces = data.draw(
        st.lists(st.sampled_from([" the", " a", "b", " ", ".", "\n", " 日本", "é"]), min_size=1, max_size=80)
    )
    tokenizer = PieceTokenizer([piece.encode() for piece in pieces], strip_space=True)
    prompt = data.draw(st.integers(0, len(pieces)))
    chunks = split(data.draw, range(prompt, len(pieces)), data.draw(st.sampled_from([1, 3, 40]))) or [[]]
    deltas, _ = stream(tokenizer, chunks, prompt_tail=range(prompt))
    text = "".join(pieces).removeprefix(" ")
    assert "".join(deltas) == text[len("".join(pieces[:prompt]).removeprefix(" ")) :]


@given(st.data())
def test_a_decoder_that_shows_a_whole_run_of_bytes_as_invalid_until_it_is_valid(data: st.DataObject) -> None:
    characters = st.sampled_from("é日😀n").map(lambda character: [bytes([byte]) for byte in character.encode()])
    pieces = [piece for run in data.draw(st.lists(characters | st.just([b" the"]), max_size=40)) for piece in run]
    tokenizer = ByteFallbackTokenizer(pieces)
    deltas, _ = stream(tokenizer, split(data.draw, range(len(pieces)), data.draw(st.sampled_from([1, 3, 40]))) or [[]])
    assert "".join(deltas) == b"".join(pieces).decode()


@pytest.mark.parametrize("first", range(1, 24))
def test_the_window_never_starts_inside_a_character(first: int) -> None:
    pieces = [b" the"] * 8 + [bytes([byte]) for byte in ("😀" * 12).encode()]
    chunks = [range(first), *([i] for i in range(first, len(pieces)))]
    deltas, _ = stream(ByteFallbackTokenizer(pieces), chunks)
    assert "".join(deltas) == b"".join(pieces).decode()


def each_byte(error: UnicodeError) -> tuple[str, int]:
    """An error handler for `bytes.decode` that makes one U+FFFD of each bad byte; Python's makes one of several."""
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("each byte", each_byte)


@pytest.mark.parametrize("errors", ["replace", "each byte", "ignore"])
@pytest.mark.parametrize("garbage", range(40))
def test_a_character_after_much_garbage_stays_whole(garbage: int, errors: str) -> None:
    pieces = [bytes([byte]) for byte in b"a" + b"\xff" * garbage + "😀b".encode()]
    deltas, _ = stream(PieceTokenizer(pieces, errors=errors), [[i] for i in range(len(pieces))])
    assert "".join(deltas) == "a" + REPLACEMENT * (garbage if errors != "ignore" else 0) + "😀b"


def test_only_the_end_of_the_prompt_is_decoded() -> None:
    tokenizer = PieceTokenizer([b" a"] * 5000, strip_space=True)
    deltas, _ = stream(tokenizer, [[1]], prompt_tail=range(5000))
    assert deltas == [" a"]
    assert tokenizer.tokens_decoded < 20


def test_an_emoji_of_four_tokens_comes_at_once() -> None:
    chunks = [[byte] for byte in "a😀b".encode()]
    assert stream(ByteTokenizer(), chunks)[0] == ["a", "", "", "", "😀", "b"]


def test_an_unfinished_character_shows_when_the_completion_ends() -> None:
    chunks: list[list[int]] = [[byte] for byte in "a😀".encode()[:-1]]
    assert stream(ByteTokenizer(), chunks)[0] == ["a", "", "", REPLACEMENT]
    assert stream(ByteTokenizer(), [*chunks, []])[0] == ["a", "", "", "", REPLACEMENT]


def test_a_genuine_replacement_character_passes() -> None:
    chunks = [[byte] for byte in "a\ufffdb".encode()]
    assert stream(ByteTokenizer(), chunks)[0] == ["a", "", "", "", "\ufffdb"]


LONG = {
    "words": [b" word", b" and", b".", "é".encode()] * 2500,
    "bytes of characters": [bytes([byte]) for byte in "日本語😀".encode() * 800],
    "garbage": [b"\xff"] * 10_000,
    "spaces": [b" "] * 10_000,
    "no text": [b""] * 10_000,
    "an unfinished character, then no text": [b"a", b"\xf0"] + [b""] * 10_000,
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("size", [1, 7, 100])
def test_work_is_linear_in_the_length(name: str, size: int) -> None:
    pieces = LONG[name]
    tokenizer = PieceTokenizer(pieces, strip_space=True)
    everything = range(len(pieces))
    chunks = [everything[i : i + size] for i in range(0, len(pieces), size)]
    deltas, _ = stream(tokenizer, chunks)
    assert tokenizer.tokens_decoded < (12 if size == 1 and name == "words" else 50) * len(pieces)
    assert "".join(deltas) == tokenizer.decode([list(everything)])[0]


# --- stop strings ---

# Few characters, so that stop strings, and beginnings of them, do occur.
stop_texts = st.integers(0, 40).flatmap(lambda size: st.text("aab é😀", min_size=size, max_size=size))
stop_words = st.lists(st.text("aabb é😀", min_size=1, max_size=4), min_size=1, max_size=3)


def reference(text: str, stops: list[str], include: bool, bound: int = 0) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, the longest of several, and that string."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, bound + 1 - len(stop)))
        if start >= 0:
            found.append((start + len(stop), start, stop))
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


def text_bound(tokenizer: PieceTokenizer, chunks: list[list[int]], min_tokens: int) -> int:
    first = list(chain.from_iterable(chunks))[:min_tokens]
    return len(whole(tokenizer, [first]).rstrip(REPLACEMENT))


@given(tokenized(stop_texts), stop_words, st.booleans(), st.integers(0, 12))
def test_stop_strings(
    case: tuple[PieceTokenizer, list[list[int]]], stops: list[str], include: bool, min_tokens: int
) -> None:
    tokenizer, chunks = case
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None)
    deltas, state = stream(tokenizer, chunks, params)
    bound = text_bound(tokenizer, chunks, min_tokens)
    assert ("".join(deltas), state.stop_reason) == reference(whole(tokenizer, chunks), stops, include, bound)


@given(tokenized(stop_texts), stop_words, st.booleans(), st.integers(0, 12))
def test_no_more_is_held_back_than_may_become_a_stop_string(
    case: tuple[PieceTokenizer, list[list[int]]], stops: list[str], include: bool, min_tokens: int
) -> None:
    tokenizer, chunks = case
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None)
    deltas, _ = stream(tokenizer, [*chunks, []], params)
    bound = text_bound(tokenizer, chunks, min_tokens)
    for i in range(len(chunks)):
        text, stop = reference(whole(tokenizer, chunks[: i + 1]).rstrip(REPLACEMENT), stops, include, bound)
        if stop is None and not include:
            beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
            held = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
            text = text[: len(text) - held]
        assert "".join(deltas[: i + 1]) == text


def test_what_might_have_been_a_stop_string_is_released() -> None:
    params = SamplingParams(stop="</end>")
    chunks = [list(chunk) for chunk in (b"x<", b"/e", b"n", b"t<", b"/")]
    assert stream(ByteTokenizer(), chunks, params)[0] == ["x", "", "", "</ent", "</"]


def test_tokens_after_a_stop_string_are_ignored() -> None:
    tokenizer = PieceTokenizer([b"a", b"!", b"b"])
    deltas, state = stream(tokenizer, [[0], [1], [2], [2]], SamplingParams(stop=["!"]))
    assert (deltas, state.stop_reason) == (["a", "", "", ""], "!")
    assert len(tokenizer.calls) == 2


def test_tokens_after_the_last_are_ignored() -> None:
    state = TextState(SamplingParams())
    detokenizer = BatchDetokenizer(ByteTokenizer())
    detokenizer.step([(state, b"a", True)])
    detokenizer.step([(state, b"b", False)])
    assert state.text_delta == "a"


@pytest.mark.parametrize("stops", [["bc", "abc", "c"], ["abc", "c", "bc"], ["c", "bc", "abc"]])
def test_of_stop_strings_complete_at_once_the_longest_counts(stops: list[str]) -> None:
    deltas, state = stream(ByteTokenizer(), [b"xabcx"], SamplingParams(stop=stops))
    assert (deltas, state.stop_reason) == (["x"], "abc")


def test_the_stop_string_that_is_complete_first_counts() -> None:
    for chunks in [b"xabcd"], [bytes([byte]) for byte in b"xabcd"]:
        deltas, state = stream(ByteTokenizer(), chunks, SamplingParams(stop=["abcd", "bc"]))
        assert ("".join(deltas), state.stop_reason) == ("xa", "bc")


def test_a_character_that_only_begins_within_min_tokens_may_be_the_stop_string() -> None:
    deltas, state = stream(ByteTokenizer(), ["aéb".encode()], SamplingParams(stop="é", min_tokens=2))
    assert (deltas, state.stop_reason) == (["a"], "é")


# --- batches ---


def test_one_call_a_step() -> None:
    tokenizer = PieceTokenizer([b"a", b"b"])
    detokenizer = BatchDetokenizer(tokenizer)
    states = [TextState(SamplingParams()) for _ in range(50)]
    for _ in range(20):
        detokenizer.step((state, [i % 2], False) for i, state in enumerate(states))
    assert len(tokenizer.calls) == 20
    assert [state.text_delta for state in states] == ["a" * 20, "b" * 20] * 25
    detokenizer.step([])
    assert len(tokenizer.calls) == 20


def test_special_tokens() -> None:
    tokenizer = PieceTokenizer([b"a", b"b"])
    skipping, keeping = TextState(SamplingParams()), TextState(SamplingParams(skip_special_tokens=False))
    tokens = [0, SPECIAL, 1]
    BatchDetokenizer(tokenizer).step([(keeping, tokens, True), (skipping, tokens, True)])
    assert (skipping.text_delta, keeping.text_delta) == ("ab", "a<s>b")
    assert tokenizer.calls == [(1, True), (1, False)]


def test_a_state_may_occur_several_times_in_a_batch() -> None:
    state = TextState(SamplingParams(stop="c", min_tokens=3), prompt_tail=b"prompt")
    detokenizer = BatchDetokenizer(ByteTokenizer())
    detokenizer.step([(state, b"a", False), (state, b"c", False), (state, b"xc", False), (state, b"", True)])
    assert (state.text_delta, state.stop_reason) == ("acx", "c")
    state.text_delta = ""
    detokenizer.step([(state, b"d", True)])
    assert state.text_delta == ""


@pytest.mark.parametrize("bad_token", [13, 14])
def test_what_cannot_be_decoded_fails_alone(bad_token: int) -> None:
    detokenizer = BatchDetokenizer(FailingTokenizer())
    states = [TextState(SamplingParams(stop="z", min_tokens=1), prompt_tail=b"p") for _ in range(4)]
    bad = states.pop(1)
    detokenizer.step(
        [(states[0], b"one", False), (bad, [bad_token], False), *((state, b"two", False) for state in states[1:])]
    )
    assert [state.text_delta for state in states] == ["one", "two", "two"]
    assert [state.error for state in states] == [None] * 3
    assert isinstance(bad.error, RuntimeError if bad_token == 13 else ValueError)
    assert bad.text_delta == ""
    first_error = bad.error

    detokenizer.step([(bad, b"", False), *((state, b"z", True) for state in states)])
    assert [state.text_delta for state in [bad, *states]] == ["", "one", "two", "two"]
    assert [state.stop_reason for state in [bad, *states]] == [None, "z", "z", "z"]
    assert bad.error is first_error
