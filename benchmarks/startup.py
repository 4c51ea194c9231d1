"""How long it takes to import Outboard and to have an engine ready, each time in a fresh interpreter.

python -m benchmarks.startup [--reps 9] [--plot FILE.svg|png] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from benchmarks.measure import show, spread, write_json
from benchmarks.plots import add_outputs, bars

# What `import outboard` may take along, and what it must leave alone: optional, or for the command line only.
DEPENDENCIES = ("zmq", "msgspec", "numpy", "psutil", "asyncio")
LAZY = ("torch", "openvino", "openvino_genai", "uvloop", "typer", "rich")

# Each program prints one JSON value; a number is milliseconds.
_CLOCK = "import json, sys, time; start = time.perf_counter(); "
_PRINT = "; print(json.dumps((time.perf_counter() - start) * 1000))"

# `import outboard` alone loads next to nothing: its names are looked up at their first use.
_IMPORT = "from outboard import AsyncMPClient"

_READY = """
import json, time
from outboard import AsyncMPClient, EngineConfig
config = EngineConfig(engine="echo")
start = time.perf_counter()
client = AsyncMPClient(config)
print(json.dumps((time.perf_counter() - start) * 1000))
client.shutdown()
"""


def run(program: str) -> tuple[float, str]:
    """Runs a program in a fresh interpreter: wall time of the whole process in milliseconds, and what it printed."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return (time.perf_counter() - start) * 1000, done.stdout


def loaded(names: tuple[str, ...]) -> list[str]:
    """Which of these modules come along with the client."""
    program = f"import json, sys; {_IMPORT}; print(json.dumps([name for name in {names!r} if name in sys.modules]))"
    found: list[str] = json.loads(run(program)[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description="Import and start-up times.")
    parser.add_argument("--reps", type=int, default=9)
    add_outputs(parser)
    args = parser.parse_args()
    imported = ", ".join(loaded(DEPENDENCIES))
    # Programs that time themselves, and programs whose whole process is timed.
    inner = {
        "import its dependencies": f"{_CLOCK}import {imported}{_PRINT}",
        _IMPORT: f"{_CLOCK}{_IMPORT}{_PRINT}",
        f"{_IMPORT} after its dependencies": f"import {imported}; {_CLOCK}{_IMPORT}{_PRINT}",
        "echo engine ready: AsyncMPClient(config)": _READY,
    }
    whole = {
        "interpreter alone": "pass",
        "import zmq, msgspec, numpy": "import zmq, msgspec, numpy",
        "import outboard": "import outboard",
        _IMPORT: _IMPORT,
        "echo engine, start to clean end": _READY,
    }
    times: dict[str, list[float]] = {}
    for _ in range(args.reps):
        for name, program in inner.items():
            times.setdefault(f"{name} (in process)", []).append(float(run(program)[1]))
        for name, program in whole.items():
            times.setdefault(f"{name} (whole process)", []).append(run(program)[0])
    rows = [[name, spread(values).text(digits=1)] for name, values in times.items()]
    ready = spread(times["echo engine ready: AsyncMPClient(config) (in process)"]).median
    ratio = ready / spread(times["import zmq, msgspec, numpy (whole process)"]).median
    lazy = ", ".join(loaded(LAZY)) or "none"
    show(
        f"Start-up, median (least - most) of {args.reps}, fresh interpreters",
        ["what", "ms"],
        rows,
        f"ready within {ratio:.2f} of the time of `python -c 'import zmq, msgspec, numpy'`\n"
        f"dependencies that the client loads: {imported}\nof {', '.join(LAZY)}: {lazy}",
    )
    if args.plot:
        bars(args.plot, {"ms": times})
    if args.json:
        write_json(args.json, times)


if __name__ == "__main__":
    main()
