"""What `import outboard` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import outboard
from outboard import errors

NAMES = {
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
}


def test_the_exported_names() -> None:
    assert set(outboard.__all__) == NAMES | set(errors.__all__)
    assert all(hasattr(outboard, name) for name in outboard.__all__)


def test_every_error_is_in_the_tree() -> None:
    tree = errors.__doc__ or ""
    for name in errors.__all__:
        assert name in tree
        assert issubclass(getattr(errors, name), errors.OutboardError)


def test_importing_outboard_imports_no_heavy_library() -> None:
    heavy = "{'torch', 'numpy', 'openvino', 'openvino_genai', 'uvloop', 'typer', 'rich'}"
    code = f"import sys, outboard; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.strip() == "[]"
