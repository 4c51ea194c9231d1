"""What the supervisor says of its engine cores and API processes, in a file that they all can read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outboard.protocol.control import EngineState

__all__ = ["EngineReport", "EnginesCollector", "ServerReport", "read_report", "write_report"]

_LABELS = ["model_name", "engine"]


class EngineReport(msgspec.Struct, kw_only=True):
    """One engine core.

    Attributes:
        rank: its rank.
        state: where it is in its life; a value of `EngineState`.
        pid: its process.
        incarnation: how often it has been started again.
        running, waiting, held: requests; held ones wait for the end of a pause.
        kv_cache_usage: 0 to 1.
        steps: over all incarnations.
        last_step_age: seconds since its last sign of life; None: it does not run.
        stalls: how often it was thought to hang.
        paused, sleeping: whether it is.
        failure: how its last incarnation ended, or why it is thought to hang; "": it did not, and is not.
        node: name of the node where it runs; "": on this host, or it does not run.
        waits: why there is no room to start it; "": it does not wait for that.
    """

    rank: int
    state: str
    pid: int | None = None
    incarnation: int = 0
    running: int = 0
    waiting: int = 0
    held: int = 0
    kv_cache_usage: float = 0.0
    steps: int = 0
    last_step_age: float | None = None
    stalls: int = 0
    paused: bool = False
    sleeping: bool = False
    failure: str = ""
    node: str = ""
    waits: str = ""

    @property
    def all_waiting(self) -> int:
        """Requests that wait, for whatever reason."""
        return self.waiting + self.held


class ServerReport(msgspec.Struct, kw_only=True):
    """The whole server.

    Attributes:
        model: its name.
        engines: by rank.
        api_processes: process ids of those that serve.
        api_restarts: how many of them died and were started again.
        waiting: requests that wait for their first token.
        written: `time.time()` of it.
    """

    model: str
    engines: list[EngineReport] = []
    api_processes: list[int] = []
    api_restarts: int = 0
    waiting: int = 0
    written: float = msgspec.field(default_factory=time.time)


def write_report(path: Path, report: ServerReport) -> None:
    """Puts a report in the place of the last; readers see the one or the other."""
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(report))
    os.replace(new, path)  # noqa: PTH105 - as in the system's own words


def read_report(path: Path) -> ServerReport | None:
    """The latest report; None: there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServerReport)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


class EnginesCollector(Collector):
    """Metrics of a report. Made for one page, and forgotten with it.

    Args:
        report: what is told.
        prefix: of all names.
    """

    def __init__(self, report: ServerReport, prefix: str) -> None:
        self._report = report
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        report = self._report
        yield self._gauge("num_requests_running", "Requests that engine cores work on", "running")
        yield self._gauge("num_requests_waiting", "Requests that wait in engine cores", "all_waiting")
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", "kv_cache_usage")
        yield self._gauge("engine_pid", "Process id", "pid")
        yield self._gauge("engine_incarnation", "How often it has been started again", "incarnation")
        yield self._gauge("engine_paused", "Whether generation is paused", "paused")
        yield self._gauge("engine_sleeping", "Whether it sleeps", "sleeping")
        yield self._gauge("engine_last_step_age_seconds", "Since its last sign of life", "last_step_age")
        yield self._states()
        yield self._counter("engine_steps", "Steps that it has taken", "steps")
        yield self._counter("engine_restarts", "How often it has been started again", "incarnation")
        yield self._counter("engine_stalls", "How often it was thought to hang", "stalls")
        for name, what, value in (
            ("api_processes", "API processes that serve", len(report.api_processes)),
            ("num_requests_without_token", "Requests that wait for their first token", report.waiting),
            ("report_age_seconds", "Since values of engine cores were written", max(0.0, time.time() - report.written)),
        ):
            yield GaugeMetricFamily(self._prefix + name, what, value=float(value))
        yield CounterMetricFamily(self._prefix + "api_restarts", "API processes that died", value=report.api_restarts)

    def _gauge(self, name: str, what: str, field: str) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, what, labels=_LABELS)
        for engine in self._report.engines:
            value = getattr(engine, field)
            if value is not None:
                family.add_metric([self._report.model, str(engine.rank)], float(value))
        return family

    def _counter(self, name: str, what: str, field: str) -> Metric:
        family = CounterMetricFamily(self._prefix + name, what, labels=_LABELS)
        for engine in self._report.engines:
            family.add_metric([self._report.model, str(engine.rank)], float(getattr(engine, field)))
        return family

    def _states(self) -> Metric:
        name = self._prefix + "engine_state"
        family = GaugeMetricFamily(name, "1 for the state that it is in", labels=[*_LABELS, "state"])
        for engine in self._report.engines:
            for state in EngineState:
                labels = [self._report.model, str(engine.rank), state.name]
                family.add_metric(labels, float(engine.state == state.value))
        return family
