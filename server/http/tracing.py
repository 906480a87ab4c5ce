"""Traces for OpenTelemetry: a span for each request, with spans for its time in the queue, in prefill and in decode.

Contexts are received and sent as W3C `traceparent` headers. The libraries belong to the extra `otel`. They are imported
only if traces are requested, and send in a thread of their own.
"""

import asyncio
import logging
import os
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from oarlock.engine.stats import RequestHistory
from oarlock.server.http.request_record import RequestRecord, histories_of
from oarlock.server.llm.async_llm import AsyncLLM
from oarlock.server.observability.logs import event, logger
from oarlock.server.version import VERSION

_CLOSE_S = 5.0
_log = logger("traces")


class RequestTracer:
    """Sends the spans of one server. Belongs to one event loop."""

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint`: of a collector, for OTLP over HTTP. The service's name is OTEL_SERVICE_NAME, else `oarlock`."""
        # Only errors of the libraries are logged, not a line for each retry.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        resource = Resource.create({"service.name": "oarlock", "service.version": VERSION} | _service_name())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("oarlock", VERSION)
        self._model = model
        self._tasks: set[asyncio.Task[None]] = set()
        _log.info(event("tracing_enabled", endpoint=endpoint))

    def begin(self, record: RequestRecord, traceparent: bytes | None, tracestate: bytes | None) -> "RequestSpan":
        """Begin the span of a request that has arrived, as a child of the span named in its headers."""
        headers = {"traceparent": traceparent, "tracestate": tracestate}
        carrier = {name: value.decode("latin-1") for name, value in headers.items() if value is not None}
        parent = _PROPAGATOR.extract(carrier)
        start = _nanoseconds(record, record.received_s)
        span = self._tracer.start_span("llm_request", context=parent, kind=SpanKind.SERVER, start_time=start)
        return RequestSpan(span)

    def end(self, request: "RequestSpan", record: RequestRecord, async_llm: AsyncLLM | None) -> None:
        """End the span of `record`, which has ended. The engine is asked for its part in the background."""
        task = asyncio.create_task(self._end(request.span, record, async_llm), name="trace")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, span: Span, record: RequestRecord, async_llm: AsyncLLM | None) -> None:
        histories = [] if async_llm is None or not span.is_recording() else await histories_of(async_llm, record)
        self._describe(span, record)
        if histories:
            _describe_engine(span, record, histories[0])
            for history in histories:
                self._stages(set_span_in_context(span), record, history)
        span.end(_nanoseconds(record, record.ended_s or record.received_s))

    def _describe(self, span: Span, record: RequestRecord) -> None:
        end_s = record.ended_s or record.received_s
        values = {
            "gen_ai.request.id": record.request_id,
            "gen_ai.response.id": record.response_id or None,
            "gen_ai.response.model": self._model,
            "gen_ai.request.max_tokens": record.max_tokens,
            "gen_ai.request.temperature": record.temperature,
            "gen_ai.request.top_p": record.top_p,
            "gen_ai.request.n": record.num_choices or None,
            "gen_ai.usage.prompt_tokens": record.prompt_tokens,
            "gen_ai.usage.completion_tokens": record.completion_tokens,
            "gen_ai.latency.e2e": end_s - record.received_s,
            "gen_ai.response.finish_reasons": [choice.finish_reason or "abort" for choice in record.choices],
            "http.route": record.route,
            "http.response.status_code": record.status,
            "oarlock.cached_tokens": record.cached_tokens,
            "oarlock.key": record.key_label,
        }
        if record.first_token_s is not None:
            values["gen_ai.latency.time_to_first_token"] = record.first_token_s - record.received_s
        span.set_attributes({name: value for name, value in values.items() if value is not None})
        status = record.error_status or record.status
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error_code or f"status {status}"))

    def _stages(self, parent: Context, record: RequestRecord, history: RequestHistory) -> None:
        """Add a choice's spans in the queue, in prefill and in decode, as far as it got."""
        marks = [history["arrival_s"], history["first_scheduled_s"], history["first_token_s"], history["end_s"]]
        known = [mark for mark in marks if mark is not None]
        for name, start_s, end_s in zip(("queue", "prefill", "decode"), known, known[1:], strict=False):
            span = self._tracer.start_span(name, context=parent, start_time=_nanoseconds(record, start_s))
            span.end(_nanoseconds(record, end_s))

    async def close(self) -> None:
        """Send all spans that are not sent yet, within a few seconds."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_CLOSE_S)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.to_thread(self._provider.force_flush, int(_CLOSE_S * 1000))
        except TimeoutError:
            _log.warning(event("traces_dropped", cause="the collector does not respond"))


class RequestSpan:
    """The span of an open request."""

    def __init__(self, span: Span) -> None:
        self.span = span
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span))
        self.traceparent = carrier["traceparent"].encode()


_PROPAGATOR = TraceContextTextMapPropagator()


def _service_name() -> dict[str, Any]:
    name = os.environ.get("OTEL_SERVICE_NAME")
    return {"service.name": name} if name else {}


def _describe_engine(span: Span, record: RequestRecord, history: RequestHistory) -> None:
    scheduled_s, token_s, end_s = history["first_scheduled_s"], history["first_token_s"], history["end_s"]
    if scheduled_s is not None:
        span.set_attribute("gen_ai.latency.time_in_queue", scheduled_s - history["arrival_s"])
    if scheduled_s is not None and token_s is not None:
        span.set_attribute("gen_ai.latency.time_in_model_prefill", token_s - scheduled_s)
    if token_s is not None and end_s is not None:
        span.set_attribute("gen_ai.latency.time_in_model_decode", end_s - token_s)
    adapter = history["adapter"]
    if adapter is not None:
        span.set_attribute("gen_ai.response.model", adapter["name"])
        span.set_attribute("oarlock.time_waiting_for_adapter", adapter["load_s"] + adapter["slot_s"])
    span.set_attribute("oarlock.preemptions", history["num_preemptions"])
    for one in history["preemptions"]:
        span.add_event("preempted", timestamp=_nanoseconds(record, one["at_s"]))
    for stall in history["stalls"]:
        attributes = {"kind": stall["kind"], "seconds": stall["seconds"]}
        span.add_event("stall", attributes, _nanoseconds(record, stall["begun_s"]))


def _nanoseconds(record: RequestRecord, at_s: float) -> int:
    """Return a time of the monotonic clock as Unix time in nanoseconds."""
    return int((record.received_at + at_s - record.received_s) * 1e9)
