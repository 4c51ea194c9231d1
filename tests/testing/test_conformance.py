"""The conformance kit run on the engines that come along, the example, and the faulty engine while it behaves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from outboard import EngineCore, EngineCoreRequest
from outboard.engine.loader import load_engine_class
from outboard.engines.echo import EchoEngine
from outboard.engines.mock import MockEngine
from outboard.engines.models import pull
from outboard.testing import EngineConformance, FaultyEngine

EXAMPLES = Path(__file__).parents[2] / "examples"


class TestEcho(EngineConformance):
    def make_engine(self) -> EngineCore:
        return EchoEngine(max_num_seqs=4, max_model_len=100)


class TestEchoWithoutLimits(EngineConformance):
    def make_engine(self) -> EngineCore:
        return EchoEngine()


class TestMock(EngineConformance):
    limits: ClassVar[frozenset[str]] = frozenset({"max_tokens", "min_tokens"})  # it looks at no token

    def make_engine(self) -> EngineCore:
        return MockEngine(max_num_seqs=4, max_model_len=100)


class TestMockInLargeSteps(TestMock):
    def make_engine(self) -> EngineCore:
        return MockEngine(max_num_seqs=4, tokens_per_step=3)


class TestFaultyEngineWithoutFaults(TestMock):
    def make_engine(self) -> EngineCore:
        return FaultyEngine(max_num_seqs=4)


class TestCountEngine(EngineConformance):
    limits: ClassVar[frozenset[str]] = frozenset()

    def make_engine(self) -> EngineCore:
        return load_engine_class(f"{EXAMPLES / 'count_engine.py'}:CountEngine")()


class TestImageFilter(EngineConformance):
    is_language_model: ClassVar[bool] = False

    def make_engine(self) -> EngineCore:
        return load_engine_class(f"{EXAMPLES / 'image_filter.py'}:ImageFilter")(max_num_seqs=2)

    def make_request(self, index: int) -> EngineCoreRequest:
        image = np.random.default_rng(index).random((20 + index, 30), np.float32)
        return EngineCoreRequest(request_id="", inputs={"image": image})


@pytest.mark.openvino
@pytest.mark.xdist_group("openvino")
@pytest.mark.timeout(180)
class TestOpenVINO(EngineConformance):
    most_requests: ClassVar[int] = 12

    def make_engine(self) -> EngineCore:
        from outboard.engines.openvino import OpenVINOEngine

        pull("smollm2-135m")
        return OpenVINOEngine(max_num_seqs=4)


def test_the_kit_needs_no_pytest() -> None:
    import subprocess

    code = "import sys, outboard.testing; print('pytest' in sys.modules, 'numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.split() == ["False", "False"]
