"""The command line: what it prints where, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outboard import __version__
from outboard.cli.app import app

pytestmark = pytest.mark.usefixtures("nothing_left")

OUTBOARD = str(Path(sys.executable).with_name("outboard"))
COUNT_ENGINE = str(Path(__file__).parents[2] / "examples" / "count_engine.py")


def outboard(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def test_version() -> None:
    result = outboard("--version")
    assert (result.exit_code, result.stdout) == (0, f"outboard {__version__}\n")


def test_generate_streams_text_to_stdout_and_a_summary_to_stderr() -> None:
    result = subprocess.run(
        [OUTBOARD, "generate", "a b ç", "--engine", "echo"], capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout == "a b ç\n"
    for part in ("6 tokens", "tokens/s", "first after", "engine pid"):
        assert part in result.stderr


def test_generate_json_prints_one_object() -> None:
    result = outboard("generate", "a b c", "--engine", "echo", "--json", "--max-tokens", "3")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["prompt"] == "a b c"
    assert document["text"] == "a b"
    assert document["token_ids"] == [97, 32, 98]
    assert document["finish_reason"] == "length"
    assert (document["prompt_tokens"], document["completion_tokens"]) == (5, 3)
    assert len(document["engine_pids"]) == 1


def test_generate_chat_applies_the_template() -> None:
    result = outboard("generate", "hi", "--engine", "echo", "--chat", "--json")
    assert "user" in json.loads(result.stdout)["text"]


def test_generate_with_an_engine_of_a_file_and_options() -> None:
    result = outboard("generate", "go", "--engine", f"{COUNT_ENGINE}:CountEngine", "--option", "start=3")
    assert (result.exit_code, result.stdout) == (0, "3210\n")


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        (["x", "--engine", "ecko"], 2, "openvino, echo, mock"),
        (["x", "--engine", "echo", "--option", "nope=1"], 2, "max_num_seqs: int"),
        (["x", "--engine", "echo", "--option", "max_num_seqs=many"], 2, "'many'"),
        (["x", "--engine", "echo", "--option", "max_num_seqs"], 2, "key=value"),
        (["x", "--engine", "echo", "--option", "max_num_seqs={"], 2, "no JSON"),
        (["x", "--engine", "echo", "--max-tokens", "0"], 2, "max_tokens"),
        (["", "--engine", "echo"], 2, "empty"),
        (["x", "--engine", "echo", "--temperature", "hot"], 2, "--temperature"),
        ([], 2, "Missing argument"),
        (["x", "--engine", "/no/such/file.py:X"], 2, "/no/such/file.py"),
        (["x", "--engine", "faulty:DyingEngine", "--option", "step=2"], 1, "RuntimeError: boom"),
        (["x", "--engine", "faulty:DyingEngine", "--option", "when=init", "--option", "how=_exit"], 1, "exit code 7"),
        (["x", "--engine", "faulty:CallableEngine"], 2, "no tokenizer"),
        (["x", "--engine", "openvino", "--option", "model=/no/such/model.gguf"], 1, "/no/such/model.gguf"),
    ],
)
def test_errors_and_their_exit_status(args: list[str], status: int, text: str) -> None:
    result = outboard("generate", *args)
    assert result.exit_code == status, result.output
    assert text in result.stderr
    assert result.stdout.strip() in ("", "a")  # what came before the engine died


def test_engines_lists_names_and_options() -> None:
    result = outboard("engines")
    assert result.exit_code == 0
    for part in ("openvino", "echo", "mock", "max_num_seqs: int = 256", "model: str | None = None"):
        assert part in result.stdout
    assert "start: int = 9" in outboard("engines", f"{COUNT_ENGINE}:CountEngine").stdout
    assert outboard("engines", "ecko").exit_code == 2
