"""Any bad body: a 4xx in OpenAI's exact shape that names the right field and echoes nothing large, never a 5xx."""

from __future__ import annotations

import dataclasses
import json
import socket
from contextlib import ExitStack

import anyio
import pytest

from oarlock.engine.errors import UnavailableError
from tests.contract.conftest import INFO

LONE = '"\\ud800"'


def fill(template: str, value: object) -> str:
    """`value` as JSON in the place of `%s`; text goes in as it is."""
    return template.replace("%s", value if isinstance(value, str) else json.dumps(value))


COMPLETION = '{"prompt":"x",%s}'

# (body, status, param)
ANYWHERE = [
    ("", 400, None),
    ("not json", 400, None),
    ("null", 400, None),
    ("[]", 400, None),
    ("5", 400, None),
    ('"text"', 400, None),
    ("[" * 100_000, 400, None),
    ('{"a":' * 250 + "1" + "}" * 250, 400, None),
    (b"\xef\xbb\xbf{}", 400, None),
    ('{"prompt":"x"}'.encode("utf-16"), 400, None),
    (b'{"prompt":"\xff"}', 400, None),
    ('{"prompt":"x"} trailing', 400, None),
    ('{"x":NaN,"prompt":"x","messages":[{"role":"user","content":"x"}]}', 400, None),
    ('{"prompt":"x","temperature":1,"temperature":0,"messages":[{"role":"user","content":"x"}]}', 400, None),
    ('{"prompt":"x","messages":[{"role":"user","content":"x","role":"system"}]}', 400, None),
    ('{"prompt":"x","later":{"a":[{"b":1,"b":1}]},"messages":[{"role":"user","content":"x"}]}', 400, None),
    ('{"x":[{"y":1e999}],"prompt":"x","messages":[{"role":"user","content":"x"}]}', 400, None),
    (
        fill(
            '{"prompt":"x","messages":[{"role":"user","content":"x"}],%s}',
            ",".join(f'"k{i}":0' for i in range(300_000)),
        ),
        400,
        None,
    ),
]
SHARED = [
    ('"model":5', 400, "model"),
    ('"model":"unknown"', 404, "model"),
    ('"model":"../../etc/passwd"', 404, "model"),
    (fill('"model":"%s"', ("m" * 1_000_000)), 400, "model"),
    ('"temperature":-1', 400, "temperature"),
    ('"temperature":2.1', 400, "temperature"),
    ('"temperature":NaN', 400, "temperature"),
    ('"temperature":Infinity', 400, "temperature"),
    ('"temperature":1e999', 400, "temperature"),
    ('"temperature":"1"', 400, "temperature"),
    ('"temperature":true', 400, "temperature"),
    ('"top_p":1.1', 400, "top_p"),
    ('"top_p":-0.1', 400, "top_p"),
    ('"top_k":-2', 400, "top_k"),
    ('"top_k":1' + "0" * 40, 400, "top_k"),
    ('"top_k":1.5', 400, "top_k"),
    ('"min_p":2', 400, "min_p"),
    ('"top_n_sigma":100.5', 400, "top_n_sigma"),
    ('"top_n_sigma":-1.5', 400, "top_n_sigma"),
    ('"n":0', 400, "n"),
    ('"n":1000000000', 400, "n"),
    ('"n":true', 400, "n"),
    ('"n":"2"', 400, "n"),
    ('"n":1.5', 400, "n"),
    ('"seed":1' + "0" * 200, 400, "seed"),
    ('"seed":9223372036854775808', 400, "seed"),
    ('"seed":1.5', 400, "seed"),
    ('"stop":""', 400, "stop"),
    ('"stop":[""]', 400, "stop"),
    ('"stop":5', 400, "stop"),
    ('"stop":[5]', 400, "stop"),
    (fill('"stop":%s', ["a"] * 65), 400, "stop"),
    (fill('"stop":"%s"', ("s" * 1_000_000)), 400, "stop"),
    (fill('"stop":%s', LONE), 400, None),
    ('"stop_token_ids":[-1]', 400, "stop_token_ids"),
    ('"stop_token_ids":[4096]', 400, "stop_token_ids"),
    (fill('"stop_token_ids":%s', list(range(129))), 400, "stop_token_ids"),
    ('"stream":"yes"', 400, "stream"),
    ('"stream":1', 400, "stream"),
    ('"stream_options":{"include_usage":true}', 400, "stream_options"),
    ('"stream":true,"stream_options":[]', 400, "stream_options"),
    ('"stream":true,"stream_options":{"include_usage":"yes"}', 400, "stream_options"),
    ('"ignore_eos":1', 400, "ignore_eos"),
    ('"min_tokens":-1', 400, "min_tokens"),
    (fill('"user":"%s"', ("u" * 1_000_000)), 400, "user"),
    ('"logit_bias":{"a":1}', 400, "logit_bias"),
    ('"logit_bias":{"-1":1}', 400, "logit_bias"),
    ('"logit_bias":{"01":1}', 400, "logit_bias"),
    ('"logit_bias":{"4096":1}', 400, "logit_bias"),
    ('"logit_bias":{"1":101}', 400, "logit_bias"),
    ('"logit_bias":{"1":NaN}', 400, "logit_bias"),
    ('"logit_bias":{"1":"5"}', 400, "logit_bias"),
    ('"logit_bias":[1]', 400, "logit_bias"),
    (fill('"logit_bias":%s', {str(i): 1 for i in range(1025)}), 400, "logit_bias"),
    ('"allowed_token_ids":[]', 400, "allowed_token_ids"),
    ('"allowed_token_ids":[4096]', 400, "allowed_token_ids"),
    ('"allowed_token_ids":[true]', 400, "allowed_token_ids"),
    ('"bad_words":"no"', 400, "bad_words"),
    ('"bad_words":[""]', 400, "bad_words"),
    (fill('"bad_words":%s', ["w"] * 129), 400, "bad_words"),
    (fill('"bad_words":%s', ["w" * 129]), 400, "bad_words"),
    ('"presence_penalty":2.1', 400, "presence_penalty"),
    ('"presence_penalty":false', 400, "presence_penalty"),
    ('"frequency_penalty":-2.1', 400, "frequency_penalty"),
    ('"frequency_penalty":1e999', 400, "frequency_penalty"),
    ('"repetition_penalty":0', 400, "repetition_penalty"),
    ('"repetition_penalty":101', 400, "repetition_penalty"),
    ('"include_stop_str_in_output":"yes"', 400, "include_stop_str_in_output"),
    ('"skip_special_tokens":0', 400, "skip_special_tokens"),
    ('"prompt_logprobs":21', 400, "prompt_logprobs"),
    ('"prompt_logprobs":-1', 400, "prompt_logprobs"),
    ('"return_token_ids":1', 400, "return_token_ids"),
    ('"return_tokens_as_token_ids":"a"', 400, "return_tokens_as_token_ids"),
    ('"truncate_prompt_tokens":0', 400, "truncate_prompt_tokens"),
    ('"truncate_prompt_tokens":-2', 400, "truncate_prompt_tokens"),
    ('"timeout":0', 400, "timeout"),
    ('"timeout":1e9', 400, "timeout"),
    ('"priority":11', 400, "priority"),
    ('"priority":-11', 400, "priority"),
    ('"cache_salt":""', 400, "cache_salt"),
    ('"cache_salt":"a b"', 400, "cache_salt"),
    ('"metadata":{"a":1}', 400, "metadata"),
    (fill('"metadata":%s', {str(i): "v" for i in range(17)}), 400, "metadata"),
    ('"store":"yes"', 400, "store"),
    ('"service_tier":"gold"', 400, "service_tier"),
    ('"use_beam_search":true', 400, "use_beam_search"),
    ('"lora_path":"sql"', 400, "lora_path"),
    ('"adapter_id":"sql"', 400, "adapter_id"),
    ('"lora":[{"id":0,"scale":0.5}]', 400, "lora"),
    ('"prompt_embeds":"AAAA"', 400, "prompt_embeds"),
    ('"response_format":{"type":"xml"}', 400, "response_format"),
    ('"response_format":{}', 400, "response_format"),
    ('"tools":[{"type":"function"}]', 400, "tools"),
    ('"tool_choice":"required"', 400, "tool_choice"),
    (fill('"cache_salt":"%s"', ("c" * 10_000)), 400, "cache_salt"),
    ('"guided_json":5', 400, "guided_json"),
    ('"guided_choice":"a"', 400, "guided_choice"),
    ('"structured_outputs":{"jsn":{}}', 400, "structured_outputs"),
]
ONLY_COMPLETIONS = [
    ("{}", 400, "prompt"),
    ('{"prompt":null}', 400, "prompt"),
    ('{"prompt":5}', 400, "prompt"),
    ('{"prompt":{}}', 400, "prompt"),
    ('{"prompt":""}', 400, "prompt"),
    ('{"prompt":[]}', 400, "prompt"),
    ('{"prompt":[[]]}', 400, "prompt"),
    ('{"prompt":["a",5]}', 400, "prompt"),
    ('{"prompt":[5,"a"]}', 400, "prompt"),
    ('{"prompt":[5,true]}', 400, "prompt"),
    ('{"prompt":[1.0]}', 400, "prompt"),
    ('{"prompt":[-1]}', 400, "prompt"),
    ('{"prompt":[4096]}', 400, "prompt"),
    ('{"prompt":[9223372036854775808]}', 400, "prompt"),
    ('{"prompt":[[[1]]]}', 400, "prompt"),
    ('{"prompt":[[1],"a"]}', 400, "prompt"),
    (fill('{"prompt":%s}', ["x"] * 1025), 400, "prompt"),
    (fill('{"prompt":%s}', [1] * 500_000), 400, "prompt"),
    (fill('{"prompt":%s}', LONE), 400, None),
    (fill('{"prompt":"%s"}', ("word " * 200_000)), 400, "prompt"),
    (fill('{"prompt":%s,"n":128}', ["x"] * 17), 400, "n"),
    (fill(COMPLETION, '"max_tokens":0'), 400, "max_tokens"),
    (fill(COMPLETION, '"max_tokens":-1'), 400, "max_tokens"),
    (fill(COMPLETION, '"max_tokens":2147483648'), 400, "max_tokens"),
    (fill(COMPLETION, '"max_tokens":true'), 400, "max_tokens"),
    (fill(COMPLETION, '"max_tokens":"5"'), 400, "max_tokens"),
    (fill(COMPLETION, '"max_tokens":1.5'), 400, "max_tokens"),
    (fill(COMPLETION, ('"max_tokens":1' + "0" * 5000)), 400, None),
    (fill(COMPLETION, '"min_tokens":17'), 400, "min_tokens"),
    (fill(COMPLETION, '"logprobs":21'), 400, "logprobs"),
    (fill(COMPLETION, '"logprobs":-1'), 400, "logprobs"),
    (fill(COMPLETION, '"logprobs":true'), 400, "logprobs"),
    (fill(COMPLETION, '"echo":"yes"'), 400, "echo"),
    (fill(COMPLETION, '"suffix":"end"'), 400, "suffix"),
    (fill(COMPLETION, '"suffix":"end","echo":true'), 400, "suffix"),
    (fill(COMPLETION, '"best_of":0'), 400, "best_of"),
    (fill(COMPLETION, '"best_of":129'), 400, "best_of"),
    (fill(COMPLETION, '"best_of":2,"stream":true'), 400, "best_of"),
    (fill(COMPLETION, '"n":2,"best_of":1'), 400, "best_of"),
    (fill('{"prompt":%s,"best_of":128}', ["x"] * 17), 400, "best_of"),
    (fill(COMPLETION, '"add_special_tokens":1'), 400, "add_special_tokens"),
]
ONLY_CHAT = [
    ("{}", 400, "messages"),
    ('{"messages":[]}', 400, "messages"),
    ('{"messages":"hi"}', 400, "messages"),
    ('{"messages":[5]}', 400, "messages[0]"),
    ('{"messages":[{"role":"user"}]}', 400, "messages[0]"),
    ('{"messages":[{"content":"x"}]}', 400, "messages[0].role"),
    ('{"messages":[{"role":"robot","content":"x"}]}', 400, "messages[0].role"),
    ('{"messages":[{"role":"user","content":null}]}', 400, "messages[0]"),
    ('{"messages":[{"role":"user","content":5}]}', 400, "messages[0].content"),
    ('{"messages":[{"role":"user","content":[]}]}', 400, "messages[0].content"),
    ('{"messages":[{"role":"user","content":[5]}]}', 400, "messages[0].content[0]"),
    (
        '{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x"}}]}]}',
        400,
        "messages[0].content[0].type",
    ),
    (fill('{"messages":%s}', [{"role": "user", "content": "x"}] * 4097), 400, "messages"),
    (fill('{"messages":[{"role":"user","content":"%s"}]}', ("word " * 100_000)), 400, "messages"),
    ('{"messages":[{"role":"user","content":"x"}],"max_tokens":0}', 400, "max_tokens"),
    ('{"messages":[{"role":"user","content":"x"}],"logprobs":5}', 400, "logprobs"),
    ('{"messages":[{"role":"user","content":"x"}],"top_logprobs":5}', 400, "top_logprobs"),
    ('{"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":21}', 400, "top_logprobs"),
]


def _cases():
    for path, needed, own in (
        ("/v1/completions", '"prompt":"x"', ONLY_COMPLETIONS),
        ("/v1/chat/completions", '"messages":[{"role":"user","content":"x"}]', ONLY_CHAT),
    ):
        shared = [("{" + needed + "," + fields + "}", status, param) for fields, status, param in SHARED]
        for body, status, param in [*ANYWHERE, *shared, *own]:
            yield path, body, status, param


def check_error(response, status, param):
    """OpenAI's shape: one key, and in it exactly four."""
    assert response.status_code == status, response.text[:300]
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 4096
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param
    assert len(body["error"]["message"]) > 10


@pytest.mark.slow
def test_every_bad_body_is_answered_in_shape(make_stage):
    stage = make_stage()
    cases = list(_cases())
    assert len(cases) > 160

    async def send():
        headers = {"Content-Type": "application/json"}
        async with stage.client(headers=headers, timeout=60) as client:
            for path, body, status, param in cases:
                response = await client.post(path, content=body)
                try:
                    check_error(response, status, param)
                except AssertionError as error:
                    raise AssertionError(f"{path} {body[:120]!r}: {error}") from error

    anyio.run(send)
    assert stage.engine.requests == []
    assert stage.state.num_in_flight == 0


def test_bad_streams_are_plain_http_errors(make_stage):
    stage = make_stage()

    async def send():
        async with stage.client() as client:
            for field, param in (({"temperature": 3}, "temperature"), ({"model": "nope"}, "model")):
                response = await client.post("/v1/completions", json={"prompt": "x", "stream": True, **field})
                check_error(response, 404 if param == "model" else 400, param)

    anyio.run(send)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/json; charset=utf-7", 415),
        ("", 415),
        ("application/json; charset=UTF-8", 200),
        ("application/vnd.api+json", 200),
    ],
)
def test_content_types(make_stage, content_type, status):
    async def send():
        async with make_stage().client() as client:
            return await client.post(
                "/v1/completions", content='{"prompt":"x"}', headers={"Content-Type": content_type}
            )

    response = anyio.run(send)
    if status == 200:
        assert response.status_code == 200
    else:
        check_error(response, status, None)


def test_compressed_and_oversized_bodies(make_stage):
    stage = make_stage(max_body_size=2048)
    body = fill('{"prompt":"%s"}', "x" * 4000)

    async def chunks():
        for start in range(0, len(body), 500):
            yield body[start : start + 500].encode()

    async def send():
        headers = {"Content-Type": "application/json"}
        async with stage.client(headers=headers) as client:
            check_error(await client.post("/v1/completions", content=body), 413, None)
            check_error(await client.post("/v1/completions", content=chunks()), 413, None)
            gzip = {"Content-Encoding": "gzip"}
            check_error(await client.post("/v1/completions", content="{}", headers=gzip), 415, None)

    anyio.run(send)


def test_routes_and_methods_that_do_not_exist(make_stage):
    async def send():
        async with make_stage().client() as client:
            check_error(await client.get("/nope"), 404, None)
            check_error(await client.get("/v1/images/generations"), 404, None)
            check_error(await client.post("/v1/" + "x" * 5000), 404, None)
            not_allowed = await client.get("/v1/completions")
            check_error(not_allowed, 405, None)
            assert not_allowed.headers["allow"] == "POST"
            message = not_allowed.json()["error"]["message"]
            assert message == "/v1/completions does not support GET. Send POST."
            check_error(await client.delete("/v1/models"), 405, None)

    anyio.run(send)


def test_an_unexpected_exception_is_a_500_without_details(make_stage, caplog):
    stage = make_stage()

    def broken(request):
        raise RuntimeError("secret /path/to/thing")

    stage.engine.reply = broken

    async def send(stream):
        async with stage.client() as client:
            return await client.post("/v1/completions", json={"prompt": "x", "stream": stream})

    for stream in (False, True):
        response = anyio.run(send, stream)
        assert response.status_code == 500
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "server_error"
        assert "secret" not in response.text
    assert "secret" in caplog.text


def test_a_lost_part_of_the_engine_is_a_503_with_its_code(make_stage):
    stage = make_stage(refuse=UnavailableError("It is lost. Retry later.", "grammar_process_lost"))

    async def send(stream):
        async with stage.client() as client:
            return await client.post("/v1/completions", json={"prompt": "x", "stream": stream})

    for stream in (False, True):
        response = anyio.run(send, stream)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        error = {"message": "It is lost. Retry later.", "type": "server_error", "param": None}
        assert response.json()["error"] == {**error, "code": "grammar_process_lost"}


def test_a_full_queue_is_a_429_with_retry_after(make_stage, queue_full):
    stage = make_stage(refuse=queue_full)

    async def send(stream):
        async with stage.client() as client:
            return await client.post("/v1/completions", json={"prompt": "x", "n": 3, "stream": stream})

    for stream in (False, True):
        response = anyio.run(send, stream)
        assert response.status_code == 429
        assert response.headers["Retry-After"] == "3"
        assert response.json()["error"]["code"] == "queue_full"
        assert response.json()["error"]["type"] == "rate_limit_error"


def test_a_full_queue_refuses_before_the_body_comes_and_keeps_the_connection(make_server, wait_for):
    """In one write, in the shape of each API; the key that has its share of the queue is heard."""
    info = dataclasses.replace(INFO, max_num_seqs=1, max_waiting_requests=2)
    server = make_server("ok", info=info, pause_after=0, api_key=("loud", "quiet"))
    head = "POST %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
    head += "Content-Length: %d\r\n\r\n"
    body = b'{"prompt": "x", "max_tokens": 3}'
    with ExitStack() as open_now:
        connect = lambda: open_now.enter_context(socket.create_connection(("127.0.0.1", server.port)))  # noqa: E731
        for _ in range(3):
            connect().sendall((head % ("/v1/completions", "loud", len(body))).encode() + body)
        wait_for(lambda: len(server.stage.engine.requests) == 3)
        raw = connect()
        for path, shape in (("/v1/chat/completions", "rate_limit_error"), ("/v1/messages", "rate_limit_error")):
            raw.sendall((head % (path, "loud", 2_000_000)).encode())
            answer = raw.recv(65536)  # whole, in one piece
            status, _, content = answer.partition(b"\r\n\r\n")
            assert status.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in status.lower()
            assert json.loads(content)["error"]["type"] == shape
            assert ("request_id" in json.loads(content)) == (path == "/v1/messages")
            raw.sendall(b"x" * 2_000_000)  # dropped
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert server.stage.counters.refused_unread == 2
        connect().sendall((head % ("/v1/completions", "quiet", len(body))).encode() + body)
        wait_for(lambda: len(server.stage.engine.requests) == 4)
        server.stage.engine.resume.set()


@pytest.mark.slow
def test_the_bodies_of_all_requests_together_are_bounded_and_every_way_out_gives_back(make_stage, monkeypatch):
    """Two are being received, then more come; and they end well, wrongly, too late, or by clients that leave."""
    stage = make_stage("ok", body_memory=2**20)
    memory, begun = stage.state.body_memory, b'{"prompt": "' + b"x" * 400_000

    async def scenario():
        ends = anyio.Event()

        async def slow():
            yield begun
            await ends.wait()
            yield b'"}'

        async with anyio.create_task_group() as group:
            group.start_soon(_post, stage, slow())
            group.start_soon(_leave, stage, begun, ends)
            while memory.num_bytes < 2 * len(begun):
                await anyio.sleep(0)
            refused = await _post(stage, begun + b'"}')
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "body_memory_full")
            assert refused.headers["retry-after"] == "1"
            announced = await _post(stage, b"{}", **{"Content-Length": "400000"})  # refused before it comes
            assert announced.status_code == 503
            assert memory.num_bytes == 2 * len(begun)
            assert (await _post(stage, b'{"prompt": "x", "max_tokens": 2}')).status_code == 200
            ends.set()
        assert memory.num_bytes == 0
        for content in (begun, begun + b'"}', b"[" * 900_000, b'{"prompt":"' + b"x" * 2**21 + b'"}'):
            assert (await _post(stage, content)).status_code == 400  # also one that is larger than the memory, alone
            assert memory.num_bytes == 0
        monkeypatch.setattr("oarlock.server.http.request_body.READ_TIMEOUT_S", 0.05)
        ends = anyio.Event()
        assert (await _post(stage, slow())).status_code == 408
        assert memory.num_bytes == 0

    anyio.run(scenario)


async def _leave(stage, begun, ends):
    """A client that sends the beginning of a body and then closes the connection."""
    messages = iter([{"type": "http.request", "body": begun, "more_body": True}, {"type": "http.disconnect"}])

    async def receive():
        message = next(messages)
        if message["type"] == "http.disconnect":
            await ends.wait()
        return message

    async def send(message):
        assert message.get("status", 499) == 499

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await stage.app(scope, receive, send)


async def _post(stage, content, **headers):
    async with stage.client(timeout=60) as client:
        headers = {"Content-Type": "application/json", **headers}
        return await client.post("/v1/completions", content=content, headers=headers)
