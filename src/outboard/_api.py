"""The public names; `outboard` gives them at their first use."""

from outboard._version import __version__
from outboard.client.async_mp import AsyncMPClient
from outboard.client.base import EngineCoreClient
from outboard.client.data_parallel import DPAsyncMPClient, DPLBAsyncMPClient
from outboard.client.inproc import InprocClient
from outboard.client.sync_mp import SyncMPClient
from outboard.config import (
    EngineConfig,
    FaultConfig,
    NetworkConfig,
    ParallelConfig,
    RankOptions,
    RayPlacement,
    RestartPolicy,
    TransportConfig,
)
from outboard.engine.core import EngineCore, OutputBatch, ParallelState, Tokenizer, utility
from outboard.errors import *  # noqa: F403
from outboard.errors import __all__ as _error_names
from outboard.frontend.llm import AsyncLLM
from outboard.frontend.offline import LLM
from outboard.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from outboard.frontend.stream import RequestStream
from outboard.launch.group import EngineAddresses, EngineGroup, launch_engines
from outboard.protocol.control import EngineState, EngineStatus
from outboard.protocol.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    SchedulerStats,
)
from outboard.protocol.sampling import SamplingParams
from outboard.protocol.scaling import (
    ScaleProgress,
    ScaleState,
)

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncMPClient",
    "CompletionOutput",
    "DPAsyncMPClient",
    "DPLBAsyncMPClient",
    "EngineAddresses",
    "EngineConfig",
    "EngineCore",
    "EngineCoreClient",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineGroup",
    "EngineInfo",
    "EngineState",
    "EngineStatus",
    "FaultConfig",
    "InprocClient",
    "OutputBatch",
    "NetworkConfig",
    "ParallelConfig",
    "ParallelState",
    "RankOptions",
    "RayPlacement",
    "RequestMetrics",
    "RequestOutput",
    "RequestStream",
    "RestartPolicy",
    "SamplingParams",
    "ScaleProgress",
    "ScaleState",
    "SchedulerStats",
    "SyncMPClient",
    "Tokenizer",
    "TransportConfig",
    "__version__",
    "launch_engines",
    "utility",
    *_error_names,
]
