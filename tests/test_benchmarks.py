"""The benchmarks as a program: what it lists, what it makes of figures. Of them only the network's is run here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from benchmarks import serve
from benchmarks.__main__ import NAMES
from benchmarks.http_load import Requests, Streams
from benchmarks.plain_tcp import plain_tcp
from benchmarks.plots import bars, lines
from outboard.config import NetworkConfig, TransportConfig
from outboard.transport.curve import SessionKeys
from outboard.transport.sockets import make_context
from outboard.transport.tcp import bind_input_tcp

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


@pytest.mark.parametrize("name", [name for name in NAMES if name != "report"])
def test_each_writes_and_draws_its_figures(name: str) -> None:
    done = run(name, "--help")
    assert "usage: python -m benchmarks" in done.stdout
    assert "--json" in done.stdout
    assert "--plot" in done.stdout


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured() -> None:
    done = run("idle", "--plot", "idle.txt")
    assert done.returncode == 2
    assert "ends neither with .svg nor with .png" in done.stderr or "outboard[plots]" in done.stderr


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bars(str(tmp_path / "bars.svg"), {"ms": {"ours": [1.0, 3.0, 2.0], "theirs": [8.0]}}, {"ours": 4.0}, log=True)
    lines(str(tmp_path / "lines.png"), {"streams": ("us", {"client": {1: [200.0], 10: [20.0, 21.0]}})})
    assert (tmp_path / "bars.svg").read_text().startswith("<?xml")
    assert (tmp_path / "lines.png").read_bytes().startswith(b"\x89PNG")


def test_the_load_counts_tokens_and_requests() -> None:
    with serve.running("floor", 2.0, 4) as server:
        with Streams(server.port, 4, 20) as streams:
            streams.begin(10)
            streams.run(10)
            assert (streams.tokens, len(streams.open)) == (80, 0)
        with Requests(server.port, 4, 3, stream=True) as requests:
            requests.run(0.5)
            assert requests.answered >= 4


def test_plain_tcp_is_plain_while_it_is_entered() -> None:
    network, limits = NetworkConfig(listen="127.0.0.1"), TransportConfig()
    context = make_context(SessionKeys.make())
    try:
        with plain_tcp():
            plain = bind_input_tcp(context, network, limits)
        encrypted = bind_input_tcp(context, network, limits)
        mechanisms = [one.socket.getsockopt(zmq.MECHANISM) for one in (plain, encrypted)]
        plain.close()
        encrypted.close()
    finally:
        context.destroy(linger=0)
    assert mechanisms == [zmq.NULL, zmq.CURVE]


def test_the_network_is_measured_whole(tmp_path: Path) -> None:
    out = tmp_path / "network.json"
    small = ["--reps", "1", "--streams", "4", "--steps", "5", "--calls", "3", "--messages", "20"]
    done = run("network", *small, "--json", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["results"]
    ways = [one["way"] for one in results["clients"] if one["mode"] == "paced"]
    assert ways[:4] == ["ipc", "unix", "tcp", "tcp+CURVE"]
    assert ways[4:] == ["at 1 ms"] or "skipped: the link with a delay" in done.stdout
    assert {one["way"] for one in results["sockets"]} == {"ipc", "tcp", "tcp+CURVE"}
    assert set(results["curve_of_plain"]) == {"free", "paced"}
    assert "to be at most 1.5" in done.stdout


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
