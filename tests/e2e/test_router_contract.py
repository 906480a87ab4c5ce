"""Metrics and routes that routers read from a replica, by name, type and labels, on a server as a user runs it.

The tables are those of docs/routers.md: inference gateways (llm-d), production-stack and autoscalers read these names.
"""

import json
import re
import signal
import subprocess
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.block_reader import num_held, reading
from tests.e2e.running import DEMO, READY_WITHIN_S, ROOT, RunningServer, command, environment, eventually

PAGE = (ROOT / "docs" / "routers.md").read_text()
BLOCK_SIZE = 16
TOPIC = "kv@pod-1@oarlock-demo"
OWN = {"model_name", "engine"}
METRICS = {
    "vllm:num_requests_waiting": ("gauge", OWN),
    "vllm:num_requests_running": ("gauge", OWN),
    "vllm:kv_cache_usage_perc": ("gauge", OWN),
    "vllm:gpu_cache_usage_perc": ("gauge", OWN),
    "vllm:cache_config_info": ("gauge", OWN | {"block_size", "num_gpu_blocks"}),
    "vllm:prefix_cache_queries_total": ("counter", OWN),
    "vllm:prefix_cache_hits_total": ("counter", OWN),
    "vllm:gpu_prefix_cache_queries_total": ("counter", OWN),
    "vllm:gpu_prefix_cache_hits_total": ("counter", OWN),
    "vllm:prompt_tokens_total": ("counter", OWN),
    "vllm:generation_tokens_total": ("counter", OWN),
    "vllm:request_success_total": ("counter", OWN | {"finished_reason"}),
    "vllm:num_preemptions_total": ("counter", OWN),
    "vllm:spec_decode_num_drafts_total": ("counter", OWN),
    "vllm:spec_decode_num_draft_tokens_total": ("counter", OWN),
    "vllm:spec_decode_num_accepted_tokens_total": ("counter", OWN),
    "vllm:time_to_first_token_seconds": ("histogram", OWN),
    "vllm:inter_token_latency_seconds": ("histogram", OWN),
    "vllm:time_per_output_token_seconds": ("histogram", OWN),
    "vllm:request_time_per_output_token_seconds": ("histogram", OWN),
    "vllm:e2e_request_latency_seconds": ("histogram", OWN),
    "vllm:request_queue_time_seconds": ("histogram", OWN),
    "vllm:request_prefill_time_seconds": ("histogram", OWN),
    "vllm:request_decode_time_seconds": ("histogram", OWN),
    "vllm:iteration_tokens_total": ("histogram", OWN),
    "vllm:request_prompt_tokens": ("histogram", OWN),
    "vllm:request_generation_tokens": ("histogram", OWN),
    "vllm:request_max_num_generation_tokens": ("histogram", OWN),
    "process_cpu_seconds_total": ("counter", set()),
    "process_resident_memory_bytes": ("gauge", set()),
    "process_virtual_memory_bytes": ("gauge", set()),
    "process_start_time_seconds": ("gauge", set()),
    "process_open_fds": ("gauge", set()),
    "process_max_fds": ("gauge", set()),
    "oarlock:kv_event_batches_total": ("counter", OWN),
    "oarlock:kv_event_batches_dropped_total": ("counter", OWN),
    "oarlock:kv_event_overflows_total": ("counter", OWN),
}
PROMPT = "def add(a, b):\n    return a + b\n\n" * 8
MESSAGES = [{"role": "user", "content": "Write a function. " * 12}]
ROUTES = {
    ("GET", "/health"): (None, {"status"}),
    ("GET", "/v1/models"): (None, {"object", "data"}),
    ("GET", "/version"): (None, {"version"}),
    ("GET", "/load"): (None, {"server_load"}),
    ("GET", "/metrics"): (None, None),
    ("POST", "/tokenize"): ({"prompt": "one two"}, {"tokens", "count", "max_model_len"}),
    ("POST", "/detokenize"): ({"tokens": [40, 41]}, {"prompt"}),
    ("POST", "/v1/completions"): ({"prompt": "a", "max_tokens": 2}, {"id", "choices", "usage"}),
    ("POST", "/v1/chat/completions"): ({"messages": MESSAGES, "max_tokens": 2}, {"id", "choices", "usage"}),
    ("POST", "/v1/completions/render"): ({"prompt": "a"}, None),
    ("POST", "/v1/chat/completions/render"): ({"messages": MESSAGES}, {"request_id", "token_ids"}),
}


@pytest.fixture(scope="module")
def kv_events(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("kv")
    addresses = {"endpoint": f"ipc://{folder}/pub", "replay_endpoint": f"ipc://{folder}/replay"}
    return {"enable_kv_cache_events": True, "topic": TOPIC, **addresses}


@pytest.fixture(scope="module")
def server(kv_events):
    flags = ("--block-size", BLOCK_SIZE, "--kv-events-config", json.dumps(kv_events))
    with RunningServer(DEMO, *flags) as running:
        yield running


def families(server: RunningServer) -> dict:
    """Metric families by the name that a scraper sees on a sample."""
    found = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        found[f"{family.name}_total" if family.type == "counter" else family.name] = family
    return found


@pytest.mark.slow
def test_every_metric_has_its_name_type_and_labels(server):
    server.complete(PROMPT, max_tokens=4)
    found = families(server)
    for name, (kind, labels) in METRICS.items():
        assert found[name].type == kind, name
        assert found[name].samples, name
        for sample in found[name].samples:
            assert labels <= sample.labels.keys(), name
            if name.startswith("process_"):
                assert not sample.labels and sample.value > 0, name
                continue
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("oarlock-demo", "0")
    config = found["vllm:cache_config_info"].samples[0]
    assert config.value == 1 and config.labels["block_size"] == str(BLOCK_SIZE)
    assert int(config.labels["num_gpu_blocks"]) > 1
    for name, (kind, labels) in METRICS.items():
        row = re.search(rf"^\|.*`{re.escape(name)}`.*\| {kind} \|.*$", PAGE, re.MULTILINE)
        assert row, f"docs/routers.md has no row for {name}, {kind}"
        assert all(f"`{label}`" in row[0] for label in labels - OWN)


@pytest.mark.slow
def test_every_route_answers_as_routers_expect(server):
    for (method, path), (body, keys) in ROUTES.items():
        answer = server.client.request(method, path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        assert keys is None or keys <= answer.json().keys(), path
        assert f"`{method} {path}`" in PAGE, f"docs/routers.md has no row for {method} {path}"
    card = server.client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["root"], card["parent"]) == ("oarlock-demo", "oarlock-demo", None)
    assert card["max_model_len"] > 0
    (rendered,) = server.client.post("/v1/completions/render", json={"prompt": PROMPT}).json()
    assert rendered["token_ids"] == server.client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})],
)
def test_usage_is_on_the_last_chunk_with_cached_tokens(server, path, body):
    server.client.post(path, json={**body, "max_tokens": 3}).raise_for_status()
    fields = {**body, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    lines = server.client.post(path, json=fields).text.splitlines()
    *chunks, last, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert done == "[DONE]" and all(json.loads(chunk)["usage"] is None for chunk in chunks)
    usage, plain = json.loads(last)["usage"], server.client.post(path, json={**body, "max_tokens": 3}).json()["usage"]
    assert json.loads(last)["choices"] == [] and usage == plain
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


@pytest.mark.slow
def test_kv_events_tell_what_the_pool_of_a_running_server_has(server, kv_events):
    with reading(kv_events["endpoint"], kv_events["replay_endpoint"], TOPIC) as reader:
        for text in (PROMPT, "x = 1\n" * 40, PROMPT + "# more\n" * 30):
            server.complete(text, max_tokens=20, temperature=0)
        tokens = server.client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
        eventually(lambda: server.metrics()["vllm:num_requests_running"] == 0, READY_WITHIN_S, "nothing runs")
        found = reader.known(server)
    assert (found["lost"], found["ranks"], found["topics"]) == (0, [0], [TOPIC])
    assert num_held(found["blocks"], tokens, BLOCK_SIZE) == len(tokens) // BLOCK_SIZE


@pytest.mark.slow
def test_sigterm_ends_readiness_first_and_then_the_server_with_0(server):
    """The last test of this server: what runs finishes."""
    chunks: list[dict] = []
    fields = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
    client = threading.Thread(target=lambda: chunks.extend(server.stream("a = ", **fields)))
    client.start()
    eventually(lambda: server.metrics()["vllm:num_requests_running"] == 1, READY_WITHIN_S, "it runs")
    server.send(signal.SIGTERM)
    seen = eventually(lambda: _status_of(server) != 200 and _status_of(server), READY_WITHIN_S, "it is not ready")
    assert seen in (503, "gone")
    client.join(READY_WITHIN_S)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(READY_WITHIN_S) == 0


def _status_of(server: RunningServer) -> int | str:
    try:
        return httpx.get(f"{server.url}/health", timeout=30, trust_env=False).status_code
    except httpx.TransportError:
        return "gone"


@pytest.mark.soak
def test_an_address_that_cannot_be_used_ends_the_start_with_one_line_of_cause_and_one_of_fix(kv_events):
    """Before the model is read."""
    taken = {**kv_events, "endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://203.0.113.7:5557"}
    started = command("serve", DEMO, "--port", 0, "--kv-events-config", json.dumps(taken))
    result = subprocess.run(started, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert result.returncode == 3, result.stderr
    assert "replay_endpoint 'tcp://203.0.113.7:5557', which cannot be used" in result.stderr
    assert "Traceback" not in result.stderr and "event=loading" not in result.stderr
