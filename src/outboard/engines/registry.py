"""The engines that come along, by name."""

from __future__ import annotations

from typing import Any

from outboard.engine.loader import engine_reference
from outboard.errors import EngineNotFoundError

__all__ = ["ENGINES", "resolve_engine"]

ENGINES = {
    "openvino": "outboard.engines.openvino:OpenVINOEngine",
    "echo": "outboard.engines.echo:EchoEngine",
    "mock": "outboard.engines.mock:MockEngine",
    "lockstep_mock": "outboard.engines.lockstep_mock:LockstepMockEngine",
}


def resolve_engine(engine: str | type[Any]) -> str:
    """The reference ("module:Class" or "path.py:Class") of a name, a reference or a class.

    Raises:
        EngineNotFoundError: no engine of this name; the message names those there are.
    """
    if isinstance(engine, type):
        return engine_reference(engine)
    if not isinstance(engine, str):
        raise EngineNotFoundError(f"an engine is a name, module:Class, path.py:Class or a class, not {engine!r}")
    if engine in ENGINES:
        return ENGINES[engine]
    target, colon, name = engine.rpartition(":")
    if colon and target and name:
        return engine
    raise EngineNotFoundError(
        f"no engine {engine!r}; there are {', '.join(ENGINES)}, or give module:Class or path.py:Class"
    )
