"""What the dashboard, the alerts and the pages name is what a server shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

DOCS = Path(__file__).parents[2] / "docs"
# Renders a page as a server does that has had a request of every kind. In a process of its own: prometheus-client
# looks for the directory when it is imported.
PAGE = """
import sys
from pathlib import Path
from outboard.observe.engines import EngineReport, ServerReport, write_report
from outboard.observe.metrics import ServerMetrics, render
from outboard.observe.record import RequestRecord

metrics, report = Path(sys.argv[1]), Path(sys.argv[2])
server = ServerMetrics("mock")
path = "/v1/completions"
server.on_request(RequestRecord(request_id="a", path=path, status=429, error="too_many_waiting"))
server.on_request(RequestRecord(request_id="b", path=path, status=503, error="engine_dead", prompts=1))
server.on_request(RequestRecord(request_id="c", path=path, status=200, finish_reasons=["stop"], completion_tokens=2,
                                time_to_first_token=0.1, queue_time=0.1))
server.tell_refused({"wrong key": 1})
engines = [EngineReport(rank=0, state="ready", pid=1, last_step_age=0)]
write_report(report, ServerReport(model="mock", engines=engines, refused={"wrong key": 1}))
sys.stdout.buffer.write(render(metrics, report))
"""
NAME = re.compile(r"outboard:\w+")
# A series in an expression: its name, and the matchers behind it.
SERIES = re.compile(r"(outboard:\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> list[Metric]:
    directory = tmp_path_factory.mktemp("metrics")
    (directory / "values").mkdir()
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory / "values")}
    command = [sys.executable, "-c", PAGE, str(directory / "values"), str(directory / "server.json")]
    page = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    return list(text_string_to_metric_families(page))


@pytest.fixture(scope="module")
def series(families: list[Metric]) -> dict[str, dict[str, set[str]]]:
    """The values of each label of each series."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in families:
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
    return document


def dashboard_expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (one["definition"] for one in dashboard()["templating"]["list"] if one["type"] == "query")


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of operate.md."""
    section = (DOCS / "operate.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def alert_expressions() -> list[str]:
    return [row[0].split("`")[1] for row in rows_under("Alerts")]


EXPRESSIONS = [*dashboard_expressions(), *alert_expressions()]


def test_there_is_something_to_test() -> None:
    assert len(list(dashboard_expressions())) > 15
    assert len(alert_expressions()) > 8


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_what_there_is(expression: str, series: dict[str, dict[str, set[str]]]) -> None:
    named = SERIES.findall(expression)
    assert named or "up{" in expression, "it asks for nothing of ours"
    # A scrape adds these to every series.
    known = {"instance", "job"}
    for name, matchers in named:
        assert name in series
        known |= set(series[name])
        for label, value in MATCHER.findall(matchers):
            assert label in {*series[name], "instance", "job"}, f"{name} has no label {label}"
            if label == "state":
                assert value in series[name]["state"]
    for labels in GROUPING.findall(expression):
        assert {label.strip() for label in labels.split(",")} <= known


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_page_names_what_there_is(page: Path, series: dict[str, dict[str, set[str]]], families: list[Metric]) -> None:
    known = {*series, *(family.name for family in families)}
    assert set(NAME.findall(page.read_text())) <= known


def test_the_table_has_all_metrics(families: list[Metric]) -> None:
    table = {}
    for name, kind, labels, _ in rows_under("Metrics"):
        table[name.strip("`")] = (kind, set(re.findall(r"`(\w+)`", labels)))
    shown = {}
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        shown[name] = (family.type, {label for one in family.samples for label in one.labels} - {"le"})
    assert table == shown


def test_the_dashboard_can_be_imported() -> None:
    document = dashboard()
    assert document["schemaVersion"] >= 39
    variables = {one["name"]: one for one in document["templating"]["list"]}
    assert set(variables) >= {"datasource", "model", "engine"}
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in document["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            used = set(re.findall(r"\$(?:\{(\w+)\}|(\w+))", target["expr"]))
            assert {one or other for one, other in used} <= {*variables, "__rate_interval"}


def test_no_two_panels_overlap() -> None:
    taken: dict[tuple[int, int], int] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["id"]) == panel["id"], panel["title"]
