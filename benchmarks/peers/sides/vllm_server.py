"""vLLM's own OpenAI server over `vllm_engine`: runs in vLLM's environment, and imports nothing of Outboard.

Its command line, its application, its front end and its child are as `vllm.entrypoints` starts them. Only the engine is
another. It has a tokenizer of 256 tokens, one for each byte, as `mock` has: each token is a character for both.

    python vllm_server.py PORT STEP_MS
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from vllm_model import MODEL, prepare_environment  # noqa: E402 - of the directory that was just named


def make_model(directory: Path) -> None:
    """Writes all that is read of a model: its sizes and a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: ord(letter) for letter in letters if "!" <= letter <= "~"}  # the others have any that are left
    left = iter(sorted(set(range(256)) - set(ids.values())))
    ids |= {letter: next(left) for letter in letters if letter not in ids}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    model = {**MODEL, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}
    (directory / "config.json").write_text(json.dumps(model))


def main() -> None:
    port, step_ms = sys.argv[1:]
    prepare_environment()
    os.environ["BENCH_STEP_MS"] = step_ms  # for the child
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine import async_llm
    from vllm_engine import IdleExecutor

    async_llm.Executor = SimpleNamespace(get_class=lambda config: IdleExecutor)
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        sys.argv = ["vllm", "--model", directory, "--served-model-name", "mock", "--host", "127.0.0.1", "--port", port]
        sys.argv += ["--load-format", "dummy", "--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"]
        sys.argv += ["--max-num-seqs", "1024", "--disable-uvicorn-access-log"]  # Outboard writes none either
        entry.main()


if __name__ == "__main__":
    main()
