"""`shutdown_timeout=inf`: shutdown raises, frees nothing, and the process hangs when the client is collected."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import math, outboard
c = outboard.AsyncMPClient(outboard.EngineConfig(engine="echo", faults=outboard.FaultConfig({}=math.inf)))
c.shutdown()
print("done", flush=True)
"""


def _run(name: str) -> str:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE.format(name)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return f"hangs: {process.communicate()[0]}"


def test_no_limit_on_shutdown() -> None:
    output = _run("shutdown_timeout")
    assert output == "done\n" or "ConfigError" in output


def test_no_limit_on_start_up() -> None:
    output = _run("startup_timeout")
    assert output == "done\n" or "ConfigError" in output
