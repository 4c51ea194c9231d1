"""Traces, by OpenTelemetry: a span a request, made once it has ended, of what was measured anyway."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outboard._version import __version__
from outboard.observe.record import RequestRecord

__all__ = ["RequestTracer"]

_SECOND = 1_000_000_000  # in ns, which spans count in


class RequestTracer:
    """Makes spans; `on_request` is an observer of requests. A thread sends them; what nobody takes is dropped.

    A span belongs to the trace of the client's `traceparent` header, where it has one. Its attributes have the names
    that vLLM gives them, those of OpenTelemetry's conventions for generative AI among them.

    Args:
        endpoint: URL that OTLP is posted to.
        model: attribute `gen_ai.response.model`.
        exporter: in place of OTLP's.
    """

    def __init__(self, endpoint: str, model: str, exporter: SpanExporter | None = None) -> None:
        self._model = model
        resource = Resource.create({"service.name": "outboard", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("outboard.serve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def on_request(self, record: RequestRecord) -> None:
        """A request has ended."""
        carrier = {"traceparent": record.trace_parent, "tracestate": record.trace_state}
        context = self._propagator.extract({name: value for name, value in carrier.items() if value})
        started = int(record.started * _SECOND)
        span = self._tracer.start_span("llm_request", context, SpanKind.SERVER, start_time=started)
        span.set_attributes(
            {
                "http.route": record.path,
                "http.response.status_code": record.status,
                "gen_ai.response.model": self._model,
                "gen_ai.request.id": record.request_id,
                "gen_ai.usage.prompt_tokens": record.prompt_tokens,
                "gen_ai.usage.completion_tokens": record.completion_tokens,
                "gen_ai.latency.e2e": record.duration,
            }
        )
        queue, first = record.queue_time, record.time_to_first_token
        if record.finish_reasons:
            span.set_attribute("gen_ai.response.finish_reasons", record.finish_reasons)
        if queue is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", queue)
            span.add_event("scheduled", timestamp=started + int(queue * _SECOND))
        if first is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", first)
            span.set_attribute("gen_ai.latency.time_in_model_decode", max(0.0, record.duration - first))
            span.add_event("first token", timestamp=started + int(first * _SECOND))
        if record.error:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(started + int(record.duration * _SECOND))

    def close(self) -> None:
        """Sends what is left, within some seconds."""
        self._provider.shutdown()
