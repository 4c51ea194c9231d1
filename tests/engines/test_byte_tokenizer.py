from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outboard.engines.byte_tokenizer import ByteTokenizer

tokenizer = ByteTokenizer()


@given(st.lists(st.text()))
def test_round_trip(texts: list[str]) -> None:
    sequences = [tokenizer.encode(text) for text in texts]
    assert tokenizer.decode(sequences) == texts
    assert all(0 <= token < tokenizer.vocab_size for sequence in sequences for token in sequence)


@given(st.lists(st.lists(st.integers(0, 255))))
def test_any_bytes_decode_as_python_replaces_them(sequences: list[list[int]]) -> None:
    assert tokenizer.decode(sequences) == [bytes(sequence).decode("utf-8", "replace") for sequence in sequences]


def test_an_id_that_is_no_byte_shows_as_one_replacement_character() -> None:
    snowman = tokenizer.encode("☃")
    sequences = [[97, 256, 98], [-1], [2**31], snowman[:2] + [999] + snowman[2:], snowman]
    assert tokenizer.decode(sequences) == ["a\ufffdb", "\ufffd", "\ufffd", "\ufffd\ufffd\ufffd", "☃"]


def test_a_lone_surrogate_is_encoded_as_a_question_mark() -> None:
    assert tokenizer.encode("a\ud800") == [97, 63]


def test_a_token_is_at_most_one_character_and_none_ends_a_completion() -> None:
    assert tokenizer.vocab_size == 256
    assert tokenizer.max_token_chars == 1
    assert tuple(tokenizer.eos_token_ids) == ()


def test_skipping_special_tokens_changes_nothing() -> None:
    sequences = [[0, 65, 255]]
    assert tokenizer.decode(sequences, False) == tokenizer.decode(sequences, True) == ["\0A\ufffd"]


def test_chat_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages) == "system: Be brief.\nuser: Hi\nassistant:"
