"""Stop strings over HTTP: thoughts and calls may contain them, streamed and whole, in chat and in messages."""

from __future__ import annotations

import dataclasses

import pytest

from oarlock.server.chat.tool_parsers.harmony import HARMONY
from oarlock.server.chat.tool_parsers.named import KIMI_K2
from tests.contract import test_chat_tools_wire as chats
from tests.contract import test_messages_wire as messages
from tests.contract import test_responses_wire as responses
from tests.unit.server.llm import chat_templates as templates

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "STOP"}}\n</tool_call>'
THOUGHTS = "<|channel|>analysis<|message|>Hm STOP.<|end|><|start|>assistant"
CALLED = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "STOP"}'
INFO = dataclasses.replace(messages.INFO_LONG, vocab_size=4200)  # with the delimiters
STOP = {"stop": ["STOP"], "temperature": 0}


def _answers(stage, **fields):
    """The message and reasons of a chat, whole and streamed."""
    body = {"tools": chats.TOOLS, **STOP, **fields}
    plain = chats._post(stage, body).json()
    (streamed,), usage = chats._streamed(stage, body)
    assert usage == plain["usage"]
    choice = plain["choices"][0]
    assert chats._without_ids(streamed["message"]) == chats._without_ids(choice["message"])
    for name in ("finish_reason", "stop_reason"):
        assert streamed[name] == choice[name]
    return choice, usage


@pytest.mark.parametrize(
    ("reply", "content", "stop_reason"),
    [
        ("<think>\nHm STOP so.\n</think>\n\nHello STOP you", "Hello ", "STOP"),
        ("<think>\nHm STOP so.\n</think>\n\nHello", "Hello", None),
        (f"<think>\nHm STOP so.\n</think>\n\n{CALL}", None, None),
        ("Hello STOP you", "Hello ", "STOP"),
        ("Hello ST", "Hello ST", None),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_a_chat_ends_at_a_stop_string_of_its_visible_text(chat, reply, content, stop_reason, include):
    stage = chat(reply)
    choice, usage = _answers(stage, include_stop_str_in_output=include)
    shown = f"{content}STOP" if include and stop_reason else content
    assert choice["message"]["content"] == shown
    assert choice["stop_reason"] == stop_reason
    if "think" in reply:
        assert choice["message"]["reasoning_content"] == "Hm STOP so."
        assert usage["completion_tokens_details"]["reasoning_tokens"] > 3
    if CALL in reply:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "STOP"}'


@pytest.mark.parametrize(
    ("reply", "blocks", "reason"),
    [
        ("<think>\nHm STOP.\n</think>\n\nHello STOP you", ["Hm STOP.", "Hello "], "stop_sequence"),
        (f"<think>\nHm STOP.\n</think>\n\nSo.\n{CALL}", ["Hm STOP.", "So.\n", {"a": "STOP"}], "tool_use"),
    ],
)
def test_a_message_does(chat, reply, blocks, reason):
    stage = chat(reply)
    body = {"stop_sequences": ["STOP"], "tools": messages.TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    for answer in (messages.create(stage, **body, max_tokens=2000), messages.streamed(stage, **body, max_tokens=2000)):
        answer = answer if isinstance(answer, dict) else answer.model_dump()
        shown = [block.get("thinking") or block.get("text") or block.get("input") for block in answer["content"]]
        assert shown == blocks
        assert answer["stop_reason"] == reason
        assert answer.get("stop_sequence") == ("STOP" if reason == "stop_sequence" else None)


@pytest.mark.parametrize(
    ("reply", "content", "stop_reason"),
    [
        (f"{THOUGHTS}<|channel|>final<|message|>Hello STOP you", "Hello ", "STOP"),
        (f"{THOUGHTS}{CALLED}", None, None),
    ],
)
def test_channels_of_harmony(chat, reply, content, stop_reason):
    choice, _ = _answers(chat(reply, templates.HARMONY, special=HARMONY.delimiters, info=INFO))
    assert choice["message"]["content"] == content
    assert choice["message"]["reasoning_content"] == "Hm STOP."
    assert choice["stop_reason"] == stop_reason


KIMI = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|im_{{ m.role }}|>{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{{- call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>
{%- elif m.role == "tool" %}## Return of {{ m.tool_call_id }}{% endif %}
{%- endfor %}<|im_assistant|>"""


def test_ids_of_kimi_are_those_that_its_template_writes(chat):
    """Returned ids continue the conversation's count; foreign ones are rewritten, so that results match calls."""
    written = "<|tool_calls_section_begin|>"
    for name, number in (("f", 0), ("f", 1)):
        written += (
            f'<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{{"a": "x"}}<|tool_call_end|>'
        )
    stage = chat(f"{written}<|tool_calls_section_end|>", KIMI, special=KIMI_K2.delimiters, info=INFO)
    first = chats._post(stage, {"tools": chats.TOOLS}).json()["choices"][0]["message"]
    ids = [call["id"] for call in first["tool_calls"]]
    assert ids == ["functions.f:0", "functions.f:1"]
    streamed = chats._streamed(stage, {"tools": chats.TOOLS})[0][0]["message"]
    assert [call["id"] for call in streamed["tool_calls"]] == ids
    items = responses._create(stage, tools=responses.TOOLS)["output"]
    assert [item["call_id"] for item in items] == ids

    def again(names):
        calls = [{**call, "id": name} for call, name in zip(first["tool_calls"], names, strict=True)]
        results = [{"role": "tool", "tool_call_id": name, "content": name} for name in reversed(names)]
        turns = [*chats.MESSAGES, {**first, "tool_calls": calls}, *results]
        body = chats._post(stage, {"tools": chats.TOOLS, "messages": turns}).json()
        assert "choices" in body, body
        prompt = stage.engine.requests[-1].prompt_token_ids
        text = stage.state.async_llm.input_processor.tokenizer.backend.decode(list(prompt), skip_special_tokens=False)
        for name, written_id in zip(names, ids, strict=True):
            assert f"<|tool_call_begin|>{written_id}<|tool_call_argument_begin|>" in text
            assert f"{name}## Return of {written_id}" in text
        return [call["id"] for call in body["choices"][0]["message"]["tool_calls"]]

    assert again(ids) == again(["call_a", "call_b"]) == ["functions.f:2", "functions.f:3"]
