"""The README's code does what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(script: Path) -> str:
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_engine_and_the_client_of_the_readme(tmp_path: Path) -> None:
    engine, client, low_level = code_blocks()
    (tmp_path / "my_engine.py").write_text(engine)
    script = tmp_path / "client.py"
    script.write_text(client.replace('"openvino"', '"echo"'))
    assert run(script) == "The capital of F"
    ids = client.replace('"openvino"', '"my_engine:CountEngine"').replace('"The capital of France is"', "[1]")
    script.write_text(ids.replace(".text, end", ".token_ids, end"))
    assert run(script).replace("][", ", ") == str(list(range(57, 47, -1)))
    assert "call_utility_async" in low_level


def test_the_example_engine() -> None:
    assert run(ROOT / "examples" / "count_engine.py").replace(" ", "") == "543210\n"
