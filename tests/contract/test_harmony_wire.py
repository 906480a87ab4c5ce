"""Answers of gpt-oss through `/v1/responses` and `/v1/messages`: thoughts, texts and calls, streamed and whole."""

from __future__ import annotations

import dataclasses
import json

import pytest

from oarlock.server.chat.tool_parsers.harmony import HARMONY
from tests.contract import test_messages_wire as messages
from tests.contract import test_responses_wire as responses
from tests.unit.server.llm import chat_templates as templates

NEXT = "<|end|><|start|>assistant"
THOUGHTS = f"<|channel|>analysis<|message|>Hm 😀.{NEXT}"
MORE = f"<|channel|>analysis<|message|>So.{NEXT}"
TOLD = f"<|channel|>commentary<|message|>I look.{NEXT}"
FINAL = "<|channel|>final<|message|>It is é."
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "é😀"}'
TO_CALL = ' to=functions.f<|channel|>commentary json<|message|>{"a": "é😀"}'
F, ARGUMENTS = "f", {"a": "é😀"}
CASES = [
    (FINAL, [("text", "It is é.")]),
    (THOUGHTS + FINAL, [("thoughts", "Hm 😀."), ("text", "It is é.")]),
    (THOUGHTS + MORE + FINAL, [("thoughts", "Hm 😀.\nSo."), ("text", "It is é.")]),
    (THOUGHTS + CALL, [("thoughts", "Hm 😀."), (F, ARGUMENTS)]),
    (TO_CALL, [(F, ARGUMENTS)]),
    (THOUGHTS + TOLD + CALL, [("thoughts", "Hm 😀."), ("text", "I look."), (F, ARGUMENTS)]),
    (
        THOUGHTS + TOLD + MORE + FINAL,
        [("thoughts", "Hm 😀."), ("text", "I look."), ("thoughts", "So."), ("text", "It is é.")],
    ),
    ("Without a head", [("text", "Without a head")]),
]


@pytest.fixture
def harmony(chat):
    info = dataclasses.replace(messages.INFO_LONG, vocab_size=4200)  # with the delimiters

    def make(reply):
        return chat(reply, templates.HARMONY, special=HARMONY.delimiters, info=info)

    return make


def told_by_items(items):
    found = []
    for item in items:
        if item["type"] == "function_call":
            found.append((item["name"], json.loads(item["arguments"])))
        else:
            ((part,), kind) = item["content"], "text" if item["type"] == "message" else "thoughts"
            found.append((kind, part["text"]))
    return found


def told_by_blocks(blocks):
    kinds = {"thinking": "thoughts", "text": "text"}
    return [
        (block["name"], block["input"]) if block["type"] == "tool_use" else (kinds[block["type"]], block[block["type"]])
        for block in blocks
    ]


@pytest.mark.parametrize(("reply", "told"), CASES)
def test_items_are_the_messages_of_the_answer_in_their_order(harmony, reply, told):
    stage = harmony(reply)
    whole = responses._create(stage, tools=responses.TOOLS)
    events = responses._streamed(stage, tools=responses.TOOLS)
    built = responses._put_together(events)
    assert told_by_items(whole["output"]) == told_by_items(built) == told
    last = events[-1]["response"]
    assert told_by_items(last["output"]) == told and last["usage"] == whole["usage"]
    thinks = any(kind == "thoughts" for kind, _ in told)
    assert (whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) == thinks


@pytest.mark.parametrize(("reply", "told"), CASES)
def test_blocks_are_the_messages_of_the_answer_in_their_order(harmony, reply, told):
    stage = harmony(reply)
    whole = messages.create(stage, tools=messages.TOOLS)
    built = messages.streamed(stage, tools=messages.TOOLS)
    assert told_by_blocks(whole["content"]) == told_by_blocks(built["content"]) == told
    assert whole["stop_reason"] == built["stop_reason"] == ("tool_use" if told[-1][0] == F else "end_turn")


def prompt_of(stage):
    tokenizer = stage.state.async_llm.input_processor.tokenizer
    return tokenizer.backend.decode(stage.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_an_answer_goes_back_into_the_conversation_with_all_that_it_said(harmony):
    """Also where the template takes thoughts or a text before a call, and not both."""
    stage = harmony(THOUGHTS + TOLD + CALL)
    before = "<|start|>assistant<|channel|>analysis<|message|>Hm 😀.\nI look.<|end|>"
    called = '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": "é😀"}<|call|>'
    result = "<|start|>functions.f to=assistant<|message|>42<|end|><|start|>assistant"
    first = responses._create(stage, tools=responses.TOOLS)
    answer = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "42"}
    asked = {"role": "user", "content": "x"}
    responses._create(stage, tools=responses.TOOLS, input=[asked, *first["output"], answer])
    assert prompt_of(stage).endswith(before + called + result)
    responses._create(stage, tools=responses.TOOLS, input=[answer], previous_response_id=first["id"])
    assert prompt_of(stage).endswith(before + called + result)
    first = messages.create(stage, tools=messages.TOOLS)
    back = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "42"}
    turns = [asked, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [back]}]
    messages.create(stage, tools=messages.TOOLS, messages=turns)
    assert prompt_of(stage).endswith(before + called + result)


def test_an_answer_that_is_cut_short_keeps_what_there_is(harmony):
    stage = harmony(THOUGHTS + CALL)
    cut = len(stage.engine.reply(None)) - 4
    whole = responses._create(stage, tools=responses.TOOLS, max_output_tokens=cut)
    assert (whole["status"], whole["output"][-1]["type"]) == ("incomplete", "function_call")
    events = responses._streamed(stage, tools=responses.TOOLS, max_output_tokens=cut)
    assert events[-1]["type"] == "response.incomplete"
    assert responses._plain(events[-1]["response"]["output"]) == responses._plain(whole["output"])
    message = messages.create(stage, tools=messages.TOOLS, max_tokens=cut)
    assert message["stop_reason"] == "max_tokens" and message["content"][-1]["name"] == "f"
