"""The supervisor's report: a file that is replaced as a whole, and the metrics that are made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outboard.observe.engines import EngineReport, EnginesCollector, ServerReport, read_report, write_report
from outboard.protocol.control import EngineState

_ENGINES = [
    EngineReport(
        rank=0,
        state="ready",
        pid=11,
        incarnation=2,
        running=3,
        waiting=4,
        held=1,
        kv_cache_usage=0.25,
        steps=100,
        last_step_age=0.5,
        stalls=1,
        paused=True,
    ),
    EngineReport(rank=1, state="dead", failure="it was killed"),
]


def _report() -> ServerReport:
    return ServerReport(
        model="m", engines=_ENGINES, api_processes=[1, 2], api_restarts=3, waiting=5, refused={"wrong key": 7}
    )


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = _report()
    write_report(path, report)
    assert read_report(path) == report
    report.waiting = 6
    write_report(path, report)
    assert read_report(path) == report
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_report_there_is_none(tmp_path: Path) -> None:
    assert read_report(tmp_path / "none") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"engines": []}', b'{"model": 3}'])
def test_what_is_no_report_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    assert read_report(path) is None


def _samples() -> dict[tuple[str, str, str], float]:
    registry = CollectorRegistry()
    registry.register(EnginesCollector(_report(), "outboard:"))
    page = generate_latest(registry).decode()
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            engine, kind = (sample.labels.get(one, "") for one in ("engine", "state"))
            assert sample.labels.get("model_name", "m") == "m"
            found[sample.name.removeprefix("outboard:"), engine, kind or sample.labels.get("reason", "")] = sample.value
    return found


def test_metrics_of_each_engine_core() -> None:
    samples = _samples()
    for name, first, second in (
        ("num_requests_running", 3, 0),
        ("num_requests_waiting", 5, 0),
        ("kv_cache_usage_perc", 0.25, 0),
        ("engine_pid", 11, None),
        ("engine_incarnation", 2, 0),
        ("engine_paused", 1, 0),
        ("engine_sleeping", 0, 0),
        ("engine_last_step_age_seconds", 0.5, None),
        ("engine_steps_total", 100, 0),
        ("engine_restarts_total", 2, 0),
        ("engine_stalls_total", 1, 0),
    ):
        assert (samples.get((name, "0", "")), samples.get((name, "1", ""))) == (first, second), name


def test_one_state_of_all_is_set() -> None:
    samples = _samples()
    for engine, state in (("0", "READY"), ("1", "DEAD")):
        found = {one.name: samples["engine_state", engine, one.name] for one in EngineState}
        assert found == {one.name: float(one.name == state) for one in EngineState}


def test_metrics_of_the_server() -> None:
    samples = _samples()
    assert samples["api_processes", "", ""] == 2
    assert samples["num_requests_without_token", "", ""] == 5
    assert samples["api_restarts_total", "", ""] == 3
    assert samples["head_connections_refused_total", "", "wrong key"] == 7
    assert 0 <= samples["report_age_seconds", "", ""] < 5
