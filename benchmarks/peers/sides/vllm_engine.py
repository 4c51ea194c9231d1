"""An engine for vLLM's own engine-core process that costs next to nothing: one token a step for each request.

Runs in vLLM's environment, in the front end and in its child. Importing it replaces three methods of `EngineCore`: the
constructor, which would load a model, `step`, and `shutdown`. All that is measured stays vLLM's: the processes, the
handshake, the sockets, the codec, the busy loop and its threads.
"""

from __future__ import annotations

import os
import queue
import time
from typing import Any

import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason, core
from vllm.v1.metrics.stats import SchedulerStats

__all__ = ["IdleExecutor"]


class IdleExecutor:
    """Takes the executor's place. The child imports this module to unpickle it, and so is changed, too."""

    uses_ray = False
    supports_pp = False

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.is_sleeping = False

    def register_failure_callback(self, callback: Any) -> None:
        pass

    def shutdown(self) -> None:
        pass


class _Requests:
    """What the busy loop asks of a scheduler. Work begins once `gate` requests are there."""

    connector = ec_connector = None

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.client = 0
        self.added = 0
        self.gate = 0
        self.open = True

    def has_requests(self) -> bool:
        self.open = bool(self.left) and (self.open or len(self.left) >= self.gate)
        return self.open

    has_unfinished_requests = has_requests

    def get_num_unfinished_requests(self) -> int:
        return len(self.left)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.left), 0

    def add_request(self, request: Any) -> None:
        self.added += 1
        self.client = request.client_index
        self.left[request.request_id] = request.max_tokens

    def finish_requests(self, request_ids: Any, status: Any) -> list[Any]:
        for request_id in list(self.left) if request_ids is None else request_ids:
            self.left.pop(request_id, None)
        return []

    def get_kv_connector(self) -> None:
        return None

    get_ec_connector = get_kv_event_publisher_config = get_kv_connector

    def shutdown(self) -> None:
        pass


class _NoGrammars:
    def clear_backend(self) -> None:
        pass

    def grammar_init(self, request: Any) -> None:
        pass


def _init(self: Any, vllm_config: Any, executor_class: Any, log_stats: bool, *args: Any, **kwargs: Any) -> None:
    self.vllm_config = vllm_config
    self.log_stats = log_stats
    self._weight_version = "default"
    self.model_executor = executor_class(vllm_config)
    self.structured_output_manager = _NoGrammars()
    self.scheduler = _Requests()
    self.mm_receiver_cache = self.batch_queue = self.request_block_hasher = None
    self.batch_queue_size = 1
    self.check_for_draft_tokens = self.async_scheduling = self.is_pooling_model = False
    self.step_fn = self.step
    self.aborts_queue = queue.Queue()
    self._idle_state_callbacks = []
    cache = vllm_config.cache_config
    cache.num_gpu_blocks = 1024
    cache.block_size = cache.block_size or 16
    self.pace, self.deadline = float(os.environ.get("BENCH_STEP_MS", "0")) / 1000, 0.0
    self.steps = 0
    self.step_cpu = 0.0
    self.tensor = None
    core.freeze_gc_heap()
    core.enable_envs_cache()


def _step(self: Any) -> tuple[dict[int, Any], bool]:
    requests = self.scheduler
    if not requests.has_requests():
        return {}, False
    if self.pace:
        now = time.monotonic()
        self.deadline = max(self.deadline + self.pace, now - 4 * self.pace)
        time.sleep(max(0.0, self.deadline - now))
    self._process_aborts_queue()
    began = time.thread_time()
    token = [97 + self.steps % 26]
    outputs = []
    for request_id, left in list(requests.left.items()):
        reason = None
        if left == 1:
            del requests.left[request_id]
            reason = FinishReason.LENGTH
        else:
            requests.left[request_id] = left - 1
        outputs.append(
            EngineCoreOutput(
                request_id=request_id,
                new_token_ids=token,
                finish_reason=reason,
                pooling_output=self.tensor if reason is not None else None,
            )
        )
    if not requests.left:
        requests.open = not requests.gate
    self.steps += 1
    stats = SchedulerStats(num_running_reqs=len(outputs)) if self.log_stats else None
    message = {requests.client: EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)}
    self.step_cpu += time.thread_time() - began
    self._attach_weight_version(message)
    return message, True


def bench_nothing(self: Any) -> int:
    """A utility call that does nothing."""
    return 1


def bench_set(self: Any, gate: int, pace: float, tensor_bytes: int) -> int:
    """Work begins with so many requests, at a step every `pace` seconds; ends come with a tensor of so many bytes."""
    self.scheduler.gate = gate
    self.scheduler.open = not gate
    self.pace, self.deadline = pace, time.monotonic()
    self.tensor = torch.zeros(tensor_bytes // 4, dtype=torch.float32) if tensor_bytes else None
    return 1


def bench_state(self: Any) -> dict[str, Any]:
    """CPU seconds of the process, those of `step`, requests so far and now."""
    return {
        "pid": os.getpid(),
        "cpu": time.process_time(),
        "step_cpu": self.step_cpu,
        "added": self.scheduler.added,
        "running": len(self.scheduler.left),
    }


core.EngineCore.__init__ = _init
core.EngineCore.step = _step
core.EngineCore.shutdown = lambda self: None
core.EngineCore.get_supported_tasks = lambda self: ("generate",)
core.EngineCore.reset_mm_cache = lambda self: None
for _function in (bench_nothing, bench_set, bench_state):
    setattr(core.EngineCore, _function.__name__, _function)
