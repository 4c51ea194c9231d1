"""From `SamplingParams` to OpenVINO GenAI's `GenerationConfig`."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from outboard.errors import InvalidRequestError
from outboard.protocol.sampling import SamplingParams

__all__ = ["generation_config"]

_SEEDS = 1 << 32  # the library keeps 32 bits of a seed
_LARGEST_MIN_P = 1 - 2**-24  # it wants less than 1, as a 32-bit float


def generation_config(genai: Any, params: SamplingParams, eos_token_ids: Iterable[int], room: int) -> Any:
    """How the library is to continue a prompt. `n` and stop strings are the front end's business.

    Args:
        genai: the library.
        params: what the user asked for.
        eos_token_ids: tokens that end a completion unless `ignore_eos` is set.
        room: tokens that still fit behind the prompt.

    Raises:
        InvalidRequestError: the library cannot do this; the message names the parameter.
    """
    greedy = params.temperature == 0
    if params.logprobs is not None and params.logprobs > (1 if greedy else 0):
        raise InvalidRequestError(
            f"logprobs={params.logprobs}: this engine has the log probability of the chosen token alone; "
            "use logprobs=0, or 1 with temperature=0"
        )
    config = genai.GenerationConfig()
    try:
        config.max_new_tokens = min(params.max_tokens or room, room)
        config.min_new_tokens = min(params.min_tokens, config.max_new_tokens)
        config.logprobs = 0 if params.logprobs is None else 1
        _set_stop_tokens(config, params, eos_token_ids)
        config.repetition_penalty = params.repetition_penalty
        config.presence_penalty = params.presence_penalty
        config.frequency_penalty = params.frequency_penalty
        if not greedy:
            config.do_sample = True
            config.temperature = params.temperature
            config.top_p = params.top_p
            config.min_p = min(params.min_p, _LARGEST_MIN_P)
            if params.top_k > 0:
                config.top_k = params.top_k
            config.rng_seed = secrets.randbelow(_SEEDS) if params.seed is None else params.seed % _SEEDS
        config.validate()
    except (RuntimeError, TypeError, OverflowError) as error:
        raise InvalidRequestError(
            f"OpenVINO cannot take these sampling parameters: {str(error).strip().splitlines()[-1]}"
        ) from error
    return config


def _set_stop_tokens(config: Any, params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
    stops = set(params.stop_token_ids or ())
    if params.ignore_eos:
        # The library's own ignore_eos ignores stop_token_ids too, and unless eos_token_id is set it adds the model's.
        config.ignore_eos = not stops
    else:
        stops |= set(eos_token_ids)
    if stops:
        config.stop_token_ids = stops
        config.eos_token_id = min(stops)
