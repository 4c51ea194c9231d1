"""Spans of requests, into the memory of OpenTelemetry's own exporter for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from outboard.observe.record import RequestRecord
from outboard.observe.traces import RequestTracer

_TRACE, _SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
_RECORD: dict[str, Any] = {
    "request_id": "r",
    "path": "/v1/completions",
    "status": 200,
    "started": 1_700_000_000.5,
    "duration": 2.0,
    "prompt_tokens": 3,
    "completion_tokens": 4,
}


class _Traces:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = RequestTracer("http://127.0.0.1:1/v1/traces", "m", self.exporter)

    def spans(self, **record: Any) -> list[ReadableSpan]:
        self.tracer.on_request(RequestRecord(**{**_RECORD, **record}))
        self.tracer._provider.force_flush()
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def traces() -> Iterator[_Traces]:
    made = _Traces()
    yield made
    made.tracer.close()


def test_a_request_is_a_span(traces: _Traces) -> None:
    [span] = traces.spans(finish_reasons=["stop"], queue_time=0.25, time_to_first_token=0.5)
    assert span.name == "llm_request" and span.kind is SpanKind.SERVER and span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    assert span.end_time is not None and span.start_time is not None
    assert span.start_time == 1_700_000_000_500_000_000
    assert span.end_time - span.start_time == 2_000_000_000
    assert span.resource.attributes["service.name"] == "outboard"
    assert dict(span.attributes or {}) == {
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.response.model": "m",
        "gen_ai.request.id": "r",
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.latency.e2e": 2.0,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.time_in_model_decode": 1.5,
    }
    assert {event.name: event.timestamp - span.start_time for event in span.events} == {
        "scheduled": 250_000_000,
        "first token": 500_000_000,
    }


def test_what_is_not_known_is_left_out(traces: _Traces) -> None:
    [span] = traces.spans(error="client_disconnected", status=499)
    assert not span.events
    assert not [name for name in span.attributes or {} if "time_" in name or "finish" in name]
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "client_disconnected"


def test_the_trace_of_the_client_goes_on(traces: _Traces) -> None:
    [span] = traces.spans(trace_parent=f"00-{_TRACE}-{_SPAN}-01", trace_state="vendor=x")
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == _TRACE
    assert f"{span.parent.span_id:016x}" == _SPAN and span.parent.is_remote
    assert span.context.trace_state["vendor"] == "x"


@pytest.mark.parametrize(
    "parent", ["x", "00-0-0-01", f"ff-{_TRACE}-{_SPAN}-01", f"00-{'0' * 32}-{_SPAN}-01", "\xff", "00-" * 1000]
)
def test_a_header_that_is_none_begins_a_trace_of_its_own(traces: _Traces, parent: str) -> None:
    [span] = traces.spans(trace_parent=parent, trace_state="\xff,,=")
    assert span.parent is None


def test_a_client_that_does_not_sample_is_left_alone(traces: _Traces) -> None:
    assert not traces.spans(trace_parent=f"00-{_TRACE}-{_SPAN}-00", finish_reasons=["stop"], error="x", queue_time=1.0)


def test_requests_do_not_share_a_trace(traces: _Traces) -> None:
    traces.spans(trace_parent=f"00-{_TRACE}-{_SPAN}-01")
    _, span = traces.spans()
    assert span.parent is None


def test_close_sends_what_is_left() -> None:
    traces = _Traces()
    traces.tracer.on_request(RequestRecord(**_RECORD))
    traces.tracer.close()
    assert len(traces.exporter.get_finished_spans()) == 1
    traces.tracer.on_request(RequestRecord(**_RECORD))  # dropped, and no error
