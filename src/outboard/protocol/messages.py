"""The messages between a client and its engine cores, as msgspec structs.

Input frames:   identity, one type byte (`EngineCoreRequestType`), msgpack body, auxiliary buffers.
Output frames:  msgpack body (`EngineCoreOutputs` or `EngineCoreDead`), auxiliary buffers.
Handshake:      one msgpack body each way (`Hello`, `Init`, `Ready`, `Failed`, `Refused`).

Every struct is an array on the wire (`array_like`): field names are not sent, so fields are only ever appended, and a
change of meaning raises `PROTOCOL_VERSION`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec

from outboard.protocol.sampling import FinishReason, SamplingParams

__all__ = [
    "EEP_NOTIFICATION_CALL_ID",
    "PROTOCOL_VERSION",
    "RECONFIGURE_FINISHED",
    "SHUTDOWN_COMPLETE",
    "AbortRequests",
    "AddRequest",
    "EngineCoreDead",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineCoreRequestType",
    "EngineInfo",
    "ErrorReport",
    "Failed",
    "Hello",
    "Init",
    "LeaveRank",
    "OutputExtras",
    "Ready",
    "Refused",
    "SchedulerStats",
    "UtilityCall",
    "UtilityOutput",
]

PROTOCOL_VERSION = 2

# Utility outputs with this call id are notifications of elastic scaling; ids of calls count from 0.
EEP_NOTIFICATION_CALL_ID = -1
RECONFIGURE_FINISHED = "RECONFIGURE_FINISHED"
SHUTDOWN_COMPLETE = "SHUTDOWN_COMPLETE"


class EngineCoreRequestType(Enum):
    """The type byte of an input message."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    LEAVE = b"\x04"


# --- what an engine core and its user handle -------------------------------------------------------------------------


class EngineCoreRequest(msgspec.Struct, kw_only=True):
    """One request, as a user of a client builds it and as an engine core receives it.

    Attributes:
        request_id: the user's name for it; in the engine core a unique one that the client made.
        prompt_token_ids: the prompt's tokens; in the engine core an `array.array("i")` (int32; a buffer that numpy
            wraps without a copy, and that iterates as plain ints).
        sampling_params: how to continue; an engine that is not a language model may ignore it.
        inputs: input of an engine that is not a language model: any msgpack value, numpy arrays and torch tensors
            included.
        external_req_id: in the engine core, the user's `request_id`; for logs.
        client_index: index of the front end that sent it; stamped by the client.
        arrival_time: `time.time()` at which the front end got it; 0 lets the client stamp it.
        data_parallel_rank: the rank that is to serve it; None: whichever the client chooses.
        num_output_tokens: how many tokens at the end of the prompt are this request's own output: it is resumed after
            an engine core died, and the engine goes on where they end. `max_tokens` and `min_tokens` count what is
            still to come.
    """

    request_id: str
    prompt_token_ids: Sequence[int] = ()
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    inputs: Any = None
    external_req_id: str = ""
    client_index: int = 0
    arrival_time: float = 0.0
    num_output_tokens: int = 0
    data_parallel_rank: int | None = None


class EngineInfo(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What an engine core reports of itself when it is ready.

    Attributes:
        max_model_len: most tokens of prompt and completion together; None: no limit.
        vocab_size: token ids are 0 to `vocab_size - 1`; None: not checked.
        max_num_seqs: requests that it runs at once; None: not said.
        model: a name for logs and for `/v1/models`.
        extra: whatever else; msgpack values.
        structured_outputs: whether it follows `SamplingParams.structured_outputs`.
        exact_resume: whether a request that is resumed (`EngineCoreRequest.num_output_tokens`) goes on exactly as it
            would have.
    """

    max_model_len: int | None = None
    vocab_size: int | None = None
    max_num_seqs: int | None = None
    model: str = ""
    extra: dict[str, Any] = {}
    exact_resume: bool = False
    structured_outputs: bool = False


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """Load of one engine core.

    Attributes:
        waiting: requests not yet scheduled.
        running: requests being worked on.
        kv_cache_usage: share of the KV cache in use, 0 to 1.
    """

    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0


# --- client to engine core -------------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, array_like=True):
    """Body of ADD. `prompt` packs the token ids as int32: 1 us to decode 1000, a list takes 23."""

    epoch: int
    handle: int
    external_req_id: str
    prompt: bytes
    sampling_params: SamplingParams
    inputs: Any = None
    client_index: int = 0
    arrival_time: float = 0.0
    num_output_tokens: int = 0

    def to_request(self) -> EngineCoreRequest:
        """The request as the engine core sees it."""
        tokens = array("i")
        tokens.frombytes(self.prompt)
        return EngineCoreRequest(
            request_id=f"{self.epoch:016x}-{self.handle}",
            prompt_token_ids=tokens,
            sampling_params=self.sampling_params,
            inputs=self.inputs,
            external_req_id=self.external_req_id,
            client_index=self.client_index,
            arrival_time=self.arrival_time,
            num_output_tokens=self.num_output_tokens,
        )


class AbortRequests(msgspec.Struct, array_like=True):
    """Body of ABORT. Unknown handles are no error."""

    epoch: int
    handles: list[int]


class LeaveRank(msgspec.Struct, array_like=True):
    """Body of LEAVE: this front end sends no more requests and calls to this rank, which is to be removed."""

    epoch: int


class UtilityCall(msgspec.Struct, array_like=True):
    """Body of UTILITY: call the `@utility` method of this name."""

    epoch: int
    call_id: int
    method: str
    args: list[Any]
    kwargs: dict[str, Any]


# --- engine core to client -------------------------------------------------------------------------------------------


class ErrorReport(msgspec.Struct, array_like=True, frozen=True):
    """An exception on its way between processes: its type as `module.Class`, its text and its formatted traceback."""

    type: str
    message: str
    traceback: str


class UtilityOutput(msgspec.Struct, array_like=True):
    """Answer to one utility call: a result, or the exception that it ended with."""

    call_id: int
    result: Any = None
    error: ErrorReport | None = None


class OutputExtras(msgspec.Struct, array_like=True):
    """Rare, rich fields of some of a message's requests, by position in `EngineCoreOutputs.handles`.

    Attributes:
        logprobs: one entry a token of that request: token id -> log probability.
        results: what an engine that is not a language model produced.
        errors: why a request ended with "error".
        queue_times: seconds between its arrival in the engine core and its leaving the waiting queue.
        num_cached_tokens: prompt tokens that the prefix cache served.
        resumed: made by the client: another incarnation goes on with that request, behind so many tokens.
    """

    logprobs: dict[int, list[dict[int, float]]] = {}
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    queue_times: dict[int, float] = {}
    num_cached_tokens: dict[int, int] = {}
    resumed: dict[int, int] = {}


class EngineCoreOutput(msgspec.Struct, gc=False):
    """What one message says of one request; made on demand by `EngineCoreOutputs.outputs`."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    new_logprobs: list[dict[int, float]] | None = None
    result: Any = None
    error: str | None = None
    queue_time: float | None = None
    num_cached_tokens: int = 0


class EngineCoreOutputs(msgspec.Struct, array_like=True, tag=0, gc=False):
    """All that one engine core has to say to one client since its last message, as columns.

    Attributes:
        engine_index: rank of the sender.
        epoch: of this pair of engine incarnation and client; a message with another one is dropped.
        sequence: 0, 1, 2, ... in an epoch; a gap means that a message was lost.
        timestamp: `time.monotonic()` of the sender, seconds.
        handles: the requests, by the handles that the client gave them; one may occur several times.
        tokens: their new tokens, one after the other.
        counts: how many tokens each has; None: one each.
        finished: (position in `handles`, finish reason, stop reason) of those that ended.
        extras: rare fields by position.
        scheduler_stats: load of the engine core, where it changed.
        utility_output: answer to a utility call.
        wave_complete, start_wave: number of a data-parallel wave that ended, or is to start.
        request_ids: never sent; the user's id at each position, filled in by the client.

    One that a client gives out may share `handles` and `request_ids` with the next: do not change them.
    """

    engine_index: int
    epoch: int
    sequence: int
    timestamp: float
    handles: list[int] = []
    tokens: list[int] = []
    counts: list[int] | None = None
    finished: list[tuple[int, FinishReason, int | str | None]] | None = None
    extras: OutputExtras | None = None
    scheduler_stats: SchedulerStats | None = None
    utility_output: UtilityOutput | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    request_ids: list[str | None] | None = None

    @property
    def outputs(self) -> list[EngineCoreOutput]:
        """The columns as one object a request, in order. Requests that the client no longer knows are left out."""
        ids = self.request_ids or []
        if self.counts is None and self.finished is None and self.extras is None:  # most messages
            rows = zip(self.handles, ids, self.tokens, strict=True)
            return [EngineCoreOutput(request_id, [token]) for _, request_id, token in rows if request_id is not None]
        counts = self.counts or [1] * len(self.handles)
        finished = {position: (reason, stop) for position, reason, stop in self.finished or ()}
        extras = self.extras or _NO_EXTRAS
        result = []
        start = 0
        for position, (request_id, count) in enumerate(zip(ids, counts, strict=True)):
            tokens = self.tokens[start : start + count]
            start += count
            if request_id is None:
                continue
            reason, stop = finished.get(position, (None, None))
            result.append(
                EngineCoreOutput(
                    request_id,
                    tokens,
                    reason,
                    stop,
                    extras.logprobs.get(position),
                    extras.results.get(position),
                    extras.errors.get(position),
                    extras.queue_times.get(position),
                    extras.num_cached_tokens.get(position, 0),
                )
            )
        return result


class EngineCoreDead(msgspec.Struct, array_like=True, tag=1):
    """ENGINE_CORE_DEAD: the last message of an engine core that fails, with the exception that ends it."""

    engine_index: int
    epoch: int
    report: ErrorReport


_NO_EXTRAS = OutputExtras()


# --- handshake -------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First message of an engine-core process. `pgid` is the process group to kill if its warden is gone."""

    protocol_version: int
    outboard_version: str
    session_token: str
    rank: int
    incarnation: int
    pid: int
    pgid: int


class Init(msgspec.Struct, array_like=True, tag="init"):
    """Answer to `Hello`: what to run. Whom to serve comes after READY, by `AttachClient` (control.py).

    `sys_path` is the launcher's module search path; empty where the process has one of its own, as on another host.
    `cpus` are those that the process may use; with none, and several ranks, an engine that computes on CPUs gets its
    share of all.

    The last are for ranks that step together: `group` is the incarnation of the group, `first_coordinator` that of the
    coordinator when it was launched, `step_sync_address` where rank 0 binds for reductions, `rendezvous` a path that
    the engine may make use of; `dp_sync_interval` and `dp_sync_timeout` are as in `ParallelConfig`. `elastic`: there
    may come to be several, though there is one now. `joining`: the others run already; `Reconfigure` tells the rest.
    """

    engine: str
    options: dict[str, Any]
    sys_path: list[str]
    rank: int
    incarnation: int
    high_water_mark: int
    max_message_bytes: int
    inline_bytes: int
    shared_memory_bytes: int = 0
    data_parallel_size: int = 1
    cpus: list[int] = []
    group: int = 0
    first_coordinator: int = 0
    step_sync_address: str = ""
    rendezvous: str = ""
    dp_sync_interval: int = 32
    dp_sync_timeout: float = 30.0
    elastic: bool = False
    joining: bool = False
    across_hosts: bool = False


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine is constructed.

    `typed_utilities` are those whose results need converting by the method's annotation. `progress_fd` is the
    descriptor of its progress page (progress.py), `stack_fd` that of a file to which faulthandler dumps its stacks on
    signal `stack_signal`. `lockstep` is the engine's; `can_reinitialize`: it has a `reinitialize` of its own.
    """

    session_token: str
    info: EngineInfo
    typed_utilities: list[str] = []
    progress_fd: int = -1
    stack_fd: int = -1
    stack_signal: int = 0
    lockstep: bool = False
    can_reinitialize: bool = False


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The engine could not be constructed."""

    session_token: str
    report: ErrorReport


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """Answer to a peer that does not belong here; `reason` names the difference."""

    reason: str
