"""Metrics of several API processes on one page. Each test's processes write files, and are gone when these are read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outboard.observe.engines import EngineReport, ServerReport, write_report
from outboard.observe.metrics import MULTIPROCESS_DIR, render
from outboard.observe.record import RequestRecord

_PROGRAM = """
import sys
import msgspec
from outboard.observe.metrics import ServerMetrics
from outboard.observe.record import RequestRecord

metrics = ServerMetrics("m")
for record in msgspec.json.decode(sys.stdin.buffer.read(), type=list[RequestRecord]):
    metrics.on_request(record)
for so_far in (0, 5, 5, 12):
    metrics.tell_tokens(so_far)
for so_far in (0, 2, 2, 5):
    metrics.tell_refused({"wrong key": 0, "no handshake": so_far})
"""
_GOOD: dict[str, Any] = {
    "request_id": "r",
    "path": "/v1/completions",
    "status": 200,
    "duration": 3.0,
    "finish_reasons": ["stop", "length"],
    "prompts": 1,
    "prompt_tokens": 3,
    "completion_tokens": 8,
    "cached_tokens": 2,
    "queue_time": 0.02,
    "time_to_first_token": 0.3,
}
_REFUSED = {"request_id": "r", "path": "/v1/completions", "status": 429, "error": "too_many_waiting"}
_FAILED = {"request_id": "r", "path": "/v1/completions", "status": 503, "error": "engine_dead", "prompts": 1}


def _process(directory: Path, *records: dict[str, Any]) -> None:
    given = msgspec.json.encode([RequestRecord(**record) for record in records])
    environment = os.environ | {MULTIPROCESS_DIR: str(directory)}
    subprocess.run([sys.executable, "-c", _PROGRAM], input=given, env=environment, check=True, timeout=30)


def _samples(page: bytes) -> dict[tuple[str, ...], float]:
    """By name, and values of labels beside the model's."""
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
            assert sample.labels.get("model_name", "m") == "m"
            key = (sample.name.removeprefix("outboard:"), *labels)
            assert key not in found, "twice on the page"
            found[key] = sample.value
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("metrics")
    _process(directory, _GOOD, _REFUSED, _FAILED)
    _process(directory, _GOOD)
    report = directory / "report.json"
    write_report(report, ServerReport(model="m", engines=[EngineReport(rank=0, state="ready", running=3)]))
    return render(directory, report)


def test_counts_of_all_processes_add_up(page: bytes) -> None:
    samples = _samples(page)
    assert samples["http_requests_total", "/v1/completions", "200"] == 2
    assert samples["http_requests_total", "/v1/completions", "429"] == 1
    assert samples["requests_refused_total", "too_many_waiting"] == 1
    assert samples["requests_failed_total", "engine_dead"] == 1
    assert samples["connections_refused_total", "no handshake"] == 10  # 5 of each, told bit by bit
    assert samples["request_success_total", "stop"] == samples["request_success_total", "length"] == 2
    assert samples["prompt_tokens_total",] == 6
    assert samples["prefix_cache_hits_total",] == 4
    assert samples["generation_tokens_total",] == 24


def test_histograms_of_all_processes_add_up(page: bytes) -> None:
    samples = _samples(page)
    for name, count, total in (
        ("time_to_first_token_seconds", 2, 0.6),
        ("request_time_per_output_token_seconds", 2, 2 * (3.0 - 0.3) / 3),
        ("e2e_request_latency_seconds", 2, 6.0),
        ("request_queue_time_seconds", 2, 0.04),
    ):
        assert samples[f"{name}_count",] == samples[f"{name}_bucket", "+Inf"] == count
        assert samples[f"{name}_sum",] == pytest.approx(total)
    assert samples["time_to_first_token_seconds_bucket", "0.25"] == 0
    assert samples["time_to_first_token_seconds_bucket", "0.5"] == 2


def test_engine_cores_are_on_the_same_page(page: bytes) -> None:
    assert _samples(page)["num_requests_running", "0"] == 3


def test_histograms_are_there_before_the_first_request(tmp_path: Path) -> None:
    _process(tmp_path)
    samples = _samples(render(tmp_path, tmp_path / "none"))
    assert samples["time_to_first_token_seconds_count",] == 0
    assert samples["prompt_tokens_total",] == 0
    assert not [key for key in samples if key[0].startswith("engine")]


def test_without_processes_the_page_is_empty(tmp_path: Path) -> None:
    assert _samples(render(tmp_path, tmp_path / "none")) == {}


@pytest.mark.parametrize(
    ("more", "seconds"),
    [
        ({}, 0.9),
        ({"finish_reasons": ["stop"]}, 2.7 / 7),
        ({"time_to_first_token": None}, None),
        ({"completion_tokens": 2}, None),
        ({"finish_reasons": [], "completion_tokens": 0}, None),
    ],
)
def test_time_from_a_token_to_the_next(more: dict[str, Any], seconds: float | None) -> None:
    record = RequestRecord(**{**_GOOD, **more})
    assert record.time_per_output_token == (None if seconds is None else pytest.approx(seconds))
