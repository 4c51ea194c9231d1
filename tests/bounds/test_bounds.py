"""What the benchmarks promise, with room for a busy machine: only a gross regression shows."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
# The client's CPU time a token, as a share of the plain design's in the same run.
BOUNDS = {"windowed": 0.6, "paced": 0.9}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_256_streams_cost_the_client_less_than_the_plain_design(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.stream", "--streams", "256", "--steps", "100", "--reps", "3"]
    command += ["--modes", *BOUNDS, "--designs", "plain", "streams", "--json", str(results)]
    subprocess.run(command, cwd=PROJECT, check=True, timeout=280)
    samples = json.loads(results.read_text())["results"]

    def cost(design: str, mode: str) -> list[float]:
        return [
            s["client_ns_per_token"] for s in samples if (s["design"].partition(",")[0], s["mode"]) == (design, mode)
        ]

    for mode, bound in BOUNDS.items():
        # Each against its neighbour in time, so that a load that comes and goes meets both.
        shares = [mine / plain for mine, plain in zip(cost("streams", mode), cost("plain", mode), strict=True)]
        assert len(shares) == 3
        assert statistics.median(shares) <= bound, f"{mode}: {shares}"
