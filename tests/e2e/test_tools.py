"""Forced tool calls from the real engine: always one of the tools, always with arguments of its schema."""

import json

import openai
import pytest

from tests.e2e.running import DEMO, RunningServer

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Zürich"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 8},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
REQUEST = {"model": "demo", "messages": [{"role": "user", "content": "Weather in Oslo?"}], "tools": TOOLS}


@pytest.fixture(scope="module")
def client(tp1):
    with openai.OpenAI(base_url=f"{tp1.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
def test_calls_match_their_schema_and_streams_are_the_same(client, choice, reason):
    request = {**REQUEST, "tool_choice": choice, "parallel_tool_calls": False, "temperature": 0, "max_tokens": 120}
    whole = client.chat.completions.create(**request).choices[0]
    with client.chat.completions.stream(**request) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == reason
    for message in (whole.message, streamed.message):
        (call,) = message.tool_calls
        _check(call.function)
    assert whole.message.tool_calls[0].function.arguments == streamed.message.tool_calls[0].function.arguments


def test_every_choice_at_a_high_temperature_matches_its_schema(client):
    request = {**REQUEST, "tool_choice": "required", "temperature": 2, "seed": 5, "n": 3, "max_tokens": 600}
    for choice in client.chat.completions.create(**request).choices:
        calls = choice.message.tool_calls
        # A model that is cut off in the middle of its last call may leave that one open.
        complete = calls if choice.finish_reason == "tool_calls" else calls[:-1]
        assert calls
        for call in complete:
            _check(call.function)


@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_schema_is_refused(client, stream):
    broken = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "nothing"}}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**REQUEST, "tools": [broken]}, tool_choice="required", stream=stream)
    assert refused.value.param == "tools"


@pytest.mark.soak
@pytest.mark.parametrize("parser", ["qwen3_coder", "functiongemma", "pythonic"])
def test_formats_that_the_model_does_not_know_are_forced_all_the_same(parser):
    with (
        RunningServer(DEMO, "--served-model-name", "demo", "--tool-call-parser", parser) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        test_calls_match_their_schema_and_streams_are_the_same(client, NAMED, "stop")
        test_every_choice_at_a_high_temperature_matches_its_schema(client)
        test_an_invalid_schema_is_refused(client, False)


def _check(function):
    arguments = json.loads(function.arguments)
    if function.name == "now":
        assert arguments == {}
        return
    assert function.name == "weather"
    assert list(arguments) == ["city", "days", "note"]
    assert arguments["city"] in ("Oslo", "Zürich")
    assert 1 <= arguments["days"] <= 9
    assert len(arguments["note"]) <= 8
