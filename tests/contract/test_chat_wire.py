"""`/v1/chat/completions`: the template, the shape of answers and chunks, logprobs with true bytes."""

from __future__ import annotations

import json

import anyio
import pytest

MESSAGES = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]


def _post(stage, body):
    async def send():
        async with stage.client() as client:
            return await client.post("/v1/chat/completions", json={"messages": MESSAGES, **body})

    return anyio.run(send)


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
