"""One request seen from everywhere: logs as JSON, the access log, its trace, `oarlock explain` and the live state."""

from __future__ import annotations

import json
import subprocess

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from tests.contract.test_traces import PARENT, SAMPLED, TRACE, Collector
from tests.e2e.running import RunningServer, command, environment

pytestmark = [pytest.mark.slow, pytest.mark.soak]
ADMIN = {"OARLOCK_ADMIN_API_KEY": "admin"}


def test_a_request_is_the_same_in_logs_traces_and_its_explanation():
    collector = Collector()
    flags = ("--log-format", "json", "--enable-log-requests", "--access-log", "--otlp-traces-endpoint", collector.url)
    with RunningServer(None, *flags, "-tp", 2, env=ADMIN) as server:
        headers = {"traceparent": SAMPLED, "X-Request-Id": "mine"}
        body = {"prompt": "Q: What does os.path.join do?\nA:", "max_tokens": 12, "ignore_eos": True}
        answer = server.client.post("/v1/completions", json=body, headers=headers).json()
        refused = server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": -1})
        explain = command("explain", answer["id"], server.url, "--json")
        explained = subprocess.run(explain, env=environment(**ADMIN), capture_output=True, text=True, timeout=60)
        state = server.client.get("/v1/state").json()
        server.stop()  # the spans that wait are sent
        log = server.log
    collector.close()
    assert refused.status_code == 400
    logged, banner = log.split("Oarlock is ready.")[0], log.split("Oarlock is ready.")[1].split("\n{", 1)
    lines = [*logged.splitlines(), *("{" + banner[1]).splitlines()]  # the banner is on standard output
    events = [json.loads(line) for line in lines if line]
    by_event = {}
    for each in events:
        by_event.setdefault(each.get("event"), []).append(each)
    assert {"ready", "ranks_ready", "engine_ready"} <= by_event.keys()
    assert None not in by_event
    (done,) = by_event["request_done"]
    statuses = [line["status"] for line in by_event["access"] if line["path"] == "/v1/completions"]
    assert statuses == [200, 400]
    assert answer["id"].endswith(done["request_id"])
    assert (done["prompt_tokens"], done["completion_tokens"]) == (
        answer["usage"]["prompt_tokens"],
        answer["usage"]["completion_tokens"],
    )
    (span,) = [span for span in collector.spans["llm_request"] if span.trace_id.hex() == TRACE]
    assert span.parent_span_id.hex() == PARENT
    assert explained.returncode == 0, explained.stderr
    told = json.loads(explained.stdout)
    assert told["id"] == answer["id"] and told["completion_tokens"] == 12
    assert state["requests"]["finished"] >= 1 and len(state["engines"][0]["step"]["ranks"]) == 2
