"""The embedded default engine: OpenVINO GenAI on a GGUF file or an OpenVINO model folder, with continuous batching."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outboard.engine.core import EngineCore, OutputBatch, utility
from outboard.engines.gguf import read_header
from outboard.engines.models import DEFAULT_MODEL, catalogue, resolve_model
from outboard.engines.openvino_sampling import generation_config
from outboard.engines.openvino_tokenizer import OpenVINOTokenizer, eos_token_ids, import_genai
from outboard.engines.signal_stack import same_signal_stack
from outboard.errors import ConfigError, InvalidRequestError, ModelFileError, PromptTooLongError
from outboard.protocol.messages import EngineCoreRequest, EngineInfo, SchedulerStats
from outboard.protocol.sampling import FinishReason, SamplingParams

__all__ = ["OpenVINOEngine"]


@dataclass(slots=True, eq=False)
class _Request:
    """One request: waiting while it has no handle, in prefill until its first token, then decoding."""

    request_id: str
    prompt: Any
    config: Any
    params: SamplingParams
    handle: Any = None
    scheduled: bool = False


class OpenVINOEngine(EngineCore):
    """Serves a language model on the CPU (or another device of OpenVINO) with paged attention.

    A step holds the GIL, 30 ms and more. Greedy output is repeatable for a request alone; in a batch near-ties may tip.

    Args:
        model: a name of `outboard models list`, a .gguf file, or an OpenVINO model folder; None: smollm2-135m, fetched
            at its first use.
        device: OpenVINO's name of the device.
        max_num_seqs: the most requests worked on at once; the rest waits.
        max_num_batched_tokens: the most tokens of one step; longer prompts take several steps.
        cache_size: size of the KV cache, GB.
        precision: INFERENCE_PRECISION_HINT, such as "f32" or "bf16"; None: the device's own choice.
        enable_prefix_caching: keep the KV cache of prompts for others that begin alike.
        num_threads: threads that a step uses; None: all cores.

    Raises:
        ConfigError: OpenVINO GenAI is not installed, or cannot load the model with these options.
        ModelFileError: the model is missing, truncated or cannot be fetched.
    """

    cpu_bound = True

    def __init__(
        self,
        model: str | None = None,
        device: str = "CPU",
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 256,
        cache_size: int = 1,
        precision: str | None = None,
        enable_prefix_caching: bool = True,
        num_threads: int | None = None,
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        for name, value in (sizes | {"cache_size": cache_size, "num_threads": num_threads}).items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        self._genai = import_genai()
        self._tensor = importlib.import_module("openvino").Tensor
        path = resolve_model(model)
        self._max_model_len = _max_model_len(path)

        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = cache_size
        scheduler.max_num_seqs = max_num_seqs
        scheduler.max_num_batched_tokens = max_num_batched_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = enable_prefix_caching
        properties: dict[str, Any] = {}
        if precision is not None:
            properties["INFERENCE_PRECISION_HINT"] = precision
        if num_threads is not None:
            properties["INFERENCE_NUM_THREADS"] = num_threads
        try:
            with same_signal_stack():
                self._pipeline = self._genai.ContinuousBatchingPipeline(str(path), scheduler, device, properties)
        except RuntimeError as error:
            raise ConfigError(f"OpenVINO cannot load {path} on {device}: {str(error).strip()}") from error
        tokenizer = self._pipeline.get_tokenizer()
        self._vocab_size = max(tokenizer.get_vocab().values()) + 1
        self._eos_token_ids = eos_token_ids(tokenizer, path)
        self._max_num_seqs = max_num_seqs
        name = DEFAULT_MODEL if model is None else model
        self._name = name if name in catalogue() else path.stem if path.is_file() else path.name

        self._waiting: dict[str, _Request] = {}
        self._prefilling: dict[str, _Request] = {}
        self._decoding: dict[str, _Request] = {}
        self._admitted = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        """Checks a request, because the library does not, and lets it wait for the next step."""
        prompt = np.array(request.prompt_token_ids, dtype=np.int64)
        if prompt.size == 0:
            raise InvalidRequestError("prompt_token_ids is empty; the prompt needs at least one token")
        if prompt.size >= self._max_model_len:
            raise PromptTooLongError(
                f"the prompt has {prompt.size} tokens; with at least one generated token, the model's "
                f"max_model_len={self._max_model_len} allows {self._max_model_len - 1}"
            )
        outside = prompt[(prompt < 0) | (prompt >= self._vocab_size)]
        if outside.size:
            raise InvalidRequestError(
                f"token id {outside[0]} is outside the vocabulary: ids are 0 to {self._vocab_size - 1}"
            )
        params = request.sampling_params
        room = self._max_model_len - prompt.size
        config = generation_config(self._genai, params, self._eos_token_ids, room)
        self._waiting[request.request_id] = _Request(request.request_id, prompt, config, params)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Cancels requests. The library frees their KV cache in the next step."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            request = self._prefilling.pop(request_id, None) or self._decoding.pop(request_id, None)
            if request is not None:
                request.handle.cancel()

    def has_work(self) -> bool:
        """Whether a request is to be worked on, or a cancelled one to be freed."""
        return bool(self._waiting) or self._pipeline.has_non_finished_requests()

    def step(self, outputs: OutputBatch) -> None:
        """One forward pass: a token for each request that decodes, and the next part of the prompts."""
        self._admit()
        self._pipeline.step()
        if self._prefilling:
            self._note_scheduled(outputs)
        request_ids: list[str] = []
        token_ids: list[int] = []
        for request in [*self._decoding.values(), *self._prefilling.values()]:
            generated = _read(request.handle)
            if not generated:
                self._check_status(request, outputs)
                continue
            if request.request_id in self._prefilling:
                self._first_token(request, outputs)
            if len(generated) == 1 and len(generated[0].generated_ids) == 1 and request.params.logprobs is None:
                output = generated[0]
                if output.finish_reason == self._genai.GenerationFinishReason.NONE:
                    request_ids.append(request.request_id)
                    token_ids.append(output.generated_ids[0])
                    continue
            self._add(request, generated, outputs)
        if request_ids:
            outputs.extend(request_ids, token_ids)

    def info(self) -> EngineInfo:
        """Length, vocabulary and name of the model."""
        return EngineInfo(
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            max_num_seqs=self._max_num_seqs,
            model=self._name,
        )

    def scheduler_stats(self) -> SchedulerStats:
        """Requests that wait and run, and the share of the KV cache that the last step used."""
        started = sum(request.scheduled for request in self._prefilling.values())
        running = len(self._decoding) + started
        return SchedulerStats(
            waiting=len(self._waiting) + len(self._prefilling) - started,
            running=running,
            kv_cache_usage=self._pipeline.get_metrics().cache_usage / 100 if running else 0.0,
        )

    @utility
    def get_metrics(self) -> dict[str, int | float]:
        """The library's own figures of the last step: usages are percentages of the KV cache."""
        metrics = self._pipeline.get_metrics()
        names = ("requests", "scheduled_requests", "cache_usage", "max_cache_usage", "avg_cache_usage")
        return {name: getattr(metrics, name) for name in (*names, "cache_size_in_bytes")}

    def shutdown(self) -> None:
        """Cancels all requests, frees their memory by a last step, and releases the pipeline."""
        self.abort_requests([*self._waiting, *self._prefilling, *self._decoding])
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._pipeline = None

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> OpenVINOTokenizer:
        """The model's tokenizer; takes some 2 s and loads no weights."""
        return OpenVINOTokenizer(resolve_model(options.get("model")))

    def _admit(self) -> None:
        """Hands waiting requests to the library, which knows no limit to how many run at once."""
        free = self._max_num_seqs - len(self._prefilling) - len(self._decoding)
        for request_id in list(self._waiting)[: max(0, free)]:
            request = self._waiting.pop(request_id)
            request.handle = self._pipeline.add_request(
                self._admitted, self._tensor(request.prompt[None]), request.config
            )
            self._admitted += 1
            self._prefilling[request_id] = request

    def _note_scheduled(self, outputs: OutputBatch) -> None:
        """Tells which prompts are being worked on.

        The library says only how many requests were in the last step: all that decode, then prompts in order.
        """
        started = self._pipeline.get_metrics().scheduled_requests - len(self._decoding)
        for request in list(self._prefilling.values())[: max(0, started)]:
            if not request.scheduled:
                request.scheduled = True
                outputs.scheduled(request.request_id)

    def _first_token(self, request: _Request, outputs: OutputBatch) -> None:
        if not request.scheduled:
            outputs.scheduled(request.request_id)
        self._decoding[request.request_id] = self._prefilling.pop(request.request_id)

    def _add(self, request: _Request, generated: list[Any], outputs: OutputBatch) -> None:
        token_ids = [token for output in generated for token in output.generated_ids]
        logprobs = None
        if request.params.logprobs is not None:
            values = [value for output in generated for value in output.generated_log_probs]
            logprobs = [{token: value} for token, value in zip(token_ids, values, strict=True)]
        reason, stop_reason = self._finish(request, token_ids, generated[-1].finish_reason)
        if reason is not None:
            del self._decoding[request.request_id]
        outputs.add(request.request_id, token_ids, reason, stop_reason, logprobs)

    def _finish(self, request: _Request, token_ids: list[int], reason: Any) -> tuple[FinishReason | None, int | None]:
        reasons = self._genai.GenerationFinishReason
        if reason == reasons.NONE:
            return None, None
        last = token_ids[-1] if token_ids else None
        if last in self._eos_token_ids and not request.params.ignore_eos:
            return "stop", None
        if last in (request.params.stop_token_ids or ()):
            return "stop", last
        return ("length" if reason == reasons.LENGTH else "stop"), None

    def _check_status(self, request: _Request, outputs: OutputBatch) -> None:
        """Ends a request that the library dropped; one without a token is else in prefill, or was preempted."""
        status = request.handle.get_status()
        if status == self._genai.GenerationStatus.RUNNING:
            return
        self._prefilling.pop(request.request_id, None)
        self._decoding.pop(request.request_id, None)
        error = f"OpenVINO ended the request with status {status.name}"
        if status == self._genai.GenerationStatus.IGNORED:
            error = "the KV cache is full; raise the engine's cache_size, or lower max_num_seqs or max_tokens"
        outputs.add(request.request_id, finish_reason="error", error=error)


def _read(handle: Any) -> list[Any]:
    generated: list[Any] = []
    while handle.can_read():  # read() of a handle that cannot would wait for ever
        generated += handle.read().values()
    return generated


def _max_model_len(path: Path) -> int:
    """The most tokens of prompt and completion together, as the model's file says."""
    if path.is_file():
        metadata = read_header(path).metadata
        key = f"{metadata.get('general.architecture')}.context_length"
        length = metadata.get(key)
    else:
        config = path / "config.json"
        key = f"max_position_embeddings in {config.name}"
        length = json.loads(config.read_text("utf-8")).get("max_position_embeddings") if config.is_file() else None
    if not isinstance(length, int) or length < 2:
        raise ModelFileError(f"{path} does not say how many tokens the model takes: {key} is {length!r}")
    return length
