"""`--otlp-traces-endpoint`: the spans that a collector gets, and contexts that come and go in headers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from oarlock.engine.stats import AdapterHistory, DecodeSteps, Preemption, RequestHistory
from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import make_settings

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = (f"00-{TRACE}-{PARENT}-{flags}" for flags in ("01", "00"))


class Collector:
    """Takes OTLP over HTTP, as any collector does."""

    def __init__(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *arguments: object) -> None:
                """Print nothing."""

        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def resources(self) -> list[dict]:
        return [_attributes(one.resource) for _, sent in self.requests for one in sent.resource_spans]

    @property
    def spans(self) -> dict[str, list]:
        found: dict[str, list] = {}
        for _, sent in self.requests:
            for resource in sent.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        found.setdefault(span.name, []).append(span)
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _attributes(holder) -> dict:
    found = {}
    for entry in holder.attributes:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind)
        found[entry.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector(monkeypatch) -> Iterator[Collector]:
    for name in ("OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    made = Collector()
    yield made
    made.close()


class Known(dict):
    """Histories as an engine would have them, for every request from its arrival at the server on."""

    def __init__(self, stage) -> None:
        super().__init__()
        self._stage = stage

    def __contains__(self, request_id: object) -> bool:
        return True

    def __getitem__(self, request_id: int) -> RequestHistory:
        record = next(iter(self._stage.state.requests))
        at = record.received_s
        return RequestHistory(
            request_id=request_id, prompt_tokens=1, cached_tokens=0, output_tokens=5, arrival_s=at + 0.001,
            num_running=0, num_waiting=0, queue_position=None, ahead=[], without_row=0, without_blocks=0,
            adapter=AdapterHistory(name="sql", load_s=0.25, slot_s=0.5, waits=[]),
            first_scheduled_s=at + 0.002,
            num_chunks=1, computed_tokens=1, chunks=[], first_token_s=at + 0.004,
            decode=DecodeSteps(steps=4, mean_sequences=1.0, prompt_tokens=0, seconds=0.1, by_sequences={}),
            num_preemptions=1, preemptions=[Preemption(at_s=at + 0.005, back_s=None, is_short=True)], stalls=[],
            end_s=at + 0.007, reason="stop",
        )  # fmt: skip


def _ask(stage, *requests: tuple[dict, dict]):
    async def scenario():
        async with stage.client() as client:
            answers = [await client.post("/v1/completions", json=body, headers=headers) for body, headers in requests]
        await stage.state.tracer.close()
        return answers

    return asyncio.run(scenario())


@pytest.mark.slow
def test_a_request_has_a_span_with_its_queue_prefill_and_decode_below_the_callers(make_stage, collector):
    stage = make_stage("some hidden text", otlp_traces_endpoint=collector.url)
    stage.engine.known = Known(stage)
    body = {"prompt": "hidden prompt", "max_tokens": 5, "temperature": 0.5}
    (answer,) = _ask(stage, (body, {"traceparent": SAMPLED, "x-request-id": "abc"}))
    spans = collector.spans
    assert {name: len(found) for name, found in spans.items()} == {
        "llm_request": 1, "queue": 1, "prefill": 1, "decode": 1,
    }  # fmt: skip
    (whole,) = spans["llm_request"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert answer.headers["traceparent"] == f"00-{TRACE}-{whole.span_id.hex()}-01"
    found = _attributes(whole)
    assert (found["gen_ai.request.id"], found["gen_ai.response.id"]) == ("abc", "cmpl-abc")
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (5, 0.5)
    assert found["gen_ai.usage.completion_tokens"] == 5 and found["gen_ai.usage.prompt_tokens"] > 0
    assert found["gen_ai.latency.time_in_queue"] == pytest.approx(0.001)
    assert found["gen_ai.latency.time_in_model_prefill"] == pytest.approx(0.002)
    assert found["gen_ai.latency.time_in_model_decode"] == pytest.approx(0.003)
    assert found["http.response.status_code"] == 200 and found["oarlock.preemptions"] == 1
    assert (found["gen_ai.response.model"], found["oarlock.time_waiting_for_adapter"]) == ("sql", 0.75)
    assert [event.name for event in whole.events] == ["preempted"]
    stages = [spans[name][0] for name in ("queue", "prefill", "decode")]
    assert all(one.parent_span_id == whole.span_id and one.trace_id == whole.trace_id for one in stages)
    for before, after in pairwise(stages):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert whole.start_time_unix_nano < stages[0].start_time_unix_nano
    assert collector.resources[0]["service.name"] == "oarlock"
    assert "hidden" not in str(collector.requests)


@pytest.mark.slow
def test_a_refused_request_has_a_span_and_without_a_caller_a_trace_of_its_own(make_stage, collector):
    stage = make_stage(otlp_traces_endpoint=collector.url)
    answers = _ask(stage, ({"prompt": "x", "top_p": 9}, {}), ({"prompt": "x"}, {"traceparent": "nonsense"}))
    assert [answer.status_code for answer in answers] == [400, 200]
    refused, good = collector.spans["llm_request"]
    assert _attributes(refused)["http.response.status_code"] == 400
    assert not refused.parent_span_id and not good.parent_span_id
    assert refused.trace_id != good.trace_id
    assert answers[1].headers["traceparent"].split("-")[1] == good.trace_id.hex()


@pytest.mark.slow
def test_a_caller_that_is_not_sampled_is_not_traced_and_gets_its_context_back(make_stage, collector):
    stage = make_stage(otlp_traces_endpoint=collector.url)
    (answer,) = _ask(stage, ({"prompt": "x"}, {"traceparent": UNSAMPLED}))
    assert collector.requests == []
    assert answer.headers["traceparent"].startswith(f"00-{TRACE}-") and answer.headers["traceparent"].endswith("-00")


@pytest.mark.slow
def test_an_engine_error_is_an_error_of_the_span(make_stage, collector):
    stage = make_stage(otlp_traces_endpoint=collector.url, fail_after=1)
    _ask(stage, ({"prompt": "x"}, {}))
    (span,) = collector.spans["llm_request"]
    assert (span.status.code, span.status.message) == (2, "engine_error")


def test_without_the_option_no_context_is_sent(make_stage):
    stage = make_stage()

    async def scenario():
        async with stage.client() as client:
            return await client.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": SAMPLED})

    assert "traceparent" not in asyncio.run(scenario()).headers
    assert stage.state.tracer is None


def test_values_that_cannot_be_sent_are_refused_at_start(monkeypatch):
    with pytest.raises(OptionError, match="must be a URL"):
        make_settings({"otlp_traces_endpoint": "localhost:4317"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"oarlock\[otel\]"):
        make_settings({"otlp_traces_endpoint": "http://localhost:4318/v1/traces"})
