"""The code of docs/write-an-engine.md runs as it stands there, and does what the text says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOC = Path(__file__).parents[2] / "docs" / "write-an-engine.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every block as the file that its first line names."""
    path = tmp_path_factory.mktemp("docs")
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert len(blocks) == DOC.read_text().count("```python")
    assert len({name for name, _ in blocks}) == len(blocks) == 11
    for name, code in blocks:
        (path / name).write_text(code)
    return path


def run(folder: Path, *args: str, status: int = 0) -> str:
    result = subprocess.run(
        [sys.executable, *args], cwd=folder, capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout


def pytest_in(folder: Path, name: str, status: int = 0) -> str:
    return run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", name, status=status)


def test_the_first_engine(folder: Path) -> None:
    assert run(folder, "try_reverse.py") == ""
    assert run(folder, "use_reverse.py").splitlines()[-1] == "[3, 2, 1]"


def test_the_kit_finds_the_mistakes_that_the_page_names(folder: Path) -> None:
    seen = re.sub(r"\s+", " ", pytest_in(folder, "test_reverse.py", status=1))
    named = re.findall(r"^    E  (AssertionError: .*?) \.\.\.$", DOC.read_text(), re.MULTILINE)
    assert len(named) == 2
    for message in named:
        assert message in seen


def test_the_last_engines_keep_the_contract(folder: Path) -> None:
    assert " failed" not in pytest_in(folder, "test_engines.py")


@pytest.mark.parametrize("module", ["batching", "texts", "calls", "long_steps"])
def test_each_step_keeps_the_contract(folder: Path, module: str) -> None:
    test = folder / f"test_step_{module}.py"
    test.write_text((folder / "test_reverse.py").read_text().replace("from reverse", f"from {module}"))
    pytest_in(folder, test.name)


def test_text_and_calls(folder: Path) -> None:
    script = folder / "all.py"
    script.write_text(
        """
import asyncio
from pathlib import Path
from outboard import AsyncLLM, SamplingParams


async def main():
    async with AsyncLLM("calls.py:Reverse", options={"max_num_seqs": 4}) as llm:
        async for output in llm.generate("live", SamplingParams(max_tokens=16)):
            pass
        print(output.outputs[0].text)
        print(await llm.client.call_utility_async("set_max_num_seqs", 2))
        print(await llm.client.call_utility_async("save", "state.txt"), Path("state.txt").read_text())


asyncio.run(main())
"""
    )
    assert run(folder, "all.py").split() == ["evil", "4", "5", "state"]
    outboard = [str(Path(sys.executable).parent / "outboard"), "generate", "live", "--engine", "texts.py:Reverse"]
    result = subprocess.run(outboard, cwd=folder, capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout.strip() == "evil"


def test_a_request_is_resumed(folder: Path) -> None:
    script = folder / "resume.py"
    script.write_text(
        """
from outboard import EngineCoreRequest
from outboard.testing import EngineHarness
from resuming import Countdown

harness = EngineHarness(Countdown())
harness.add([5], request_id="whole")
harness.add_request(EngineCoreRequest(request_id="resumed", prompt_token_ids=[5, 5, 4], num_output_tokens=2))
harness.run_until_idle()
print(harness["whole"].tokens, harness["resumed"].tokens)
"""
    )
    assert run(folder, "resume.py") == "[5, 4, 3, 2, 1, 0] [3, 2, 1, 0]\n"
