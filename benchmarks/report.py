"""Runs the benchmarks, one after the other, and makes docs/performance.md of what they print.

Each run's JSON is kept in a directory, so that the document can be made again without measuring.

    python -m benchmarks.report [--out docs/performance.md] [--runs DIR] [--quick] [--again]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.vllm import PEER

HERE = Path(__file__).parent
ROOT = HERE.parent


class Run(NamedTuple):
    """One section: a benchmark with its arguments; `quick` takes the place of these for a short run."""

    name: str
    heading: str
    arguments: list[str]
    quick: list[str]


RUNS = [
    Run("peers.vllm", "Beside vLLM's own client", ["--reps", "5"], ["--reps", "1"]),
    Run("stream", "Streams", ["--reps", "5"], ["--reps", "1", "--steps", "100"]),
    Run("serve", "Over HTTP", ["--reps", "5"], ["--reps", "1", "--seconds", "1"]),
    Run("requests", "Requests", ["--reps", "5"], ["--reps", "1"]),
    Run("utility", "Utility calls", [], ["--reps", "1", "--calls", "500"]),
    Run("tensors", "Tensors", [], ["--reps", "1", "--count", "2"]),
    Run(
        "growth", "As things grow", [], ["--reps", "1", "--seconds", "1", "--streams", "1", "100", "--ranks", "1", "2"]
    ),
    Run("open_streams", "Memory of open streams", [], ["--reps", "1", "--streams", "1000"]),
    Run("data_parallel", "Ranks", ["--reps", "3"], ["--reps", "1", "--seconds", "1", "--ranks", "1", "2"]),
    Run("elastic", "Ranks that come and go", [], ["--reps", "1"]),
    Run("failover", "An engine core is killed", [], ["--reps", "1"]),
    Run("startup", "Start", [], ["--reps", "2"]),
    Run(
        "network",
        "Within a host, and between two",
        [],
        ["--reps", "1", "--steps", "100", "--calls", "100", "--messages", "2000"],
    ),
    Run("idle", "Idle", [], ["--seconds", "3"]),
]


def measure(run: Run, directory: Path, images: Path, quick: bool) -> None:
    """Runs one benchmark; its JSON goes to the directory, its plot to the images."""
    command = [sys.executable, "-m", f"benchmarks.{run.name}", *(run.quick if quick else run.arguments)]
    command += ["--json", str(directory / f"{run.name}.json")]
    command += ["--plot", str(images / f"{run.name}.svg")]
    print(f"== {' '.join(command[1:])}", flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def section(run: Run, found: dict[str, Any], image: Path, out: Path) -> str:
    """One section of the document."""
    source = HERE.joinpath(*run.name.split(".")).with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    prose = text.rpartition("\n\n    ")[0] or text  # without the command, which is the last
    arguments = " ".join(run.arguments)
    parts = [f"## {run.heading}", prose, f"    python -m benchmarks {run.name} {arguments}".rstrip()]
    if image.exists():
        parts.append(f"![{run.heading}]({os.path.relpath(image, out.parent)})")
    parts += [table(one) for one in found["tables"]]
    return "\n\n".join(parts)


def table(shown: dict[str, Any]) -> str:
    """A printed table, as Markdown."""
    columns = shown["columns"]
    lines = [f"**{shown['title']}**", "", "| " + " | ".join(columns) + " |"]
    lines.append("|---|" + "---:|" * (len(columns) - 1))
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in shown["rows"]]
    if shown["caption"]:
        lines += ["", shown["caption"]]
    return "\n".join(lines)


def head(machine: dict[str, Any]) -> str:
    """What stands before all sections."""
    when = time.strftime("%Y-%m-%d")
    return f"""# Performance

Made by `python -m benchmarks report` on {when}, with Python {machine["python"]} on {machine["cpus"]} CPUs
({machine["system"]}).

The machine is shared, so that wall times vary by half and more between two runs. Designs that stand in one table were
measured in turn, in one run: look at ratios, and at CPU time before wall time. Figures are medians, with the least and
the greatest of the runs.
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="Measures, and writes it up.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--runs", type=Path, default=ROOT / ".benchmarks", help="where the JSON of runs is kept")
    parser.add_argument("--quick", action="store_true", help="short runs: to see that it works")
    parser.add_argument("--again", action="store_true", help="measure nothing: write up what is there")
    args = parser.parse_args()
    args.runs.mkdir(exist_ok=True)
    images = args.out.parent / "images"
    images.mkdir(exist_ok=True)
    runs = [run for run in RUNS if run.name != "peers.vllm" or os.environ.get(PEER) or args.again]
    if not args.again:
        for run in runs:
            measure(run, args.runs, images, args.quick)
    sections, machine = [], None
    for run in runs:
        path = args.runs / f"{run.name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        machine = machine or found["machine"]
        sections.append(section(run, found, images / f"{run.name}.svg", args.out))
    if machine is None:
        sys.exit(f"there are no runs in {args.runs}: leave out --again")
    notes = (HERE / "what_did_not_work.md").read_text()
    args.out.write_text("\n\n".join([head(machine), *sections, notes]).replace("\n\n\n", "\n\n"))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
