"""The programs in docs/ run; those of write-an-engine.md build on one another and are tested with the kit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PROGRAMS = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if '__name__ == "__main__"' in code and page.stem != "write-an-engine"
]


@pytest.mark.parametrize("code", PROGRAMS)
def test_a_program_of_the_docs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(code)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout
