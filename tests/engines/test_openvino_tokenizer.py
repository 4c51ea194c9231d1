"""The tokenizer of the OpenVINO engine, on the small model and on a library that decodes otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outboard.engines import openvino_tokenizer as tokenizer_module
from outboard.engines.models import pull
from outboard.engines.openvino import OpenVINOEngine
from outboard.engines.openvino_tokenizer import OpenVINOTokenizer
from outboard.errors import PromptTooLongError

pytestmark = [pytest.mark.openvino, pytest.mark.xdist_group("openvino")]


@pytest.fixture(scope="module")
def tokenizer() -> OpenVINOTokenizer:
    return OpenVINOEngine.tokenizer({"model": str(pull("smollm2-135m"))})


def test_encode_and_decode(tokenizer: OpenVINOTokenizer) -> None:
    ids = tokenizer.encode("The capital of France is")
    assert ids == [504, 3575, 282, 4649, 314]
    assert all(type(token) is int for token in ids)
    assert tokenizer.decode([ids, [], [3575], ids[1:3]]) == [
        "The capital of France is",
        "",
        " capital",
        " capital of",
    ]
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == []
    assert tokenizer.decode([[504, 2, 10**6, -1]]) == ["The"]
    assert tokenizer.decode([[1, 504, 2]], skip_special_tokens=False) == ["<|im_start|>The<|im_end|>"]
    assert tokenizer.encode("\ud800")  # a lone surrogate, as JSON can carry
    assert tokenizer.max_token_chars == 81
    assert list(tokenizer.eos_token_ids) == [2]


def test_an_emoji_comes_token_by_token(tokenizer: OpenVINOTokenizer) -> None:
    text = "hi 🦆🤖 x"
    ids = tokenizer.encode(text)
    assert len(ids) == 8
    shown = tokenizer.decode([ids[: count + 1] for count in range(len(ids))])
    assert shown == ["hi", "hi �", "hi �", "hi 🦆", "hi 🦆�", "hi 🦆�", "hi 🦆🤖", text]


def test_a_prompt_that_the_library_would_cut(tokenizer: OpenVINOTokenizer) -> None:
    assert tokenizer.max_tokens == 8192
    assert len(tokenizer.encode("a b" * 4000)) < 8192
    with pytest.raises(PromptTooLongError, match="8192 tokens or more"):
        tokenizer.encode("a b " * 5000)


def test_the_chat_template(tokenizer: OpenVINOTokenizer) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt)
    assert ids.count(1) == 3 and ids[:2] != [1, 1]
    assert tokenizer.decode([ids], skip_special_tokens=False) == [prompt]


class FakeTokenizer:
    """A library tokenizer of SentencePiece's kind, whose model wants a begin-of-sequence token."""

    pieces = ("<s>", "</s>", "\u2581hello", "\u2581world")

    def __init__(self, path: str) -> None:
        self.calls: list[tuple[str, bool]] = []

    def get_vocab(self) -> dict[bytes, int]:
        return {piece.encode(): token for token, piece in enumerate(self.pieces)}

    def get_bos_token(self) -> str:
        return "<s>"

    def get_eos_token_id(self) -> int:
        return 1

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        self.calls.append((text[:20], add_special_tokens))
        ids = [0] * add_special_tokens + [2] * len(text.split())

        class Inputs:
            class input_ids:
                data = np.array([ids])

        return Inputs

    def decode(self, sequences: list[list[int]], skip_special_tokens: bool) -> list[str]:
        pieces = [["" if token < 2 and skip_special_tokens else self.pieces[token] for token in s] for s in sequences]
        return ["".join(words).replace("\u2581", " ").removeprefix(" ") for words in pieces]


def test_a_tokenizer_whose_bytes_are_not_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = type("genai", (), {"Tokenizer": FakeTokenizer})
    monkeypatch.setattr(tokenizer_module, "import_genai", lambda: fake)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    tokenizer = OpenVINOTokenizer(tmp_path)
    assert tokenizer.decode([[0, 2, 3], [3]]) == ["hello world", "world"]
    assert tokenizer.decode([]) == []
    assert tokenizer.encode("hello hello") == [0, 2, 2]
    assert tokenizer.encode("<s> hello") == [2, 2]  # no second <s>
    assert list(tokenizer.eos_token_ids) == [1, 3]
    assert tokenizer.max_tokens is None
