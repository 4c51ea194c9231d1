"""Metrics of an API process, for Prometheus. Names are vLLM's behind an own prefix, where it has a like one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from outboard.observe.engines import EnginesCollector, read_report
from outboard.observe.record import RequestRecord

__all__ = ["MULTIPROCESS_DIR", "PREFIX", "ServerMetrics", "render"]

PREFIX = "outboard:"
# The environment variable by which prometheus-client keeps its values in files that other processes read. It looks at
# it when it is imported.
MULTIPROCESS_DIR = "PROMETHEUS_MULTIPROC_DIR"

# Seconds; vLLM's buckets, so that its dashboards fit.
_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)


class ServerMetrics:
    """Counts of the requests of one API process; `on_request` is an observer of them.

    Args:
        model: value of the label `model_name`.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._told = 0
        self._told_refused: dict[str, int] = {}
        registry = CollectorRegistry()  # its own: pages are made of the files

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, what, ["model_name", *labels], registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, what, ["model_name"], registry=registry, buckets=buckets)
            made.labels(model)  # there before the first request
            return made

        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts").labels(model)
        self._generation_tokens = counter("generation_tokens", "Tokens of completions").labels(model)
        self._cached_tokens = counter("prefix_cache_hits", "Tokens of prompts that the prefix cache served").labels(
            model
        )
        self._success = counter("request_success", "Completions by how they ended", "finished_reason")
        self._http = counter("http_requests", "Requests of the API by path and status", "path", "status")
        self._refused = counter("requests_refused", "Requests that were refused, by error code", "reason")
        self._failed = counter("requests_failed", "Requests that ended with an error, by its code", "reason")
        self._strangers = counter(
            "connections_refused", "Connections of strangers to ports where engine cores are heard", "reason"
        )
        self._to_first_token = histogram(
            "time_to_first_token_seconds", "From the request to its first token", _TO_FIRST_TOKEN
        )
        self._per_token = histogram("request_time_per_output_token_seconds", "From a token to the next", _PER_TOKEN)
        self._whole = histogram("e2e_request_latency_seconds", "From the request to its end", _WHOLE)
        self._queue = histogram("request_queue_time_seconds", "Waiting in the engine core", _QUEUE)

    def on_request(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._http.labels(self._model, record.path, str(record.status)).inc()
        if record.error:
            refused = 400 <= record.status < 500 and record.status != 499
            (self._refused if refused else self._failed).labels(self._model, record.error).inc()
        self._prompt_tokens.inc(record.prompt_tokens)
        self._cached_tokens.inc(record.cached_tokens)
        for reason in record.finish_reasons:
            self._success.labels(self._model, reason).inc()
        for histogram, value in (
            (self._to_first_token, record.time_to_first_token),
            (self._per_token, record.time_per_output_token),
            (self._queue, record.queue_time),
        ):
            if value is not None:
                histogram.labels(self._model).observe(value)
        if record.finish_reasons:
            self._whole.labels(self._model).observe(record.duration)

    def tell_tokens(self, so_far: int) -> None:
        """Tokens of completions so far. Called now and then: a count for each token would cost as much as the token."""
        self._generation_tokens.inc(so_far - self._told)
        self._told = so_far

    def tell_refused(self, so_far: Mapping[str, int]) -> None:
        """Connections of strangers that were turned away so far, by reason. Called now and then."""
        for reason, count in so_far.items():
            self._strangers.labels(self._model, reason).inc(count - self._told_refused.get(reason, 0))
        self._told_refused = dict(so_far)


def render(directory: Path, report: Path) -> bytes:
    """The page: what all API processes have counted, gone ones too, and what the supervisor says of the engine cores.

    Args:
        directory: that of `MULTIPROCESS_DIR`.
        report: the supervisor's file.
    """
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(directory))  # type: ignore[no-untyped-call]
    engines = read_report(report)
    if engines is not None:
        registry.register(EnginesCollector(engines, PREFIX))
    return generate_latest(registry)
