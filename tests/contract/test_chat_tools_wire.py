"""Tool calls and reasoning over HTTP: streams equal plain answers, finish reasons, errors that name the field."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import anyio
import jsonschema
import openai
import pytest

from oarlock.server.chat.tool_parsers.harmony import HARMONY
from oarlock.server.chat.tool_parsers.registry import FORMATS
from tests.contract.conftest import chat_tokenizer
from tests.contract.test_messages_wire import INFO_LONG
from tests.unit.server.chat.tool_parsers.written import TEMPLATES, WRITERS
from tests.unit.server.llm import chat_templates as templates

DEMO = Path(__file__).resolve().parents[2] / "models" / "oarlock-demo"
MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é😀\\n"}}\n</tool_call>'
ARGUMENTS = '{"a": "é😀\\n"}'
TWO = f'Sure.\n{CALL}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "f"}}


def _post(stage, body):
    async def send():
        async with stage.client() as client:
            return await client.post("/v1/chat/completions", json={"messages": MESSAGES, **body})

    return anyio.run(send)


def _streamed(stage, body):
    """Answer put together from a stream, as the official client does: choices and usage."""
    response = _post(stage, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    choices: dict[int, dict] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"message": {"content": ""}, "logprobs": [], "ended": False})
            assert not whole["ended"]
            _add(whole, choice)
    assert all(whole["ended"] for whole in choices.values())
    return [choices[index] for index in sorted(choices)], events[-1]["usage"]


def _add(whole, choice):
    delta, message = choice["delta"], whole["message"]
    for name in ("content", "reasoning_content", "reasoning"):
        if name in delta:
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if "id" in call:
            assert set(call) == {"index", "id", "type", "function"}
            assert call["index"] == len(calls)
            assert call["function"]["arguments"] == ""
            calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
        else:
            assert set(call) == {"index", "function"}
            assert set(call["function"]) == {"arguments"}
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    whole["logprobs"] += (choice["logprobs"] or {}).get("content", [])
    if choice["finish_reason"] is not None:
        whole |= {"ended": True, "finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}


def _without_ids(message):
    calls = [(call["type"], call["function"]) for call in message.get("tool_calls", ())]
    texts = {name: message.get(name) or "" for name in ("content", "reasoning_content", "reasoning")}
    return texts, calls


REPLIES = {
    "plain": "Hello 😀",
    "call": CALL,
    "two calls": TWO,
    "call, then words": CALL + " Done.",
    "broken call": '<tool_call>{"name": "f", "arguments": [1]}</tool_call> <tool_ca',
    "reasoning": "<think>\nHm 😀\n</think>\n\nHello",
    "reasoning and calls": f"<think>\nHm\n</think>\n\n{TWO}",
    "reasoning alone": "<think>\nHm </thi",
}
REQUESTS = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "one call": {"tools": TOOLS, "parallel_tool_calls": False},
    "cut": {"tools": TOOLS, "max_tokens": 15},
    "stop": {"tools": TOOLS, "stop": ["Do", "ool", "Hell"]},
    "logprobs": {"tools": TOOLS, "logprobs": True, "top_logprobs": 1},
    "several": {"tools": TOOLS, "n": 2},
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=list(REPLIES))
@pytest.mark.parametrize("fields", REQUESTS.values(), ids=list(REQUESTS))
def test_a_stream_equals_a_plain_answer(chat, reply, fields):
    stage = chat(reply)
    plain = _post(stage, {**fields, "temperature": 0}).json()
    streamed, usage = _streamed(stage, {**fields, "temperature": 0})
    assert usage == plain["usage"]
    assert len(streamed) == len(plain["choices"]) == fields.get("n", 1)
    for whole, choice in zip(streamed, plain["choices"], strict=True):
        assert _without_ids(whole["message"]) == _without_ids(choice["message"])
        assert whole["finish_reason"] == choice["finish_reason"]
        assert whole["stop_reason"] == choice["stop_reason"]
        assert whole["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
        ids = [call["id"] for call in choice["message"].get("tool_calls", ())]
        assert len(set(ids)) == len(ids)
        assert all(call_id.startswith("call_") for call_id in ids)


def test_message_with_tool_calls(chat):
    body = _post(chat(TWO), {"tools": TOOLS}).json()
    choice = body["choices"][0]
    calls = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Sure.\n", "refusal": None}
    assert [call["function"] for call in calls] == [
        {"name": "f", "arguments": ARGUMENTS},
        {"name": "g", "arguments": "{}"},
    ]
    assert choice["finish_reason"] == "tool_calls"
    alone = _post(chat(CALL), {"tools": TOOLS}).json()["choices"][0]["message"]
    assert alone["content"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reply", "fields", "reason", "num_calls"),
    [
        (CALL, {"tools": TOOLS}, "tool_calls", 1),
        (CALL, {"tools": TOOLS, "tool_choice": "auto"}, "tool_calls", 1),
        (CALL, {"tools": TOOLS, "tool_choice": "required"}, "tool_calls", 1),
        (CALL, {"tools": TOOLS, "tool_choice": NAMED}, "stop", 1),
        (CALL, {"tools": TOOLS, "tool_choice": "none"}, "stop", 0),
        (CALL, {"tools": []}, "stop", 0),
        (CALL, {}, "stop", 0),
        (TWO, {"tools": TOOLS, "parallel_tool_calls": False}, "tool_calls", 1),
        (TWO, {"tools": TOOLS, "max_tokens": 35}, "length", 1),
        (TWO, {"tools": TOOLS, "max_tokens": 35, "tool_choice": "required"}, "length", 1),
        ("no call", {"tools": TOOLS}, "stop", 0),
        ('<tool_call>{"name": "h"}</tool_call>', {"tools": TOOLS}, "stop", 0),
    ],
)
def test_why_it_ended(chat, reply, fields, reason, num_calls, stream):
    stage = chat(reply)
    choice = _streamed(stage, fields)[0][0] if stream else _post(stage, fields).json()["choices"][0]
    assert choice["finish_reason"] == reason
    assert len(choice["message"].get("tool_calls", ())) == num_calls
    if not num_calls:
        assert choice["message"]["content"] == reply


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_that_are_cut_short_leave_no_text(chat, choice):
    """A grammar binds their text to calls: text that is no whole call is the beginning of one, never content."""
    fields = {"tools": TOOLS, "tool_choice": choice, "temperature": 0}
    for reply, num_calls in ((CALL + '\n<tool_call>\n{"name": "f"', 1), ('<tool_call>\n{"na', 0)):
        stage = chat(reply, eos=False)
        for answer in (_post(stage, fields).json()["choices"][0], _streamed(stage, fields)[0][0]):
            assert answer["finish_reason"] == "length"
            assert len(answer["message"].get("tool_calls", ())) == num_calls
            assert not answer["message"]["content"]


@pytest.mark.parametrize("reply", [CALL, TWO, f"<think>\nHm\n</think>\n\n{TWO}", "words"])
def test_messages_have_the_documented_shape(chat, reply):
    stage = chat(reply)
    document = stage.app._app.openapi()
    shape = {**document["components"]["schemas"]["ChatCompletion"], "components": document["components"]}
    answer = _post(stage, {"tools": TOOLS, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}).json()
    jsonschema.validate(answer, shape)
    message = answer["choices"][0]["message"]
    described = shape["properties"]["choices"]["items"]["properties"]["message"]["properties"]
    assert message.keys() <= described.keys()
    for call in message.get("tool_calls", ()):
        del call["function"]["arguments"]
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(answer, shape)


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda tool_format: tool_format.name)
@pytest.mark.parametrize("is_special", [False, True], ids=["text", "special tokens"])
def test_every_format_is_found_in_the_template_and_read(chat, tool_format, is_special):
    """Delimiters that are special tokens stay in the text that is parsed, and nothing of them reaches the client."""
    reply = WRITERS[tool_format.name]([("f", {"a": "é <b>"})])
    if is_special and tool_format.name == "llama3":
        reply = f"<|python_tag|>{reply}"
    info = dataclasses.replace(INFO_LONG, vocab_size=4200)  # with the delimiters
    stage = chat(reply, TEMPLATES[tool_format.name], special=tool_format.delimiters if is_special else (), info=info)
    for choice in (_post(stage, {"tools": TOOLS}).json()["choices"][0], _streamed(stage, {"tools": TOOLS})[0][0]):
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "f"
        assert json.loads(call["function"]["arguments"]) == {"a": "é <b>"}
        assert not choice["message"]["content"]
        assert choice["finish_reason"] == "tool_calls"


def test_an_answer_in_harmony_needs_no_tools_to_be_read(chat):
    marks = HARMONY.delimiters
    reply = "<|channel|>analysis<|message|>Hm 😀<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    info = dataclasses.replace(INFO_LONG, vocab_size=4200)  # with the delimiters
    stage = chat(reply, templates.HARMONY, special=marks[1:], info=info)
    plain, (streamed, usage) = _post(stage, {}).json(), _streamed(stage, {})
    for choice in (plain["choices"][0], streamed[0]):
        assert choice["message"]["reasoning_content"] == "Hm 😀"
        assert choice["message"]["content"] == "Hello"
    assert usage == plain["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"] - 6


def test_reasoning_has_both_names_and_are_counted(chat):
    reasoning = "<think>\nHm 😀\n</think>"
    stage = chat(f"{reasoning}\n\nHello")
    body = _post(stage, {}).json()
    message = body["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "reasoning_content": "Hm 😀",
        "reasoning": "Hm 😀",
    }
    counted = len(stage.state.async_llm.input_processor.tokenizer.encode(reasoning, add_special_tokens=False))
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}
    open_already = chat("Hm 😀\n</think>\n\nHello", templates.THINKING)
    assert _post(open_already, {}).json()["choices"][0]["message"] == message


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "special tokens"])
def test_tags_around_the_response_do_not_reach_the_client(chat, is_special):
    tags = ("<think>", "</think>", "<response>", "</response>")
    source = templates.QWEN + "{# <response></response> #}"
    stage = chat(
        "<think>Hm</think>\n\n<response>\nHello\n\nyou\n</response>\n",
        source,
        special=tags if is_special else (),
        info=dataclasses.replace(INFO_LONG, vocab_size=4200),  # with the tags
    )
    for choice in (_post(stage, {}).json()["choices"][0], _streamed(stage, {})[0][0]):
        assert choice["message"]["reasoning_content"] == "Hm"
        assert choice["message"]["content"] == "Hello\n\nyou"
    off = chat("<response>Hello</response>", source)
    message = _post(off, {"reasoning_effort": "none"}).json()["choices"][0]["message"]
    assert message["content"] == "Hello"
    stopped = _post(off, {"stop": ["lo"], "reasoning_effort": "none"}).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("Hel", "stop")


def test_a_model_that_does_not_think_may_write_the_mark(chat):
    body = _post(chat("<think>x</think>y", templates.PLAIN), {}).json()
    assert body["choices"][0]["message"]["content"] == "<think>x</think>y"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_the_form_of_the_answer_and_of_calls_together(chat):
    stage = chat(CALL)
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}
    _post(stage, {**form, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}})
    text = stage.engine.requests[-1].params.grammar.text
    assert text.startswith("start: (response | calls)")
    _post(stage, {**form, "tools": TOOLS, "tool_choice": "required"})
    assert "response" not in stage.engine.requests[-1].params.grammar.text
    response = _post(stage, {"guided_regex": "a", "tools": TOOLS, "tool_choice": "required"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "guided_regex"


def test_calls_that_are_asked_for_are_bound_by_a_grammar(chat):
    stage = chat(CALL)
    for choice in (
        "required",
        NAMED,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
    ):
        _post(stage, {"tools": TOOLS, "tool_choice": choice})
        grammar = stage.engine.requests[-1].params.grammar
        assert grammar.kind == "lark"
        assert ('"g' in grammar.text or '\\"g' in grammar.text) == (choice == "required")
    for fields in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        _post(stage, fields)
        assert stage.engine.requests[-1].params.grammar is None


CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}],
}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y"}}]}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "'h'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "required"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", "allowed_tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two functions"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools", "required"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, "tools", "in an unsupported form"),
        ({"tools": [{"type": "functoin", "name": "f", "parameters": {}}]}, "tools", "in an unsupported form"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 1}}}]}, "tools", "object"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role", "role 'tool'"),
        ({"messages": IMAGE}, "messages[0].content[0].type", "'image_url'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]", "without content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id"),
        ({"messages": [CALLED]}, "messages[0].tool_calls[0].function.arguments", "required"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}, {"role": "robot", "content": "x"}]},
         "messages[1].role", "assistant"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "code"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        ({"chat_template_kwargs": {"_x": 1}}, "chat_template_kwargs", "'_x'"),
        ({"chat_template_kwargs": {"x": "y" * 20_000}}, "chat_template_kwargs", "16384"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "combined"),
        ({"documents": [{"text": "It rained."}]}, "documents", "does not show documents[0]"),
        ({"documents": [{"number": 5}]}, "documents", "does not show documents[0]"),
        ({"documents": [{"text": "x"}] * 300}, "documents", "256"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"function_call": {"name": "f"}}, "function_call", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"top_logprobs": 1}, "top_logprobs", "logprobs: true"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_faults_are_named(chat, fields, param, words, stream):
    stage = chat("x")
    response = _post(stage, {**fields, "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert words in error["message"]
    assert stage.engine.requests == []


def test_the_official_client_puts_calls_together(chat, make_server):
    running = make_server("x")
    tokenizer = chat_tokenizer(templates.QWEN)
    ids = tokenizer.encode(f"<think>\nHm\n</think>\n\n{TWO}", add_special_tokens=False)
    running.stage.state.async_llm.input_processor.tokenizer = tokenizer
    running.stage.engine.reply = lambda request: ids
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
        plain = client.chat.completions.create(model="demo", messages=MESSAGES, tools=TOOLS)
        with client.chat.completions.stream(model="demo", messages=MESSAGES, tools=TOOLS) as stream:
            kinds = {event.type for event in stream}
            whole = stream.get_final_completion()
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        for answer in (plain, whole):
            message = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls"
            assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
                ("f", ARGUMENTS),
                ("g", "{}"),
            ]
            assert message.content == "Sure.\n"
            assert message.reasoning_content == "Hm"
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "1"} for call in plain.choices[0].message.tool_calls
        ]
        again = [*MESSAGES, plain.choices[0].message, *results]
        assert client.chat.completions.create(model="demo", messages=again).choices
    tokenizer.close()


def test_the_arguments_of_a_call_keep_to_their_line(chat):
    ends = "\u2028\u2029\x85"
    stage = chat(f'<think>{ends}</think><tool_call>{{"name": "f", "arguments": {{"a": "{ends}"}}}}</tool_call>',
                 templates.QWEN + "{# <think> #}")  # fmt: skip
    response = _post(stage, {"tools": TOOLS, "stream": True})
    assert response.text.splitlines() == response.text.split("\n")[:-1]
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"a": ends}
    assert "".join(delta.get("reasoning", "") for delta in deltas) == ends
