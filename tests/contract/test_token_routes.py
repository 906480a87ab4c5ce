"""The routes around generation: tokens, rendered prompts, load, keys, strictness, and what is not served."""

from __future__ import annotations

import json
import re
from pathlib import Path

import anyio
import pytest

from oarlock.base.errors import StartupError
from oarlock.server.http.api_keys import load_keys
from oarlock.server.schemas.generation import CompletionRequest

MESSAGES = [{"role": "user", "content": "x"}]


def _send(stage, *calls, **options):
    async def send():
        async with stage.client(**options) as client:
            return [await client.request(method, path, json=body) for method, path, body in calls]

    return anyio.run(send)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_text_to_tokens_and_back(make_stage, tokenizer, prefix):
    text = "def wörld(): 😀"
    payload = {"prompt": text, "return_token_strs": True}
    (answer,) = _send(make_stage(), ("POST", f"{prefix}/tokenize", payload))
    ids = tokenizer.encode(text)
    assert answer.json() == {
        "count": len(ids),
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": [tokenizer.token_text(token) for token in ids],
    }
    back, special, empty = _send(
        make_stage(),
        ("POST", f"{prefix}/detokenize", {"tokens": ids}),
        ("POST", f"{prefix}/detokenize", {"tokens": [1, *ids]}),
        ("POST", f"{prefix}/tokenize", {"prompt": ""}),
    )
    assert back.json() == {"prompt": text}
    assert special.json() == {"prompt": "<|im_start|>" + text}
    assert empty.json() == {"count": 0, "max_model_len": 256, "tokens": [], "token_strs": None}


def test_a_conversation_to_tokens_matches_the_rendered_chat(make_stage):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    tokens, rendered = _send(
        make_stage(),
        ("POST", "/tokenize", {"messages": messages}),
        ("POST", "/v1/chat/completions/render", {"messages": messages, "max_tokens": 7}),
    )
    body = rendered.json()
    assert body["token_ids"] == tokens.json()["tokens"]
    assert "Be brief." in body["text"] and "<|im_start|>" in body["text"]
    assert body["parameters"]["max_tokens"] == 7


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "x", "model": "nope"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
def test_wrong_tokens_are_refused_by_name(make_stage, path, body, param):
    (answer,) = _send(make_stage(), ("POST", path, body))
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_a_rendered_completion_generates_nothing(make_stage, tokenizer):
    stage = make_stage()
    (answer,) = _send(stage, ("POST", "/v1/completions/render", {"prompt": ["one", "two"], "n": 2, "stream": True}))
    prompts = answer.json()
    assert [prompt["token_ids"] for prompt in prompts] == [tokenizer.encode(text) for text in ("one", "two")]
    assert stage.engine.requests == []
    assert stage.state.async_llm.open == set()


def test_render_shows_what_the_engine_would_get(make_stage, tokenizer):
    stage = make_stage()
    payload = {"prompt": "one", "n": 2, "seed": 3, "temperature": 1e-9, "max_tokens": 10**6, "logit_bias": {"5": 1}}
    payload["stop"] = "x"
    rendered, _ = _send(stage, ("POST", "/v1/completions/render", payload), ("POST", "/v1/completions", payload))
    (body,) = rendered.json()
    params = stage.engine.requests[0].params
    reported = body["parameters"]
    assert (body["text"], body["token_ids"], body["num_tokens"]) == ("one", tokenizer.encode("one"), 1)
    assert (reported["temperature"], reported["max_tokens"]) == (0.0, params.max_tokens)
    assert reported["seeds"] == [request.params.seed for request in stage.engine.requests]
    assert reported["logit_bias"] == [[5, 1.0]]
    assert reported["stop"] == ["x"]
    assert body["choices_per_prompt"] == 2
    assert len(stage.engine.requests) == 2


def test_load_leaves_its_own_request_out(make_stage):
    stage = make_stage()
    stage.engine.numbers.num_requests_running = 3
    stage.engine.numbers.num_waiting_tokens = 50
    (answer,) = _send(stage, ("GET", "/load", None))
    assert answer.json() == {
        "server_load": 0,
        "requests_running": 3,
        "requests_waiting": 0,
        "tokens_waiting": 50,
        "kv_cache_usage": 0.0,
    }


def test_strict_servers_refuse_what_others_report(make_stage):
    payload = {"prompt": "x", "zeta": 1, "alpha": 2, "stream": True, "stream_options": {"include_usge": True}}
    lax = make_stage()
    (answer,) = _send(lax, ("POST", "/v1/completions", payload))
    assert answer.status_code == 200
    assert answer.headers["X-Ignored-Parameters"] == "alpha, stream_options.include_usge, zeta"
    assert lax.counters.ignored_parameters == 3
    (page,) = _send(lax, ("GET", "/metrics", None))
    assert 'oarlock:ignored_parameters_total{engine="0",model_name="demo"} 3.0' in page.text
    strict = make_stage(strict_parameters=True)
    (answer,) = _send(strict, ("POST", "/v1/completions", payload))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "alpha", "unknown_parameter")
    assert strict.engine.requests == []
    (answer,) = _send(strict, ("POST", "/tokenize", {"prompt": "x", "typo": 1}))
    assert answer.json()["error"]["param"] == "typo"


def test_the_report_of_ignored_fields_is_bounded(make_stage):
    payload = {"prompt": "x", **{f"field_{number:03}": 0 for number in range(200)}, "bad\nname": 1}
    (answer,) = _send(make_stage(), ("POST", "/v1/completions", payload))
    names = answer.headers["X-Ignored-Parameters"].split(", ")
    assert names == [*(f"field_{number:03}" for number in range(32)), "+169"]


@pytest.mark.parametrize("path", ["/v1/moderations", "/v1/assistants", "/v1/images/edits", "/v1/audio/speech"])
def test_routes_of_other_servers_are_refused_by_name(make_stage, path):
    for method in ("GET", "POST"):
        (answer,) = _send(make_stage(), (method, path, {}))
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "route_not_supported")
        assert "/v1/completions" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions/", "/health/", "/v1/models/"])
def test_a_slash_too_many_is_an_error_and_no_redirect(make_stage, path):
    for method in ("GET", "POST"):
        (answer,) = _send(make_stage(), (method, path, {"prompt": "x"}))
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [5, 6], "max_tokens": 255}, "max_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 256}, "max_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 256}, "max_completion_tokens"),
    ],
)
def test_a_token_limit_beyond_the_context_is_cut_or_refused(make_stage, path, body, param):
    (answer,) = _send(make_stage(), ("POST", path, body))
    assert answer.status_code == 200
    stage = make_stage(strict_max_tokens=True)
    answer, fits, free = _send(
        stage, ("POST", path, body), ("POST", path, {**body, param: 100}), ("POST", path, {**body, param: None})
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert str(body[param]) in error["message"]
    assert (fits.status_code, free.status_code) == (200, 200)


@pytest.mark.parametrize("payload", [{}, {"stream_options": {"include_usage": False}}])
def test_usage_ends_every_stream_where_the_operator_wants_it(make_stage, payload):
    for reported in (False, True):
        stage = make_stage(always_stream_usage=reported)
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES})):
            (answer,) = _send(stage, ("POST", path, {**body, **payload, "stream": True}))
            last = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))
            assert (last["choices"] == [] and last["usage"]["completion_tokens"] > 0) == reported


def test_names_in_other_letters_are_known_where_the_operator_wants_it(make_stage):
    calls = [
        ("POST", "/v1/completions", {"prompt": "x", "model": "DEMO"}),
        ("GET", "/v1/models/Alias/With/Slash", None),
    ]
    assert [answer.status_code for answer in _send(make_stage(), *calls)] == [404, 404]
    answer, card = _send(make_stage(ignore_model_case=True), *calls)
    assert (answer.json()["model"], card.json()["id"]) == ("DEMO", "Alias/With/Slash")
    (unknown,) = _send(make_stage(ignore_model_case=True), ("GET", "/v1/models/dem", None))
    assert unknown.status_code == 404


def test_tokens_are_counted_by_key(make_stage):
    stage = make_stage("one two", api_key=("a", "b"))
    used = {}
    for key, label in (("a", "key-1"), ("b", "key-2"), ("a", "key-1")):
        call = ("POST", "/v1/completions", {"prompt": "x", "n": 2})
        (answer,) = _send(stage, call, headers={"Authorization": f"Bearer {key}"})
        usage = answer.json()["usage"]
        before = used.get(label, (0, 0, 0))
        used[label] = (before[0] + 1, before[1] + usage["prompt_tokens"], before[2] + usage["completion_tokens"])
    (page,) = _send(stage, ("GET", "/metrics", None))
    for position, name in enumerate(("requests", "prompt_tokens", "generation_tokens")):
        found = re.findall(rf'^oarlock:key_{name}_total{{.*key="(.*?)".*}} (.*)$', page.text, re.MULTILINE)
        assert {label: float(value) for label, value in found} == {k: v[position] for k, v in used.items()}


def test_keys_from_a_file_beside_those_given(make_stage, tmp_path, caplog):
    file = tmp_path / "keys.txt"
    file.write_text("# ours\n\nalice secret-a\nsecret-b\n")
    stage = make_stage(api_key=("first",), api_key_file=str(file), enable_log_requests=True)
    caplog.set_level("INFO", "oarlock")
    for key, status in (("first", 200), ("secret-a", 200), ("secret-b", 200), ("alice", 401), ("# ours", 401)):
        call = ("POST", "/v1/completions", {"prompt": "x", "user": "bob"})
        (answer,) = _send(stage, call, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == status, key
    lines = [record.message for record in caplog.records if "request_done" in record.message]
    assert ["client=key-1/user:" in lines[0], "client=alice/user:" in lines[1], "client=key-3/user:" in lines[2]] == [
        True
    ] * 3
    assert "secret" not in caplog.text
    assert "bob" not in caplog.text


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "cannot be read"),
        (b"", "contains no key"),
        (b"# only\n", "contains no key"),
        (b"a b c\n", "Line 1"),
        (b"\xff", "UTF-8"),
    ],
)
def test_a_wrong_key_file_keeps_the_server_from_opening(tmp_path, content, cause):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartupError, match=cause):
        load_keys((), str(file))


def test_a_request_id_is_on_every_answer(make_stage):
    calls = [
        ("POST", "/v1/completions", {"prompt": "x", "stream": True}),
        ("POST", "/v1/completions", {"prompt": "x", "n": 0}),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("GET", "/nope", None),
        ("GET", "/health/live", None),
    ]
    for answer in _send(make_stage(), *calls, headers={"X-Request-Id": "mine-7"}):
        assert answer.headers["x-request-id"] == "mine-7"


def test_counters_reconcile_with_usage_and_aborted_streams_count_what_came(make_stage):
    stage = make_stage("one two three four five six", delay_s=0.0)
    payload = [
        {"prompt": "abc"},
        {"prompt": ["abc", "de"], "n": 3, "max_tokens": 2},
        {"prompt": "abc", "best_of": 4},
        {"prompt": "abc", "stop": "three"},
        {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt": "abc", "truncate_prompt_tokens": 1},
        {"prompt": "abc", "n": 0},
    ]
    answers = _send(stage, *[("POST", "/v1/completions", body) for body in payload])
    usages = [answer.json()["usage"] for answer in answers if answer.status_code == 200]
    assert len(usages) == len(payload) - 1
    assert stage.counters.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert stage.counters.generation_tokens == sum(usage["completion_tokens"] for usage in usages)
    before = stage.counters.generation_tokens

    async def leave():
        async_llm = stage.state.async_llm
        processed = await async_llm.input_processor.process_completion(CompletionRequest(prompt="abc"))
        generation = async_llm.start(processed)
        async for _ in generation.deltas():
            if generation.completion_tokens >= 2:
                break
        generation.close()
        return generation.completion_tokens

    came = anyio.run(leave)
    assert stage.counters.generation_tokens == before + came
    assert stage.counters.finished["abort"] + stage.counters.finished["stop"] > 0


def test_a_text_with_more_tokens_than_are_listed(make_stage, monkeypatch):
    monkeypatch.setattr("oarlock.server.endpoints.tokenize.MAX_PROMPT_IDS", 30_000)
    words = "some words " * 20_000
    for body, param in (
        ({"prompt": words}, "prompt"),
        ({"messages": [{"role": "user", "content": words}]}, "messages"),
    ):
        (answer,) = _send(make_stage(), ("POST", "/tokenize", body))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert "at most 30000" in answer.json()["error"]["message"]


def test_a_long_text_has_the_tokens_that_it_has(make_stage, tokenizer):
    text = Path(__file__).read_text(encoding="utf-8") * 20
    (answer,) = _send(make_stage(), ("POST", "/tokenize", {"prompt": text}))
    assert answer.json()["tokens"] == tokenizer.encode(text)
