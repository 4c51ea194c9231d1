"""The examples do what they say."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from outboard import AsyncLLM, ConfigError, RequestOutput
from outboard.testing import EngineHarness
from support import Run

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def image_filter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import image_filter

    return image_filter


def run_example(*args: str) -> str:
    command = [sys.executable, str(EXAMPLES / args[0]), *args[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_each_refinement_is_closer_to_the_clean_image(tmp_path: Path) -> None:
    path = tmp_path / "out.pgm"
    noisy, *refined = re.findall(r"(\w+): ([\d.]+) dB", run_example("image_filter.py", "--out", str(path)))
    assert noisy[0] == "noisy"
    ratios = [float(ratio) for _, ratio in refined]
    assert len(ratios) == 7
    assert all(later > earlier for earlier, later in itertools.pairwise(ratios)), ratios
    assert ratios[-1] > float(noisy[1]) + 10
    header, data = path.read_bytes().split(b"\n", 1)
    assert header == b"P5 500 400 255"
    assert len(data) == 500 * 400


def test_the_output_file_is_optional() -> None:
    assert run_example("image_filter.py").count("refined") == 7


def test_several_images_at_once(image_filter: ModuleType, nothing_left: None, run: Run) -> None:
    sizes = [(40, 60), (333, 21), (64, 64), (1, 1), (128, 200), (17, 90)]

    async def refine(llm: AsyncLLM, size: tuple[int, int], seed: int) -> tuple[Any, list[RequestOutput]]:
        clean, noisy = image_filter.picture(*size, seed=seed)
        stream = llm.generate(inputs={"image": (noisy * 255).clip(0, 255).astype(np.uint8) if seed % 2 else noisy})
        return clean, [output async for output in stream]

    async def main() -> None:
        async with AsyncLLM(image_filter.ImageFilter, options={"scales": 4, "max_num_seqs": 3}) as llm:
            done = await asyncio.gather(*[refine(llm, size, seed) for seed, size in enumerate(sizes)])
        for seed, (clean, outputs) in enumerate(done):
            results = [output.outputs[0].result for output in outputs]
            assert [output.outputs[0].finish_reason for output in outputs] == [None] * 4 + ["stop"]
            assert all(result.shape == clean.shape for result in results)
            assert {result.dtype for result in results} == {np.dtype("u1" if seed % 2 else "f4")}
            ratios = [image_filter.psnr(clean, result / 255 if seed % 2 else result) for result in results]
            assert clean.size < 2000 or ratios[-1] > ratios[0] + 3, ratios

    run(main())


def test_images_wait_for_a_place(image_filter: ModuleType) -> None:
    harness = EngineHarness(image_filter.ImageFilter(scales=2, max_num_seqs=2))
    names = [harness.add(inputs={"image": np.ones((8, 8), "f4")}) for _ in range(5)]
    harness.run_until_idle()
    assert [(harness[name].first_step, harness[name].last_step) for name in names] == [(1, 3)] * 2 + [(4, 6)] * 2 + [
        (7, 9)
    ]


@pytest.mark.parametrize("dtype", ["f4", "u1"])
def test_a_clean_image_comes_back(image_filter: ModuleType, dtype: str) -> None:
    image = np.zeros((50, 70), dtype)
    image[9:30, 11:50] = 1 if dtype == "f4" else 200
    harness = EngineHarness(image_filter.ImageFilter())
    name = harness.add(inputs={"image": image})
    results = harness.run_until_idle()[name].results
    np.testing.assert_allclose(results[-1], image, atol=1e-6)
    assert results[-1].dtype == image.dtype
    assert np.abs(results[0].astype(float) - image).max() > 0.1


@pytest.mark.parametrize(
    "inputs",
    [None, 3, {}, {"image": [[1.0]]}, {"image": np.zeros(4, "f4")}, {"image": np.zeros((2, 0), "f4")}]
    + [{"image": np.zeros((2, 2), dtype)} for dtype in ("f8", ">f4", "bool", "i4")],
)
def test_what_is_no_image_is_refused(image_filter: ModuleType, inputs: Any) -> None:
    harness = EngineHarness(image_filter.ImageFilter())
    record = harness[harness.add(inputs=inputs)]
    assert (record.finish_reason, harness.engine.has_work()) == ("error", False)
    assert "inputs must be" in (record.error or "")


def test_options_of_the_image_filter(image_filter: ModuleType) -> None:
    for scales in (0, 13):
        with pytest.raises(ConfigError, match="1 to 12"):
            image_filter.ImageFilter(scales=scales)
    with pytest.raises(ConfigError, match="at least 1"):
        image_filter.ImageFilter(max_num_seqs=0)
