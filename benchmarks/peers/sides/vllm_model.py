"""What both programs of vLLM's side need before they import vLLM: its environment, and the sizes of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["MODEL", "prepare_environment"]

# A model so small that it is nothing: only its sizes are read.
MODEL: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "word_embed_proj_dim": 64,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float32",
}


def prepare_environment() -> None:
    """Nothing is fetched, reported or logged; the child finds the engine."""
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(Path(__file__).parent),
    }
