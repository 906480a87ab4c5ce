"""`/v1/messages` on a real server: what a coding agent sends, and a prompt of 64 Ki tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.long_context import CONTEXT, long_context_demo
from tests.e2e.running import RunningServer, eventually

pytestmark = [pytest.mark.slow, pytest.mark.soak]
HEADERS = {"x-api-key": "key", "anthropic-version": "2023-06-01"}
TOOLS = [
    {
        "name": name,
        "description": what,
        "input_schema": {
            "type": "object",
            "properties": {field: {"enum": ["a.py", "b.py"]}},
            "required": [field],
            "additionalProperties": False,
        },
        "cache_control": {"type": "ephemeral"},
    }
    for name, what, field in (("read", "Reads a file.", "path"), ("list", "Lists a folder.", "folder"))
]


@pytest.fixture
def server(tmp_path, request):
    model = long_context_demo(tmp_path, layers=getattr(request, "param", None))
    flags = ("--served-model-name", "demo", "claude-of-our-own", "--api-key", "key", "--max-num-seqs", 8)
    with RunningServer(Path(model), *flags) as running:
        running.client.headers.update(HEADERS)
        yield running


def post(server, **body):
    answer = server.client.post("/v1/messages", json={"model": "claude-of-our-own", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_requests_of_coding_agents(server):
    """Counting, parallel calls, an interrupted stream, the same turn again, results, an answer."""
    system = [{"type": "text", "text": "You read code.", "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is in a.py and b.py?"}]}]
    base = {"system": system, "tools": TOOLS, "max_tokens": 200, "metadata": {"user_id": "u"}}
    counted = server.client.post("/v1/messages/count_tokens", json={"messages": messages, **base, "max_tokens": 1})
    assert counted.status_code == 200, counted.text

    forced = {**base, "messages": messages, "tool_choice": {"type": "any"}, "model": "demo", "temperature": 0}
    with server.client.stream("POST", "/v1/messages", json={**forced, "stream": True}) as stream:
        for line in stream.iter_lines():
            if "content_block_delta" in line:
                break  # the person at the keyboard pressed Escape
    eventually(lambda: server.metrics()["vllm:num_requests_running"] == 0, 60, "what was left is aborted")

    turn = post(server, **{**forced, "model": "claude-of-our-own"})
    calls = [block for block in turn["content"] if block["type"] == "tool_use"]
    assert turn["model"] == "claude-of-our-own" and calls
    assert turn["usage"]["cache_read_input_tokens"] > 0  # of the interrupted one
    assert turn["stop_reason"] in ("tool_use", "max_tokens")  # the demo model calls on and on
    for call in calls:
        assert call["name"] in ("read", "list") and set(call["input"].values()) <= {"a.py", "b.py"}
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": f"text of {call['id']}"} for call in calls]
    messages += [{"role": "assistant", "content": turn["content"]}, {"role": "user", "content": results}]
    last = post(server, **{**base, "messages": messages, "tool_choice": {"type": "none"}})
    assert last["stop_reason"] in ("end_turn", "max_tokens", "model_context_window_exceeded")
    counted = server.client.post("/v1/messages/count_tokens", json={"messages": messages, **base, "max_tokens": 1})
    assert counted.json()["input_tokens"] > sum(turn["usage"][name] for name in ("input_tokens", "output_tokens"))


@pytest.mark.timeout(900)  # beside other tests, on a processor without bfloat16
@pytest.mark.parametrize("server", [1], ids=["1 layer"], indirect=True)
def test_a_prompt_of_64_ki_tokens(server):
    text = "import os and then " * 20_000
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "model": "demo"}
    refused = server.client.post("/v1/messages", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
    per_word = server.client.post("/v1/messages/count_tokens", json={**body, "messages": [
        {"role": "user", "content": "import os and then " * 100}]}).json()["input_tokens"] / 100  # fmt: skip
    body["messages"][0]["content"] = "import os and then " * int((CONTEXT - 300) / (per_word - 0.1))
    count = server.client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert 64_000 < count <= CONTEXT - 8
    events = []
    with server.client.stream("POST", "/v1/messages", json={**body, "stream": True}, timeout=800) as stream:
        assert stream.status_code == 200
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    assert events[-1]["type"] == "message_stop"
    usage = events[-2]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    again = post(server, **body)  # its beginning is cached
    assert again["usage"]["cache_read_input_tokens"] > 0.9 * count
