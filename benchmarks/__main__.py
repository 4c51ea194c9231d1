"""`python -m benchmarks`: lists the benchmarks; `python -m benchmarks NAME ...` runs one."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

NAMES = (
    "stream",
    "requests",
    "utility",
    "tensors",
    "serve",
    "data_parallel",
    "balancing",
    "elastic",
    "failover",
    "growth",
    "open_streams",
    "startup",
    "idle",
    "network",
    "check",
    "report",
    "peers.vllm",
)


def main() -> None:
    """Runs what the arguments name, or says what there is."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in NAMES:
        sys.argv = [f"benchmarks.{name}", *sys.argv[2:]]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        return
    if name not in ("", "-h", "--help"):
        print(f"there is no benchmark {name!r}\n", file=sys.stderr)
    print("python -m benchmarks NAME [--help] ...\n")
    for one in NAMES:
        source = Path(__file__).parent.joinpath(*one.split(".")).with_suffix(".py")
        summary = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
        print(f"  {one:<14} {summary}")
    if name not in ("", "-h", "--help"):
        sys.exit(2)


if __name__ == "__main__":
    main()
