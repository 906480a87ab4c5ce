"""`/v1/chat/completions`: the template, the shape of answers and chunks, logprobs with true bytes."""

from __future__ import annotations

import json

import anyio
import pytest

MESSAGES = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]


CHAT = "/v1/chat/completions"
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def _send(stage, body, path=CHAT, headers=None):
    async def send():
        async with stage.client() as client:
            return await client.post(path, json=body, headers=headers)

    return anyio.run(send)


def _post(stage, body):
    return _send(stage, {"messages": MESSAGES, **body})


def _events(response):
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_a_plain_answer(make_stage, tokenizer):
    stage = make_stage("Hello! 😀")
    body = _post(stage, {}).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello! 😀", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    request = stage.engine.requests[0]
    assert request.params.max_tokens == 256 - len(request.prompt_token_ids)
    text = tokenizer.backend.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_stream_begins_with_the_role_and_ends_once(make_stage):
    stage = make_stage("Hello! 😀")
    plain = _post(stage, {"n": 2}).json()
    events = _events(_post(stage, {"n": 2, "stream": True, "stream_options": {"include_usage": True}}))
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == plain["usage"]
    for index in range(2):
        chunks = [c for e in events for c in e["choices"] if c["index"] == index]
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[-1]["delta"] == {}
        assert [c["finish_reason"] for c in chunks].count("stop") == 1
        text = "".join(c["delta"].get("content", "") for c in chunks)
        assert text == plain["choices"][index]["message"]["content"]


def test_the_token_limit_by_either_name(make_stage):
    for fields, expected in (
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
    ):
        stage = make_stage()
        body = _post(stage, fields).json()
        assert stage.engine.requests[0].params.max_tokens == expected
        assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_carry_the_true_bytes(make_stage, stream):
    stage = make_stage("é😀", eos=False)
    response = _post(stage, {"logprobs": True, "top_logprobs": 2, "max_tokens": 6, "stream": stream})
    if stream:
        chunks = [c for e in _events(response) for c in e["choices"] if c["logprobs"]]
        content = [entry for chunk in chunks for entry in chunk["logprobs"]["content"]]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é😀"
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in content)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    plain = _post(stage, {"logprobs": True, "max_tokens": 6}).json()["choices"][0]["logprobs"]
    assert all(entry["top_logprobs"] == [] for entry in plain["content"])


def test_neutral_values_of_unsupported_fields_are_accepted(make_stage):
    fields = {"tools": None, "tool_choice": "none", "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    fields |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, "repetition_penalty": 1.0}
    response = _post(make_stage(), fields)
    assert response.status_code == 200
    assert "X-Ignored-Parameters" not in response.headers


def test_the_role_carries_the_usage_so_far(make_stage):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = _events(_post(make_stage(), {"stream": True, "stream_options": options}))
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    prompt = events[-1]["usage"]["prompt_tokens"]
    assert events[0]["usage"] == {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt}


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None, "tool_calls": []},
        {"content": "", "tool_calls": []},
        {"tool_calls": []},
        {"content": None, "reasoning_content": "Hm", "tool_calls": None},
    ],
)
def test_an_earlier_answer_without_text_is_an_empty_turn(make_stage, answer):
    stage = make_stage()
    end = {"role": "user", "content": "And now?"}
    response = _post(stage, {"messages": [*MESSAGES, {"role": "assistant", **answer}, end]})
    assert response.status_code == 200, response.text
    _post(stage, {"messages": [*MESSAGES, {"role": "assistant", "content": ""}, end]})
    first, second = stage.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


def test_an_integer_may_be_written_with_a_fraction_of_zero(make_stage):
    stage = make_stage()
    fields = {"n": 2, "seed": 3, "top_k": 5, "min_tokens": 1, "priority": 1, "prompt_logprobs": 0}
    fields |= {"max_tokens": 4, "top_logprobs": 1, "truncate_prompt_tokens": 9, "logprobs": True}
    for payload in (fields, {name: value if value is True else float(value) for name, value in fields.items()}):
        assert _post(stage, payload).status_code == 200
    whole, written = stage.engine.requests[:2], stage.engine.requests[2:]
    assert [request.params for request in whole] == [request.params for request in written]
    assert all(type(request.params.max_tokens) is int and type(request.params.seed) is int for request in written)
    for name in fields.keys() - {"logprobs"}:
        response = _post(stage, {name: 1.5})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


LINE_ENDS = "\u2028 \u2029 \x85"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_chunk_holds_what_may_be_read_as_the_end_of_a_line(make_stage, monkeypatch, path):
    stage = make_stage(f"a{LINE_ENDS}b", served_model_name=(f"m{LINE_ENDS}",), blamed=f"x{LINE_ENDS}", fail_after=4)
    monkeypatch.setattr(
        stage.state.async_llm.input_processor.tokenizer, "token_bytes", lambda token_id: LINE_ENDS.encode()
    )
    shown = {"logprobs": 1} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 1}
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
    body |= {"stream": True, "prompt_logprobs": 1, "return_token_ids": True, **shown}

    async def send():
        async with stage.client() as client:
            return await client.post(path, json=body)

    response = anyio.run(send)
    assert '"error"' in response.text
    assert response.text.splitlines() == response.text.split("\n")[:-1]
    reported = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert reported[0]["model"] == f"m{LINE_ENDS}"
    assert LINE_ENDS in json.dumps(reported, ensure_ascii=False)


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"tools": [{"type": "web_search"}, {"type": "custom", "custom": {"name": "p"}}]},
         "tools.custom, tools.web_search"),
        ({"tools": [FUNCTION, {"type": "web_search_preview"}]}, "tools.web_search_preview"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning_effort": None}, None),
        ({"verbosity": "low"}, "verbosity"),
        ({"verbosity": "medium"}, None),
        ({"textVerbosity": "low"}, "textVerbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"length_penalty": 2, "mm_processor_kwargs": {"a": 1}}, "length_penalty, mm_processor_kwargs"),
        ({"prediction": None, "web_search_options": None, "reasoning_effort": None}, None),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_followed_are_reported(make_stage, fields, ignored):
    stage = make_stage("Yes.")
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    for path, more in ((CHAT, {}), (CHAT, {"stream": True}), (f"{CHAT}/render", {})):
        answer = _send(stage, body | more, path)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("X-Ignored-Parameters") == ignored
    large = _send(stage, body | {"metadata": {}, "x": [[]] * 40_000})
    assert large.headers["X-Ignored-Parameters"] == ", ".join(filter(None, [ignored, "x"]))
    assert stage.state.large_bodies.pid is not None
    strict = _send(make_stage(strict_parameters=True), body)
    assert strict.status_code == (400 if ignored else 200)
    assert ignored is None or ignored.split(", ")[0] == strict.json()["error"]["param"]


def test_a_conversation_that_is_tokenized_reports_them_too(make_stage):
    body = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "high"}
    assert _send(make_stage(), body, "/tokenize").headers["X-Ignored-Parameters"] == "reasoning_effort"
    assert _send(make_stage(strict_parameters=True), body, "/tokenize").status_code == 400


def test_each_client_is_logged_once(make_stage, caplog):
    caplog.set_level("INFO", "oarlock.requests")
    stage = make_stage("Yes.", api_key=("a", "b"))
    body = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "high", "other": 1}
    for key in ("a", "a", "b", "a"):
        answer = _send(stage, body, CHAT, {"Authorization": f"Bearer {key}", "User-Agent": "agent/1"})
        assert answer.status_code == 200, answer.text
    lines = [record.msg.fields for record in caplog.records if record.msg.fields["event"] == "parameters_ignored"]
    assert [(line.get("client"), line["agent"], line["names"]) for line in lines] == [
        ("key-1", "agent/1", "other"), ("key-1", "agent/1", "reasoning_effort"),
        ("key-2", "agent/1", "other"), ("key-2", "agent/1", "reasoning_effort"),
    ]  # fmt: skip
    assert stage.counters.ignored_parameters == 8
