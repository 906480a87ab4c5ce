"""`/v1/responses`: streams equal plain answers, every event and object is one of the official client's types."""

from __future__ import annotations

import dataclasses
import json
from typing import get_type_hints

import anyio
import pytest
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    Response,
    ResponseCompactionItemParamParam,
    ResponseFormatTextJSONSchemaConfigParam,
    ResponseFunctionToolCallParam,
    ResponseInputTextParam,
    ResponseOutputMessageParam,
    ResponseOutputRefusalParam,
    ResponseOutputTextParam,
    ResponseReasoningItemParam,
    ResponseStreamEvent,
    ResponseTextConfigParam,
    ToolChoiceAllowedParam,
    ToolChoiceFunctionParam,
    response_compact_params,
    response_create_params,
    response_input_item_param,
)
from openai.types.shared_params import Reasoning
from pydantic import TypeAdapter

from oarlock.server.schemas import response_items as items
from oarlock.server.schemas import responses as schema
from oarlock.server.schemas.generation import StreamOptions
from tests.contract.conftest import INFO
from tests.unit.server.llm import chat_templates as templates

INFO_LONG = dataclasses.replace(INFO, max_model_len=2048, max_num_batched_tokens=2048, num_blocks=600)
EVENTS: TypeAdapter = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
WEB = {"type": "web_search", "external_web_access": False}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [WEB]}
FIND = {"type": "function", "name": "find", "description": "d", "parameters": {"type": "object"}, "strict": False}
SPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [FIND]}
TOOLS = [
    {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA},
    {"type": "function", "name": "g", "strict": False},
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é😀\\n"}}\n</tool_call>'
TEXT = {"type": "input_text", "text": "x"}
TWO = f'Sure.\n{CALL}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>'


def _send(stage, method, path, body=None, **options):
    async def send():
        async with stage.client(**options) as client:
            return await client.request(method, path, json=body)

    return anyio.run(send)


def _create(stage, **body):
    answer = _send(stage, "POST", "/v1/responses", {"input": "x", **body})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


def _streamed(stage, **body):
    """The events of the same answer, each checked; the last holds the response."""
    answer = _send(stage, "POST", "/v1/responses", {"input": "x", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        EVENTS.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    return events


def _put_together(events):
    """The items, from the events alone, and a check that each is done as it was said."""
    items = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append({**event["item"], "text": ""})
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[event["output_index"]]["id"]
            items[event["output_index"]]["text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == items[-1]["text"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == items[-1]["text"]
        elif kind == "output_item.done":
            items[-1]["done"] = event["item"]
    return [item["done"] for item in items]


def _plain(items):
    """Items without the ids, which are new for each answer."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize(
    ("reply", "source", "special", "body", "types"),
    [
        ("Hello, wörld! 😀", templates.QWEN, (), {}, ["message"]),
        (" \n", templates.QWEN, (), {}, ["message"]),
        (TWO, templates.QWEN, (), {"tools": TOOLS}, ["message", "function_call", "function_call"]),
        (CALL, templates.QWEN, (), {"tools": TOOLS}, ["function_call"]),
        ("<think>Hm.</think>\n\nYes.", templates.QWEN, (), {}, ["reasoning", "message"]),
        (
            f"<think>Hm.</think>\n\n{CALL}",
            templates.QWEN,
            (),
            {"tools": TOOLS, "include": ["reasoning.encrypted_content"]},
            ["reasoning", "function_call"],
        ),
    ],
)
def test_a_stream_equals_the_plain_answer(chat, reply, source, special, body, types):
    stage = chat(reply, source, special)
    plain, events = _create(stage, **body), _streamed(stage, **body)
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert [item["type"] for item in plain["output"]] == types
    assert _plain(plain["output"]) == _plain(last["output"]) == _plain(_put_together(events))
    assert plain["usage"] == last["usage"]
    assert (plain["status"], plain["error"], plain["incomplete_details"]) == ("completed", None, None)


def test_calls_and_reasoning_go_into_the_next_turn(chat):
    stage = chat(f"<think>Hm.</think>\n\n{CALL}", templates.QWEN, ())
    first = _create(stage, input="What?", tools=TOOLS, instructions="Be brief.")
    call = first["output"][-1]
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": "é😀\n"})
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    stateless = [{"role": "user", "content": "What?"}, *first["output"], result]
    _create(stage, input=stateless, tools=TOOLS, instructions="Be brief.")
    _create(stage, input=[result], tools=TOOLS, instructions="Be brief.", previous_response_id=first["id"])
    by_reference = [{"role": "user", "content": "What?"}]
    by_reference += [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    _create(stage, input=[*by_reference, result], tools=TOOLS, instructions="Be brief.")
    prompts = [request.prompt_token_ids for request in stage.engine.requests]
    assert prompts[1] == prompts[2] == prompts[3]
    tokenizer = stage.state.async_llm.input_processor.tokenizer
    text = tokenizer.backend.decode(prompts[1], skip_special_tokens=False)
    assert text.count("Be brief.") == 1
    assert "42" in text


def test_instructions_and_the_systems_first_words_are_one_message(chat):
    stage = chat("Yes.")
    _create(stage, instructions="A.", input=[{"role": "developer", "content": "B."}, {"role": "user", "content": "x"}])
    tokenizer = stage.state.async_llm.input_processor.tokenizer
    text = tokenizer.backend.decode(stage.engine.requests[0].prompt_token_ids)
    assert "A.\n\nB." in text


def test_the_form_of_the_text_and_the_limit(make_stage):
    stage = make_stage('{"a": "b"}')
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    answer = _create(stage, text={"format": form}, max_output_tokens=50, temperature=0.5, top_k=3, seed=1)
    params = stage.engine.requests[0].params
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {"a": "b"}
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.5, 3, 50, 1)
    assert params.grammar.kind == "json_schema"
    assert answer["text"]["format"]["type"] == "json_schema"


def test_an_answer_that_is_cut_is_incomplete(make_stage):
    stage = make_stage("Hello, wörld! 😀", eos=False)
    answer, events = _create(stage, max_output_tokens=3), _streamed(stage, max_output_tokens=3)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"
    assert _plain(events[-1]["response"]["output"]) == _plain(answer["output"])


def test_logprobs(make_stage, chat):
    stage = make_stage("Hello")
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer, events = _create(stage, **body), _streamed(stage, **body)
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert len(logprobs) == answer["usage"]["output_tokens"] - 1  # the end of the sequence is not text
    assert streamed == logprobs
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)


@pytest.mark.parametrize(
    ("reply", "fields", "text"),
    [
        ("<think>\nHm, yes.\n</think>\n\nHello <b>you</b>", {}, "Hello <b>you</b>"),
        (f"Sure.\n{CALL}", {"tools": TOOLS}, "Sure."),
        ("Just text.", {"tools": TOOLS}, "Just text."),
        (CALL, {"tools": TOOLS}, ""),
    ],
)
def test_logprobs_match_the_visible_text(chat, reply, fields, text):
    stage = chat(reply, templates.QWEN, ())
    body = {"include": ["message.output_text.logprobs"], **fields}
    answer, events = _create(stage, **body), _streamed(stage, **body)
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    entries = [entry for part in parts for entry in part["logprobs"]]
    assert "".join(entry["token"] for entry in entries).strip() == text
    assert [
        entry for event in events if event["type"].endswith("output_text.delta") for entry in event["logprobs"]
    ] == entries


def test_a_failure_in_the_middle_ends_the_stream_as_failed(make_stage):
    events = _streamed(make_stage("Hello, wörld! 😀", fail_after=2))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert sum(event["type"] in ("response.failed", "response.completed") for event in events) == 1


def test_stored_responses_are_read_listed_and_deleted(make_stage):
    stage = make_stage("Yes.")
    made = _create(stage, input=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    path = f"/v1/responses/{made['id']}"
    assert _send(stage, "GET", path).json() == made
    items = _send(stage, "GET", f"{path}/input_items").json()["data"]
    assert [(item["role"], item["content"][0]["type"]) for item in items] == [
        ("assistant", "output_text"),
        ("user", "input_text"),
    ]
    assert _send(stage, "POST", f"{path}/cancel").status_code == 400
    assert _send(stage, "DELETE", path).json()["deleted"] is True
    for method, where in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel"), ("GET", f"{path}/input_items")):
        gone = _send(stage, method, where)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")
    kept = _create(stage, store=False)
    assert _send(stage, "GET", f"/v1/responses/{kept['id']}").status_code == 404


def test_input_items_come_in_the_order_and_the_pages_that_are_asked_for(make_stage):
    stage = make_stage("Yes.")
    made = _create(stage, input=[{"role": "user", "content": str(number)} for number in range(23)])

    def listed(query=""):
        page = _send(stage, "GET", f"/v1/responses/{made['id']}/input_items{query}").json()
        texts = [int(item["content"][0]["text"]) for item in page["data"]]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        return texts, page["has_more"], page["last_id"]

    assert listed("?order=asc&limit=100")[:2] == (list(range(23)), False)
    assert listed("?order=desc&limit=100") == listed("?limit=100")
    first, more, last = listed()
    assert (first, more) == (list(range(22, 2, -1)), True)
    assert listed(f"?after={last}")[:2] == ([2, 1, 0], False)
    assert listed(f"?after={last}&limit=1&order=asc")[:2] == ([4], True)


def test_another_key_does_not_find_it(make_stage):
    stage = make_stage("Yes.", api_key=("one", "two"))
    headers = {key: {"Authorization": f"Bearer {key}"} for key in ("one", "two")}
    made = _send(stage, "POST", "/v1/responses", {"input": "x"}, headers=headers["one"]).json()
    path, body = f"/v1/responses/{made['id']}", {"input": "y", "previous_response_id": made["id"]}
    assert _send(stage, "GET", path, headers=headers["one"]).status_code == 200
    assert _send(stage, "GET", path, headers=headers["two"]).status_code == 404
    refused = _send(stage, "POST", "/v1/responses", body, headers=headers["two"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")


def test_without_a_store_nothing_is_kept(make_stage):
    stage = make_stage("Yes.", response_store=0)
    assert _create(stage)["store"] is False
    refused = _send(stage, "POST", "/v1/responses", {"input": "x", "store": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")


def test_the_tokens_of_a_prompt_are_counted_without_an_answer(make_stage):
    stage = make_stage("Yes.")
    counted = _send(stage, "POST", "/v1/responses/input_tokens", {"input": "x", "instructions": "Be brief."}).json()
    assert not stage.engine.requests
    assert counted["input_tokens"] == _create(stage, instructions="Be brief.")["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "input_image"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "encrypted_content": "oarlock-text:?"}]}, "input"),
        ({"input": [{"type": "image_generation_call", "id": "i", "result": "x"}]}, "input[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "input": "x"}]}, "input[0]"),
        ({"input": "x", "context_management": [{"type": "other"}]}, "context_management"),
        ({"input": "x", "prompt_cache_options": {"prewarm": True}}, "prompt_cache_options"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "moderation": {"model": "m"}}, "moderation"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "response_format": {"type": "json_object"}}, "response_format"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "x", "tools": TOOLS + TOOLS[:1]}, "tools"),
        ({"input": "x", "tools": [SPACE, {"type": "function", "name": "crm__find"}]}, "tools"),
        ({"input": "x", "tools": [SPACE | {"name": "c" * 125}]}, "tools"),
        ({"input": "x", "tools": [WEB], "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tools": [WEB, *TOOLS], "tool_choice": WEB}, "tool_choice"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {"type": "custom", "name": "p"}}, "tool_choice"),
        ({"input": "x", "tools": [WEB, *TOOLS], "tool_choice": ALLOWED | {"mode": "required"}}, "tool_choice"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "h"}, "tools": TOOLS}, "tool_choice"),
        ({"input": "x", "reasoning": {"effort": "most"}}, "reasoning"),
        ({"input": "x", "max_output_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"input": "x" * 4000}, "input"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_bad_input_is_refused_by_name(make_stage, body, param):
    for stream in (False, True):
        refused = _send(make_stage("Yes."), "POST", "/v1/responses", {**body, "stream": stream})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param), error
        assert "messages" not in error["message"]
        assert "max_completion_tokens" not in error["message"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (response_create_params.ResponseCreateParamsBase, schema.ResponsesRequest),
        (response_create_params.ResponseCreateParamsStreaming, schema.ResponsesRequest),
        (response_compact_params.ResponseCompactParams, schema.CompactRequest),
        (response_create_params.StreamOptions, StreamOptions),
        (FunctionToolParam, schema.FunctionTool),
        (ToolChoiceFunctionParam, schema.ChosenTool),
        (ToolChoiceAllowedParam, schema.ResponsesAllowedTools),
        (ResponseTextConfigParam, schema.TextConfig),
        (ResponseFormatTextJSONSchemaConfigParam, schema.TextFormat),
        (Reasoning, schema.Reasoning),
        (EasyInputMessageParam, items.MessageItem),
        (response_input_item_param.Message, items.MessageItem),
        (ResponseOutputMessageParam, items.MessageItem),
        (ResponseInputTextParam, items.ContentPart),
        (ResponseOutputTextParam, items.ContentPart),
        (ResponseOutputRefusalParam, items.ContentPart),
        (ResponseFunctionToolCallParam, items.FunctionCallItem),
        (response_input_item_param.FunctionCallOutput, items.FunctionCallOutputItem),
        (ResponseReasoningItemParam, items.ReasoningItem),
        (ResponseCompactionItemParamParam, items.CompactionItem),
        (response_input_item_param.ItemReference, items.ItemReference),
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_field_of_the_official_types_is_known(theirs, ours):
    known = {field.alias or name for name, field in ours.model_fields.items()} | set(schema.REFUSED)
    official = get_type_hints(theirs).keys()
    assert official and sorted(official - known) == []


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [TOOLS[0] | {"async": True}]}, "tools", "'async'"),
        ({"tools": [TOOLS[0] | {"allowed_callers": ["programmatic"]}]}, "tools", "allowed_callers"),
    ],
)
def test_unsupported_fields_of_the_official_types_are_named(make_stage, body, param, words):
    answer = _send(make_stage(), "POST", "/v1/responses", {"input": "x", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith(param) and words in error["message"]


def test_values_that_ask_for_nothing_pass_and_nothing_is_reported_as_ignored(chat):
    tool = TOOLS[0] | {"defer_loading": False, "async": False, "allowed_callers": ["direct"], "output_schema": None}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "caller": {"type": "direct"}}
    result = {"type": "function_call_output", "call_id": "c", "output": "x", "name": "f", "caller": None}
    body = {"input": [call, result], "tools": [tool], "tool_choice": "none"}
    answer = _send(chat("Yes."), "POST", "/v1/responses", body)
    assert answer.status_code == 200 and "X-Ignored-Parameters" not in answer.headers
    Response.model_validate(answer.json())
    assert answer.json()["tools"][0].keys() == {"type", "name", "description", "parameters", "strict"}


def test_a_replica_can_be_named(make_stage):
    for rank, status in (("0", 200), ("1", 400), ("x", 400)):
        stage = make_stage()
        answer = _send(stage, "POST", "/v1/responses", {"input": "x"}, headers={"X-data-parallel-rank": rank})
        assert answer.status_code == status, answer.text
        assert len(stage.engine.requests) == (status == 200)
        if status == 400:
            assert answer.json()["error"]["param"] == "X-data-parallel-rank"


def _text(stage, index=-1):
    tokenizer = stage.state.async_llm.input_processor.tokenizer
    return tokenizer.backend.decode(stage.engine.requests[index].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"tools": [WEB, TOOLS[0]]}, "tools.web_search"),
        ({"tools": [{"type": kind} for kind in ("local_shell", "shell", "custom")]},
         "tools.custom, tools.local_shell, tools.shell"),
        ({"tools": [{**SPACE, "tools": [FIND, {"type": "custom", "name": "p"}]}]}, "tools.custom"),
        ({"tools": [TOOLS[0] | {"defer_loading": True, "output_schema": {"type": "object"}}]},
         "tools.defer_loading, tools.output_schema"),
        ({"tools": [WEB, TOOLS[0]], "tool_choice": ALLOWED}, "tool_choice.tools.web_search, tools.web_search"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"verbosity": "medium"}}, None),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.effort"),
        ({"reasoning": {"context": "all_turns", "mode": "pro"}}, "reasoning.context, reasoning.mode"),
        ({"reasoning": {"context": "auto", "mode": "standard"}}, None),
        ({"include": ["reasoning.encrypted_content", "web_search_call.results"]}, "include.web_search_call.results"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": "disabled"}, None),
        ({"context_management": [{"type": "compaction", "compact_threshold": 1000}]}, "context_management"),
        ({"prompt_cache_options": {"mode": "explicit"}, "client_metadata": {"a": "b"}},
         "client_metadata, prompt_cache_options"),
        ({"store": False, "prompt_cache_key": "k", "prompt_cache_retention": "12h"}, None),
        ({"input": [{"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search"}},
                    {"role": "user", "content": "x"}]}, "input.web_search_call"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
                    {"role": "user", "content": "x"}]}, "input.encrypted_content"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_followed_are_reported(make_stage, body, ignored):
    stage = make_stage("Yes.")
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        for more in ({}, {"stream": True}) if path == "/v1/responses" else ({},):
            answer = _send(stage, "POST", path, {"input": "x", **body, **more})
            assert answer.status_code == 200, answer.text
            assert answer.headers.get("X-Ignored-Parameters") == ignored
    strict = _send(make_stage(strict_parameters=True), "POST", "/v1/responses", {"input": "x", **body})
    assert strict.status_code == (400 if ignored else 200)
    assert ignored is None or ignored in strict.json()["error"]["message"]


def test_tools_of_other_servers_are_not_offered(chat):
    stage = chat("Yes.", info=INFO_LONG)
    for tools in ([WEB, *TOOLS], TOOLS, [WEB, {"type": "custom", "name": "p"}], []):
        _create(stage, tools=tools)
    with_web, without, only_web, nothing = (request.prompt_token_ids for request in stage.engine.requests)
    assert with_web == without and only_web == nothing
    assert [tool["name"] for tool in _create(stage, tools=[WEB, *TOOLS])["tools"]] == [one["name"] for one in TOOLS]


CALL_FIND = '<tool_call>\n{"name": "crm__find", "arguments": {"a": "x"}}\n</tool_call>'


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "name": "find"}, {"type": "function", "name": "crm__find"}]
)
def test_functions_of_a_namespace_are_called_by_both_names(chat, choice):
    stage = chat(CALL_FIND, info=INFO_LONG)
    answer = _create(stage, tools=[SPACE], tool_choice=choice)
    (call,) = answer["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("crm", "find", '{"a": "x"}')
    assert '"name": "crm__find"' in _text(stage)
    assert answer["tools"] == [SPACE]
    streamed = _send(stage, "POST", "/v1/responses", {"input": "x", "tools": [SPACE], "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: ")]
    items = [event["item"] for event in events if event["type"].startswith("response.output_item.")]
    assert {(item["namespace"], item["name"]) for item in items} == {("crm", "find")}
    (done,) = (event for event in events if event["type"] == "response.function_call_arguments.done")
    assert done["name"] == "find"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    _create(stage, input=[{"role": "user", "content": "x"}, call, result], tools=[SPACE])
    assert '"name": "crm__find", "arguments": {"a": "x"}' in _text(stage)
    _create(stage, input=[result], previous_response_id=answer["id"], tools=[SPACE])
    assert '"name": "crm__find", "arguments": {"a": "x"}' in _text(stage)


@pytest.mark.parametrize(
    ("call", "output", "shown"),
    [
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."},
            ('"name": "apply_patch", "arguments": {"input": "*** Begin"}', "Done."),
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x", "namespace": "crm"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Done."}]},
            ('"name": "crm__p"', "Done."),
        ),
        (
            {"type": "local_shell_call", "id": "c", "call_id": "c", "status": "completed",
             "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": "a.py"},
            ('"name": "local_shell"', '"command": ["ls"]', "a.py"),
        ),
        (
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a.py", "stderr": ""}]},
            ('"name": "shell"', '"commands": ["ls"]', '"stdout": "a.py"'),
        ),
        (
            {"type": "apply_patch_call", "call_id": "c", "status": "completed",
             "operation": {"type": "delete_file", "path": "a.py"}},
            {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
            ('"name": "apply_patch"', '"path": "a.py"', '"status": "failed"'),
        ),
        (
            {"type": "mcp_call", "id": "c", "server_label": "s", "name": "roll", "arguments": '{"a": 1}',
             "output": "4"},
            None,
            ('"name": "roll", "arguments": {"a": 1}', "4"),
        ),
        (
            {"type": "code_interpreter_call", "id": "c", "container_id": "k", "status": "completed", "code": "1 + 1",
             "outputs": [{"type": "logs", "logs": "two"}]},
            None,
            ('"name": "code_interpreter"', '"code": "1 + 1"', '"logs": "two"'),
        ),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else None,
)  # fmt: skip
def test_calls_of_other_tools_are_read_as_calls_of_functions(chat, call, output, shown):
    stage = chat("Yes.", info=INFO_LONG)
    turns = [
        {"role": "user", "content": "x"},
        call,
        *([output] if output else []),
        {"role": "user", "content": "Go on."},
    ]
    answer = _send(stage, "POST", "/v1/responses", {"input": turns})
    assert answer.status_code == 200, answer.text
    text = _text(stage)
    places = [text.index(part) for part in (*shown, "Go on.")]
    assert places == sorted(places)
    _create(stage, input="More.", previous_response_id=answer.json()["id"])
    assert all(part in _text(stage) for part in shown)


def test_an_effort_decides_about_thinking(chat):
    stage = chat("Yes.", info=INFO_LONG)
    for effort, is_on in (("none", False), ("low", True), ("xhigh", True)):
        answer = _send(stage, "POST", "/v1/responses", {"input": "x", "reasoning": {"effort": effort}})
        assert answer.status_code == 200 and "X-Ignored-Parameters" not in answer.headers
        assert _text(stage).endswith("</think>\n\n") is not is_on
