"""`/v1/completions` as bytes on the wire and as JSON: shapes, streaming, usage, logprobs, echo."""

from __future__ import annotations

import copy
import dataclasses
import http.client
import json
import re

import anyio
import pytest

TEXT = "Hello, wörld! 😀 中文"


def _post(stage, body, path="/v1/completions", **options):
    async def send():
        async with stage.client() as client:
            return await client.post(path, json=body, **options)

    return anyio.run(send)


def _events(response):
    assert response.text.endswith("data: [DONE]\n\n")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]


def _streamed_text(events, index=0):
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)


def test_a_plain_answer_has_exactly_the_documented_shape(make_stage):
    stage = make_stage(TEXT)
    body = _post(stage, {"prompt": "Hi", "max_tokens": 100}, headers={"X-Request-Id": "abc.1"}).json()
    num_tokens = len(stage.engine.reply(None)) + 1
    num_prompt = len(stage.engine.requests[0].prompt_token_ids)
    assert body.pop("created") > 1_600_000_000
    assert body.pop("system_fingerprint").startswith("fp_")
    assert body == {
        "id": "cmpl-abc.1",
        "object": "text_completion",
        "model": "demo",
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
        },
    }


def test_a_plain_answer_names_where_its_time_went(make_stage):
    header = _post(make_stage(delay_s=0.01), {"prompt": "x", "max_tokens": 4}).headers["Server-Timing"]
    spans = dict(part.split(";dur=") for part in header.split(", "))
    milliseconds = {name: float(duration) for name, duration in spans.items()}
    assert list(milliseconds) == ["prompt", "first-token", "rest", "total"]
    total = milliseconds.pop("total")
    assert total >= 4 * 10
    assert abs(sum(milliseconds.values()) - total) < 0.3  # each is rounded to a tenth
    assert "Server-Timing" not in _post(make_stage(), {"prompt": "x", "stream": True}).headers


def test_the_raw_bytes_of_a_stream(make_server):
    server = make_server("a😀")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"prompt": "Hi", "stream": True, "stream_options": {"include_usage": True}})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", "X-Request-Id": "r1"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    assert response.getheader("Cache-Control") == "no-cache"
    assert response.getheader("X-Accel-Buffering") == "no"
    assert response.getheader("X-Request-Id") == "r1"
    raw = response.read()
    assert b"\r" not in raw
    events = raw.split(b"\n\n")
    assert events[-1] == b""
    assert events[-2] == b"data: [DONE]"
    first = json.loads(events[0][6:])
    start = (
        f'data: {{"id":"cmpl-r1","object":"text_completion","created":{first["created"]},"model":"demo",'
        f'"system_fingerprint":"{first["system_fingerprint"]}","choices":[{{"index":0,"text":'
    )
    end = ',"logprobs":null,"finish_reason":null}],"usage":null}'
    assert events[0].decode() == f'{start}"a"{end}'
    assert events[1].decode() == f'{start}"😀"{end}'  # four tokens, one character, one event
    assert events[2].decode() == (
        f'{start}"","logprobs":null,"finish_reason":"stop","stop_reason":null}}],"usage":null}}'
    )
    last = json.loads(events[3][6:])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert len(events) == 6


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"max_tokens": 5},
        {"stop": "wör"},
        {"stop": ["!", "zzz", "Hello, wo"]},
        {"stop": "never there"},
        {"n": 3},
        {"logprobs": 2},
        {"echo": True, "logprobs": 1},
        {"echo": True, "max_tokens": 0},
        {"prompt": ["one", "two"], "n": 2},
        {"min_tokens": 4, "stop": "e"},
        {"stop": "wör", "include_stop_str_in_output": True},
        {"stop": "wör", "logprobs": 1, "n": 2},
        {"logprobs": 2, "return_tokens_as_token_ids": True},
        {"return_token_ids": True},
        {"return_token_ids": True, "echo": True, "logprobs": 0, "n": 2, "stop": "lo"},
        {"prompt_logprobs": 2},
        {"prompt_logprobs": 0, "echo": True, "max_tokens": 0, "return_token_ids": True},
        {"prompt_logprobs": 1, "echo": True, "logprobs": 3, "prompt": [[5, 6, 7], [8, 9]], "n": 2},
        {"truncate_prompt_tokens": 1, "echo": True, "logprobs": 1},
        {"skip_special_tokens": False, "ignore_eos": True},
        {"presence_penalty": 1, "logit_bias": {"5": 1}, "bad_words": ["x"], "allowed_token_ids": [5, 6]},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"response_format": {"type": "json_object"}, "n": 2, "stop": "}"},
        {"best_of": 2, "n": 2, "logprobs": 1},
        {"timeout": 60, "priority": 1, "cache_salt": "s"},
    ],
)
def test_a_stream_equals_the_plain_answer(make_stage, extra):
    payload = {"prompt": "Say hello", "max_tokens": 50, "temperature": 0, **extra}
    stage = make_stage(TEXT)
    plain = _post(stage, payload).json()
    response = _post(stage, {**payload, "stream": True, "stream_options": {"include_usage": True}})
    events = _events(response)
    assert events[-1]["usage"] == plain["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    for choice in plain["choices"]:
        chunks = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        ends = [chunk for chunk in chunks if chunk["finish_reason"] is not None]
        assert ends == chunks[-1:]
        assert ends[0]["finish_reason"] == choice["finish_reason"]
        assert ends[0]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"]:
            for key, values in choice["logprobs"].items():
                assert [v for chunk in chunks for v in chunk["logprobs"][key]] == values
        for key in ("prompt_logprobs", "prompt_token_ids"):
            assert [chunk[key] for chunk in chunks if key in chunk] == [choice[key] for _ in range(key in choice)]
        assert [token for chunk in chunks for token in chunk.get("token_ids", ())] == choice.get("token_ids", [])
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1


def test_no_usage_unless_asked_for(make_stage):
    for options in (None, {}, {"include_usage": False}):
        body = {"prompt": "x", "stream": True}
        if options is not None:
            body["stream_options"] = options
        assert all("usage" not in event for event in _events(_post(make_stage(), body)))


def test_stop_strings_cut_before_the_match_and_abort_the_engine(make_stage):
    stage = make_stage("The end. And more")
    choice = _post(stage, {"prompt": "x", "stop": [" And", "more"], "max_tokens": 50}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The end.", "stop", " And")
    assert stage.engine.aborted == [1]


def test_stop_token_ids_end_the_choice_and_are_not_shown(make_stage, tokenizer):
    stop_id = tokenizer.encode("!", add_special_tokens=False)[0]
    stage = make_stage("Hi")
    ids = tokenizer.encode("Hi", add_special_tokens=False)

    async def events(request):
        from oarlock.engine.types import FinishReason, TokenEvent

        yield TokenEvent(request.request_id, tuple(ids))
        yield TokenEvent(request.request_id, (stop_id,), finish_reason=FinishReason.STOP, stop_token_id=stop_id)

    stage.engine._events = events
    choice = _post(stage, {"prompt": "x", "stop_token_ids": [stop_id]}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hi", "stop", stop_id)


def test_logprobs_have_the_documented_shape(make_stage, tokenizer):
    stage = make_stage("a😀b", eos=False)
    body = _post(stage, {"prompt": "x", "logprobs": 2, "max_tokens": 6, "ignore_eos": True}).json()
    logprobs = body["choices"][0]["logprobs"]
    ids = stage.engine.reply(None)
    assert {len(values) for values in logprobs.values()} == {len(ids)} == {6}
    assert logprobs["tokens"][0] == "a"
    assert logprobs["tokens"][1] == "bytes:\\xf0"
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2]
    for token_id, token, logprob, top in zip(
        ids, logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob == (-0.5 if token_id % 7 else -9999.0)
        assert top[token] == logprob
        assert 2 <= len(top) <= 3


def test_echo_with_logprobs_scores_the_prompt(make_stage, tokenizer):
    ids = tokenizer.encode("def f(x):", add_special_tokens=False)
    stage = make_stage("!")
    payload = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choice = _post(stage, payload).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "def f(x):!"
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])
    texts = [choice["text"][a:] for a in logprobs["text_offset"]]
    assert all(text.startswith(token) for text, token in zip(texts, logprobs["tokens"], strict=True))


def test_scoring_only_generates_nothing(make_stage):
    stage = make_stage("never")
    payload = {"prompt": "def f(x):", "echo": True, "logprobs": 0, "max_tokens": 0}
    body = _post(stage, payload).json()
    assert body["choices"][0]["text"] == "def f(x):"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert stage.engine.requests[0].params.max_tokens == 0


def test_every_prompt_form_and_the_order_of_choices(make_stage, tokenizer):
    def reply(request):
        return list(request.prompt_token_ids)

    a, b = (tokenizer.encode(text, add_special_tokens=False) for text in ("first", "second"))
    for prompt in (["first", "second"], [a, b]):
        body = _post(make_stage(reply), {"prompt": prompt, "n": 2}).json()
        assert [choice["text"] for choice in body["choices"]] == ["first", "first", "second", "second"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == len(a) + len(b)
        assert body["usage"]["completion_tokens"] == 2 * (len(a) + len(b) + 2)
    for prompt in ("first", a):
        assert _post(make_stage(reply), {"prompt": prompt}).json()["choices"][0]["text"] == "first"


def test_null_means_default_everywhere(make_stage):
    stage = make_stage()
    fields = "model max_tokens temperature top_p top_k min_p seed n stop stream stream_options ignore_eos min_tokens"
    fields += " stop_token_ids user echo logprobs suffix logit_bias best_of presence_penalty"
    response = _post(stage, {"prompt": "x", **dict.fromkeys(fields.split())})
    assert response.status_code == 200
    params = stage.engine.requests[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (16, 1.0, 1.0, 0, 0.0)
    assert params.logprobs is None
    assert params.eos_token_ids


def test_parameters_reach_the_engine(make_stage):
    stage = make_stage()
    payload = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": -5, "min_tokens": 2, "logprobs": 3}
    payload["top_n_sigma"] = 1.5
    _post(stage, {"prompt": "x", "max_tokens": 9, "ignore_eos": True, "stop_token_ids": [7], **payload})
    params = stage.engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert params.top_n_sigma == 1.5
    assert (params.seed, params.min_tokens, params.logprobs, params.max_tokens) == (-5, 2, 3, 9)
    assert (params.eos_token_ids, params.stop_token_ids) == ((), (7,))


@pytest.mark.parametrize(
    ("payload", "temperature", "top_p", "top_k"),
    [
        ({"temperature": 0}, 0.0, 1.0, 0),
        ({"temperature": 1e-12}, 0.0, 1.0, 0),
        ({"top_p": 0}, 0.0, 1.0, 0),
        ({"top_k": -1}, 1.0, 1.0, 0),
        ({"top_k": 4096}, 1.0, 1.0, 0),
        ({"top_k": 2**31 - 1}, 1.0, 1.0, 0),
        ({"top_k": 5, "temperature": 2}, 2.0, 1.0, 5),
    ],
)
def test_extreme_sampling_values(make_stage, payload, temperature, top_p, top_k):
    stage = make_stage()
    assert _post(stage, {"prompt": "x", **payload}).status_code == 200
    params = stage.engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k) == (temperature, top_p, top_k)


def test_seeds_are_drawn_once_per_choice_and_given_ones_are_kept(make_stage):
    stage = make_stage()
    _post(stage, {"prompt": "x", "n": 4})
    _post(stage, {"prompt": "x", "n": 4})
    drawn = [request.params.seed for request in stage.engine.requests]
    assert len(set(drawn)) == 8
    stage = make_stage()
    _post(stage, {"prompt": ["x", "y"], "n": 3, "seed": 11})
    seeds = [request.params.seed for request in stage.engine.requests]
    assert seeds[0] == 11
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3


def test_max_tokens_is_a_ceiling(make_stage):
    stage = make_stage()
    assert _post(stage, {"prompt": "x", "max_tokens": 2**31 - 1}).status_code == 200
    assert stage.engine.requests[0].params.max_tokens == 256 - len(stage.engine.requests[0].prompt_token_ids)


def test_a_prompt_that_does_not_fit_is_refused_with_all_the_numbers(make_stage):
    response = _post(make_stage(), {"prompt": [5] * 300, "max_tokens": 10})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
    for number in ("256", "300", "10", "45"):
        assert number in error["message"]


def test_unknown_fields_are_reported_not_swallowed(make_stage):
    response = _post(make_stage(), {"prompt": "x", "temprature": 0, "bad name": 1})
    assert response.status_code == 200
    assert response.headers["X-Ignored-Parameters"] == "temprature, +1"
    assert "X-Ignored-Parameters" not in _post(make_stage(), {"prompt": "x", "suffix": None}).headers
    streamed = _post(make_stage(), {"prompt": "x", "temprature": 0, "stream": True})
    assert streamed.headers["X-Ignored-Parameters"] == "temprature"


def test_the_asked_for_alias_is_echoed(make_stage):
    assert _post(make_stage(), {"prompt": "x", "model": "alias/with/slash"}).json()["model"] == "alias/with/slash"


def test_a_silent_stream_is_kept_alive_by_comments(make_server, monkeypatch, wait_for):
    monkeypatch.setattr("oarlock.server.http.server_sent_events.PING_INTERVAL_S", 0.02)
    monkeypatch.setattr("oarlock.server.llm.generation.FIRST_EVENT_TIMEOUT_S", 0.01)
    server = make_server("a", pause_after=0)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"prompt": "Hi", "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline() == b": ping\n"
    assert response.readline() == b"\n"
    server.stage.engine.resume._loop.call_soon_threadsafe(server.stage.engine.resume.set)
    lines = [line for line in response.read().split(b"\n") if line and not line.startswith(b":")]
    assert lines[-1] == b"data: [DONE]"
    assert json.loads(lines[0][6:])["choices"][0]["text"] == "a"


def test_a_late_refusal_travels_in_the_stream(make_stage, monkeypatch, queue_full):
    monkeypatch.setattr("oarlock.server.llm.generation.FIRST_EVENT_TIMEOUT_S", 0.01)
    stage = make_stage()

    async def late(request):
        await anyio.sleep(0.05)
        raise queue_full
        yield

    stage.engine._events = late
    response = _post(stage, {"prompt": "x", "stream": True})
    assert response.status_code == 200
    assert [event["error"]["code"] for event in _events(response)] == ["queue_full"]


def test_one_line_per_request_without_its_text(make_stage, caplog):
    stage = make_stage("secret answer", enable_log_requests=True)
    caplog.set_level("INFO", "oarlock")
    _post(stage, {"prompt": "secret prompt", "user": "secret user"}, headers={"X-Request-Id": "id7"})
    lines = [record.message for record in caplog.records if "request_done" in record.message]
    assert len(lines) == 1
    assert "request_id=id7" in lines[0]
    assert "finish=stop" in lines[0]
    assert "secret" not in caplog.text
    _post(make_stage(), {"prompt": "x"})
    assert len([record for record in caplog.records if "request_done" in record.message]) == 1


TOO_LONG = {
    "words": "some words " * 20_000,
    "no words": "x" * 200_000,
    "other words": "字符。" * 50_000,
    "marks": "<|im_end|> " * 20_000,
}


@pytest.mark.parametrize(("form", "kind"), [
    *(("text", kind) for kind in TOO_LONG), *((form, "words") for form in ("list", "chat", "suffix", "render"))
])  # fmt: skip
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(make_stage, tokenizer, monkeypatch, kind, form):
    stage, seen, encode = make_stage(), [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **how: (seen.append(len(text)), encode(text, **how))[1])
    monkeypatch.setattr(type(tokenizer), "fim_token_ids", (5, 6, 7))
    text, path, param = TOO_LONG[kind], "/v1/completions", "prompt"
    body: dict = {"prompt": text}
    if form == "list":
        body = {"prompt": ["a", text]}
    elif form == "chat":
        path, param, body = "/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": text}]}
    elif form == "suffix":
        param, body = "suffix", {"prompt": "a", "suffix": text}
    elif form == "render":
        path = "/v1/completions/render"
    response = _post(stage, body, path=path)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    least = int(re.search(r"at least (\d+) tokens and", error["message"])[1])
    assert 256 <= least <= len(encode(text, add_special_tokens=False))
    assert f"remove at least {least - 255} tokens" in error["message"]
    assert sum(seen) < 10, "characters tokenized"
    assert stage.engine.requests == []


def test_the_end_of_a_long_text_is_kept_and_no_more_is_tokenized(make_stage, tokenizer, monkeypatch):
    words = "".join(f"word{number} " for number in range(20_000))
    whole = tokenizer.encode(words)
    stage, seen, encode = make_stage(), [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **how: (seen.append(len(text)), encode(text, **how))[1])
    for keep, kept in ((1, 1), (20, 20), (-1, 255)):
        response = _post(stage, {"prompt": words, "truncate_prompt_tokens": keep, "max_tokens": 1, "echo": True})
        assert response.status_code == 200
        assert stage.engine.requests[-1].prompt_token_ids == tuple(whole[-kept:])
        assert response.json()["choices"][0]["text"].startswith(tokenizer.decode(whole[-kept:]))
    assert sum(seen) < 3 * 80_000
    seen.clear()
    for keep, kept in ((1, 1), (20, 20), (-1, 255)):
        fields = {"truncate_prompt_tokens": keep, "truncation_side": "right", "max_tokens": 1}
        assert _post(stage, {"prompt": words, **fields}).status_code == 200
        assert stage.engine.requests[-1].prompt_token_ids == tuple(whole[:kept])
    assert sum(seen) < 3 * 80_000
    assert (
        _post(stage, {"prompt": "word0", "truncate_prompt_tokens": 200, "truncation_side": "right"}).status_code == 200
    )
    assert stage.engine.requests[-1].prompt_token_ids == tuple(tokenizer.encode("word0"))
    response = _post(stage, {"prompt": words, "truncate_prompt_tokens": 400})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_the_fingerprint_covers_what_computes_and_what_turns_text_into_ids(make_stage):
    stage = make_stage(TEXT)

    def fingerprint():
        return _post(stage, {"prompt": "Hi", "max_tokens": 1}).json()["system_fingerprint"]

    first = fingerprint()
    assert fingerprint() == first
    stage.engine.info = dataclasses.replace(stage.engine.info, numbers_digest="another")
    second = fingerprint()
    stage.state.async_llm.input_processor.tokenizer = copy.copy(stage.state.async_llm.input_processor.tokenizer)
    stage.state.async_llm.input_processor.tokenizer.digest = "another"
    assert len({first, second, fingerprint()}) == 3
