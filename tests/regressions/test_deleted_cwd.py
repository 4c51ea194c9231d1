"""A working directory that has been deleted ends start-up with a bare FileNotFoundError."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, tempfile, asyncio, outboard
os.chdir(tempfile.mkdtemp())
os.rmdir(os.getcwd())
async def main():
    async with outboard.AsyncLLM("echo") as llm:
        async for output in llm.generate("abc"):
            pass
        print(output.outputs[0].text)
asyncio.run(main())
"""


def test_a_deleted_working_directory() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=30)
    assert done.stdout == "abc\n", done.stderr[-300:]
