"""API keys, the Host header, request ids, models, metrics, and limits of connections over HTTP."""

from __future__ import annotations

import json
import re
import socket

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from oarlock.server.config.options import OptionError
from oarlock.server.endpoints import serving
from oarlock.server.observability.metrics import exposition

OPEN = {"/", "/health", "/health/live", "/health/ready", "/version", "/metrics", "/v1/state"}


def _get(stage, path, **options):
    async def send():
        async with stage.client() as client:
            return await client.get(path, **options)

    return anyio.run(send)


def test_every_route_but_the_open_ones_requires_the_key(make_stage):
    stage = make_stage(api_key=("first", "second"), admin_api_key="third")
    paths = [*json.loads(_get(make_stage(), "/openapi.json").text)["paths"], "/openapi.json", "/docs", "/nope", "/"]
    assert len(paths) > 9
    for path in paths:
        status = _get(stage, path.replace("{model}", "demo")).status_code
        assert (status != 401) == (path in OPEN), path
    for header, status in (
        ("Bearer first", 200),
        ("bearer second", 200),
        ("Bearer third", 401),
        ("Bearer ", 401),
        ("Basic first", 401),
        ("first", 401),
    ):
        response = _get(stage, "/v1/models", headers={"Authorization": header})
        assert response.status_code == status, header
        if status == 401:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert response.json()["error"]["type"] == "authentication_error"


def test_metrics_require_the_key_unless_the_server_listens_on_loopback(make_stage):
    assert _get(make_stage(api_key=("k",), host="0.0.0.0"), "/metrics").status_code == 401
    assert _get(make_stage(api_key=("k",), host="0.0.0.0"), "/health").status_code == 200
    for_routers = make_stage(api_key=("k",), host="0.0.0.0", open_metrics=True)
    assert _get(for_routers, "/metrics").status_code == 200
    assert _get(for_routers, "/v1/models").status_code == 401


_ANYWHERE = ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "192.168.7.5:8000", "[fe80::1]")
_IN_A_NETWORK = ("oarlock:8000", "gpu_box", "llm.local:8000", "host.docker.internal", "oarlock.prod.svc.cluster.local")
_FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "evil.local.example",
)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "192.168.7.5"])
def test_a_foreign_host_header_is_refused_wherever_the_server_listens(make_stage, host):
    stage = make_stage(host=host)
    named = {name: _get(stage, "/v1/models", headers={"Host": name}) for name in _ANYWHERE + _IN_A_NETWORK + _FOREIGN}
    allowed = {name for name, response in named.items() if response.status_code == 200}
    assert allowed == set(_ANYWHERE if host == "127.0.0.1" else _ANYWHERE + _IN_A_NETWORK)
    refusal = named["evil.example:8000"].json()["error"]
    assert (named["evil.example:8000"].status_code, refusal["code"]) == (403, "host_not_allowed")
    assert "'evil.example'" in refusal["message"]
    assert "--allowed-hosts" in refusal["message"]
    assert _get(stage, "/health", headers={"Host": "evil.example"}).status_code == 200  # probes are open


def test_the_operator_may_allow_more_hosts(make_stage):
    stage = make_stage(allowed_hosts=("LLM.example.org", "*.lan"))
    for host, status in (
        ("llm.example.org", 200),
        ("llm.example.org.:443", 200),
        ("a.b.lan", 200),
        ("lan", 403),
        ("evil-lan", 403),
        ("example.org", 403),
        ("x.llm.example.org", 403),
    ):
        assert _get(stage, "/v1/models", headers={"Host": host}).status_code == status, host
    assert _get(make_stage(allowed_hosts=("*",)), "/v1/models", headers={"Host": "evil.example"}).status_code == 200


def test_with_keys_the_host_header_is_checked_only_on_open_routes(make_stage):
    stage = make_stage(api_key=("k",))
    foreign = {"Host": "llm.example.org"}
    assert _get(stage, "/v1/models", headers=foreign | {"Authorization": "Bearer k"}).status_code == 200
    assert _get(stage, "/v1/models", headers=foreign).status_code == 401
    assert _get(stage, "/metrics", headers=foreign).status_code == 403


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/", "/nope"])
def test_two_host_headers_are_refused(make_stage, path):
    answer = _get(make_stage(api_key=("k",)), path, headers=[("Host", "localhost"), ("Host", "localhost")])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_host")


def test_request_ids_are_echoed_or_replaced(make_stage):
    stage = make_stage()
    assert _get(stage, "/v1/models", headers={"X-Request-Id": "a-B_c.9"}).headers["x-request-id"] == "a-B_c.9"
    assert _get(stage, "/nope", headers={"X-Request-Id": "kept"}).headers["x-request-id"] == "kept"
    for bad in ("", "x" * 65, "a b", "a/b", "http://169.254.169.254/", "ä".encode()):
        given = _get(stage, "/v1/models", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{24}", given)


def test_no_origin_is_ever_allowed(make_stage):
    response = _get(make_stage(), "/v1/models", headers={"Origin": "http://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_models_describe_the_served_model(make_stage):
    stage = make_stage()
    body = _get(stage, "/v1/models").json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["demo", "alias/with/slash"]
    card = _get(stage, "/v1/models/alias/with/slash").json()
    assert (card["object"], card["root"], card["parent"]) == ("model", "demo", None)
    assert (card["max_model_len"], card["dtype"], card["tensor_parallel_size"]) == (256, "float32", 2)
    assert card["kv_cache_dtype"] == "int8"
    assert card["tokenizer_digest"] == stage.state.async_llm.input_processor.tokenizer.digest
    assert card["numbers_digest"] == stage.engine.info.numbers_digest
    assert _get(stage, "/v1/models/nope").status_code == 404


def test_scrapes_at_the_same_time_share_one_page_and_later_ones_are_new(make_stage, monkeypatch):
    made = []
    monkeypatch.setattr(serving, "exposition", lambda *given: made.append(given) or exposition(*given))
    stage = make_stage()

    async def send():
        async with stage.client() as client, anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(client.get, "/metrics")
        assert len(made) <= 2
        async with stage.client() as client:
            await client.get("/version")
            return (await client.get("/metrics")).text

    assert (
        'oarlock:http_responses_total{method="GET",model_name="demo",route="/version",status="200"} 1.0'
        in anyio.run(send)
    )


def test_metrics_have_the_fields_names_and_reconcile_with_usage(make_stage):
    stage = make_stage("one two three")
    stage.engine.numbers.num_requests_running = 3
    stage.engine.numbers.num_refused_steps = 2
    stage.engine.numbers.kv_cache_usage = 0.25
    stage.engine.numbers.time_to_first_token_s.observe(0.3)

    async def send():
        totals = [0, 0]
        async with stage.client() as client:
            for extra in ({}, {"n": 3}, {"prompt": ["a", "b"]}, {"stop": "two"}, {"max_tokens": 1}):
                usage = (await client.post("/v1/completions", json={"prompt": "xyz", **extra})).json()["usage"]
                totals = [totals[0] + usage["prompt_tokens"], totals[1] + usage["completion_tokens"]]
            await client.post("/v1/completions", json={"prompt": "x", "n": 0})
        return totals

    prompt, completion = anyio.run(send)
    page = _get(stage, "/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(page.text)}
    values = {
        sample.name: sample.value
        for family in families.values()
        for sample in family.samples
        if len(sample.labels) == 2
    }
    assert values["vllm:prompt_tokens_total"] == prompt
    assert values["vllm:generation_tokens_total"] == completion
    assert values["vllm:num_requests_running"] == 3
    assert values["oarlock:refused_steps_total"] == 2
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        assert values[name] == 0.25
    for name in ("prefix_cache_queries", "prefix_cache_hits", "gpu_prefix_cache_queries", "gpu_prefix_cache_hits"):
        assert values[f"vllm:{name}_total"] == 0
    for name in ("inter_token_latency", "request_time_per_output_token", "e2e_request_latency", "request_queue_time"):
        assert f"vllm:{name}_seconds" in families
    ttft = {
        s.labels.get("le"): s.value for s in families["vllm:time_to_first_token_seconds"].samples if "le" in s.labels
    }
    assert (ttft["0.25"], ttft["0.5"], ttft["+Inf"]) == (0, 1, 1)
    finished = {s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples}
    assert finished == {"stop": 7, "length": 1, "timeout": 0, "abort": 0, "error": 0}
    info = families["vllm:cache_config_info"].samples[0].labels
    assert info == {
        "model_name": "demo", "engine": "0", "block_size": "16", "num_gpu_blocks": "65", "cache_dtype": "int8",
        "bytes_per_token_per_rank": "2048",
    }  # fmt: skip
    longest = {s.name: s.value for s in families["vllm:request_max_num_generation_tokens"].samples}
    assert longest["vllm:request_max_num_generation_tokens_count"] == 6, "one of each prompt, however many answers"
    assert longest["vllm:request_max_num_generation_tokens_sum"] < completion
    older, newer = (
        families[f"vllm:{name}_seconds"].samples for name in ("time_per_output_token", "inter_token_latency")
    )
    assert [(s.labels, s.value) for s in older] == [(s.labels, s.value) for s in newer]
    process = {
        s.name: (s.labels, s.value > 0) for name, f in families.items() if name[:8] == "process_" for s in f.samples
    }
    names = ("cpu_seconds_total", "resident_memory_bytes", "virtual_memory_bytes", "start_time_seconds", "open_fds")
    assert {f"process_{name}" for name in names} <= process.keys() and set(map(str, process.values())) == {"({}, True)"}
    ours = [family for name, family in families.items() if name[:8] != "process_"]
    assert all(s.labels["model_name"] == "demo" for family in ours for s in family.samples)


def test_names_of_metrics_may_begin_otherwise(make_stage):
    page = _get(make_stage(metrics_prefix="llm:"), "/metrics").text
    usual = _get(make_stage(), "/metrics").text
    assert "# TYPE llm:prompt_tokens_total counter" in page and "\noarlock:kv_blocks_total{" in page
    assert "\nvllm:" not in page and "\nllm:" not in usual
    names = [re.findall(r"^[\w:]+", text, re.MULTILINE) for text in (page, usual)]
    assert names[0] == [name.replace("vllm:", "llm:") for name in names[1]]


@pytest.mark.parametrize("prefix", ["", "9:", "a b", "oarlock:", "x" * 65])
def test_a_prefix_that_makes_no_name_is_refused(make_stage, prefix):
    with pytest.raises(OptionError, match="--metrics-prefix") as caught:
        make_stage(metrics_prefix=prefix)
    assert "For example" in caught.value.fix


def test_the_openapi_document_holds_every_limit_and_no_dangling_reference(make_stage):
    document = _get(make_stage(), "/openapi.json").json()
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    assert set(re.findall(r'"#/([^"]*)"', text)) == {f"components/schemas/{name}" for name in schemas}
    completion = schemas["CompletionRequest"]["properties"]
    assert completion["n"]["anyOf"][0] == {"maximum": 128, "minimum": 1, "type": "integer"}
    assert completion["logprobs"]["anyOf"][0]["maximum"] == 20
    assert document["openapi"].startswith("3.1")


def test_metric_series_do_not_grow_with_hostile_requests(make_stage):
    stage = make_stage()

    async def send():
        async with stage.client() as client:
            for number in range(50):
                await client.request(f"M{number}", f"/path{number}", headers={"X-Request-Id": str(number)})

    anyio.run(send)
    answers = [key for key in stage.counters.responses if key[1] == "other"]
    assert answers == [("other", "other", 404)]


def _raw(port, data, close=False):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(200)) + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nX-Big: " + b"x" * 40_000, 431),
    ],
)
def test_broken_and_oversized_heads_get_an_error_body_and_are_closed(make_server, head, status):
    answer = _raw(make_server().port, head)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert set(json.loads(answer.split(b"\r\n\r\n")[1])["error"]) == {"message", "type", "param", "code"}


@pytest.mark.slow
def test_a_head_that_never_ends_is_closed(make_server, monkeypatch):
    monkeypatch.setattr("oarlock.server.http.connection.HEAD_TIMEOUT_S", 0.05)
    port = make_server().port
    assert _raw(port, b"") == b""
    assert _raw(port, b"POST /v1/completions HTTP/1.1\r\nHost:").startswith(b"HTTP/1.1 408 ")
    again = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\nGET /version HTT"
    assert b"HTTP/1.1 408 " in _raw(port, again)


def test_a_body_that_never_arrives_is_given_up(make_server, monkeypatch):
    monkeypatch.setattr("oarlock.server.http.request_body.READ_TIMEOUT_S", 0.05)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    answer = _raw(make_server().port, head + b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert set(json.loads(answer.split(b"\r\n\r\n")[1])["error"]) == {"message", "type", "param", "code"}


@pytest.mark.slow
def test_a_client_that_never_reads_is_dropped(make_server, wait_for, monkeypatch, caplog):
    monkeypatch.setattr("oarlock.server.http.server_sent_events.SEND_TIMEOUT_S", 0.2)
    server = make_server(lambda request: [300] * 200, eos=False)
    body = json.dumps({"prompt": ["x"] * 16, "n": 4, "stream": True, "max_tokens": 200, "logprobs": 20}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % len(body) + body)
    wait_for(lambda: server.stage.engine.requests)
    wait_for(lambda: server.stage.state.num_in_flight == 0)
    assert "event=slow_client_dropped" in caplog.text
    assert server.stage.state.async_llm.open == set()
    connection.close()
