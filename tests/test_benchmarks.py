"""The benchmarks as a program: what it lists, and what it makes of the figures. They are not run here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_it_lists_them() -> None:
    done = run()
    assert done.returncode == 0
    for name in ("stream", "serve", "failover", "growth", "network", "report", "peers.vllm"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"  {name} ")]
        assert len(line) > 30  # and says what it is


def test_a_name_that_there_is_not() -> None:
    done = run("speed")
    assert done.returncode == 2
    assert "there is no benchmark 'speed'" in done.stderr


def test_each_has_help() -> None:
    for name in ("failover", "network", "check", "peers.vllm"):
        assert "usage: python -m benchmarks" in run(name, "--help").stdout


def test_the_peer_is_skipped_where_there_is_none() -> None:
    assert run("peers.vllm").stdout.startswith("skipped: there is no vLLM")


def test_the_report_is_made_of_the_runs(tmp_path: Path) -> None:
    machine = {"python": "3.11.7", "cpus": 2, "system": "Linux"}
    shown = {"title": "Idle for 10 s", "columns": ["process", "%"], "rows": [["a|b", "0.1"]], "caption": "as it is"}
    (tmp_path / "idle.json").write_text(json.dumps({"machine": machine, "tables": [shown], "results": {}}))
    out = tmp_path / "performance.md"
    done = run("report", "--again", "--runs", str(tmp_path), "--out", str(out))
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert text.startswith("# Performance\n")
    assert "## Idle\n\nWhat an idle engine costs" in text
    assert "| process | % |\n|---|---:|\n| a\\|b | 0.1 |" in text
    assert "## What did not work" in text
    done = run("report", "--again", "--runs", str(tmp_path / "nothing"), "--out", str(out))
    assert done.returncode == 1
    assert "there are no runs" in done.stderr
