"""`/v1/messages`: streams equal plain answers, every event and object is one of the official client's types."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import anyio
import pytest
from pydantic import TypeAdapter

from oarlock.server.endpoints.messages.translate import ContentBlocks
from oarlock.server.schemas import messages as schema
from tests.contract.conftest import INFO
from tests.unit.server.llm import chat_templates as templates

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"name": "f", "description": "d", "input_schema": SCHEMA}, {"name": "g", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é😀\\n"}}\n</tool_call>'
TWO = f'Sure.\n{CALL}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>'
ON = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
INFO_LONG = dataclasses.replace(INFO, max_model_len=2048, max_num_batched_tokens=2048, num_blocks=600)
HI = [{"role": "user", "content": "x"}]
WEB = {"type": "web_search_20250305", "name": "w", "max_uses": 5}


@cache
def client_types():
    """The official client's types, imported by the tests that use them: that takes seconds."""
    import anthropic.types.message_create_params

    return anthropic.types


@cache
def event_type():
    return TypeAdapter(client_types().RawMessageStreamEvent)


def send(stage, body, path="/v1/messages", headers=None, **options):
    async def post():
        async with stage.client(**options) as client:
            return await client.post(path, json=body, headers=headers)

    return anyio.run(post)


def create(stage, **body):
    answer = send(stage, {"messages": HI, "max_tokens": 400, **body})
    assert answer.status_code == 200, answer.text
    client_types().Message.model_validate(answer.json())
    return answer.json()


def events_of(text):
    """Each checked, in the order that the API promises."""
    events = []
    for block in text.strip().split("\n\n"):
        if block.startswith(": "):
            continue
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            event_type().validate_python(event)
        events.append(event)
    return events


def streamed(stage, **body):
    """The message that the official client puts together from the events of the same answer."""
    from anthropic.lib.streaming._messages import accumulate_event

    answer = send(stage, {"messages": HI, "max_tokens": 400, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    events = events_of(answer.text)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    open_block, message, json_bufs = None, None, {}
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
        if event["type"] != "ping":
            checked = event_type().validate_python(event)
            message = accumulate_event(event=checked, current_snapshot=message, json_bufs=json_bufs)
    assert open_block is None
    return json.loads(message.model_dump_json(exclude_none=True, exclude={"content": {"__all__": {"partial_json"}}}))


def plain(message):
    """Without what is new for each answer, and without what is null."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    kept = {name: value for name, value in message.items() if name != "id" and value is not None}
    return kept | {"content": blocks}


@pytest.mark.parametrize(
    ("reply", "body", "types", "reason"),
    [
        ("Hello, wörld! 😀", {}, ["text"], "end_turn"),
        (" \n", {}, ["text"], "end_turn"),
        ("", {}, [], "end_turn"),
        (TWO, {"tools": TOOLS}, ["text", "tool_use", "tool_use"], "tool_use"),
        (CALL, {"tools": TOOLS, "tool_choice": {"type": "any"}}, ["tool_use"], "tool_use"),
        (CALL, {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, ["tool_use"], "tool_use"),
        ("<think>Hm.</think>\n\nYes.", ON, ["thinking", "text"], "end_turn"),
        (f"<think>Hm.</think>\n\n{CALL}", {**ON, "tools": TOOLS}, ["thinking", "tool_use"], "tool_use"),
        ("one two three", {"stop_sequences": [" three"]}, ["text"], "stop_sequence"),
        ("one two three four", {"max_tokens": 2}, ["text"], "max_tokens"),
        (CALL, {"tools": TOOLS, "max_tokens": 24}, ["tool_use"], "max_tokens"),
    ],
)
def test_a_stream_equals_the_plain_answer(chat, reply, body, types, reason):
    stage = chat(reply, templates.QWEN, (), info=INFO_LONG)
    whole, built = create(stage, **body), streamed(stage, **body)
    assert [block["type"] for block in whole["content"]] == types
    assert whole["stop_reason"] == reason
    assert whole["stop_sequence"] == (" three" if reason == "stop_sequence" else None)
    usage, of_stream = whole.pop("usage"), built.pop("usage")
    assert plain(whole) == plain(built)
    for name in ("output_tokens", "output_tokens_details"):
        assert usage[name] == of_stream[name]
    assert sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens")) == len(
        stage.engine.requests[0].prompt_token_ids
    )


def test_reasoning_can_be_hidden(chat):
    stage = chat("<think>Secret.</think>\n\nYes.", templates.QWEN, (), info=INFO_LONG)
    body = {"thinking": {"type": "adaptive", "display": "omitted"}}
    for answer in (create(stage, **body), streamed(stage, **body)):
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        assert "Secret" not in json.dumps(answer)


def test_calls_results_and_reasoning_go_into_the_next_turn(chat):
    stage = chat(f"<think>Hm.</think>\n\n{TWO}", templates.QWEN, (), info=INFO_LONG)
    first = create(stage, system="Be brief.", tools=TOOLS, **ON)
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    assert calls[0]["input"] == {"a": "é😀\n"}
    results = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": [{"type": "text", "text": "42"}]},
        {"type": "tool_result", "tool_use_id": calls[1]["id"], "content": "no disk", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    turns = [*HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    create(stage, system=[{"type": "text", "text": "Be brief."}], messages=turns, tools=TOOLS, **ON)
    tokenizer = stage.state.async_llm.input_processor.tokenizer
    text = tokenizer.backend.decode(stage.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    places = [
        text.rindex(part) for part in ("Be brief.", "Sure.", '"name": "f"', '"name": "g"', "42", "Error: no disk")
    ]
    assert places == sorted(places) and text.index("Go on.") > places[-1]


def test_the_same_conversation_is_the_same_prompt_as_on_the_chat_route(chat):
    stage = chat("Yes.", templates.QWEN, (), info=INFO_LONG)
    create(stage, system="A.", messages=[{"role": "user", "content": [{"type": "text", "text": "B"}]}], **ON)
    messages = [{"role": "system", "content": "A."}, {"role": "user", "content": "B"}]
    body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
    assert send(stage, body, "/v1/chat/completions").status_code == 200
    assert stage.engine.requests[0].prompt_token_ids == stage.engine.requests[1].prompt_token_ids


def test_an_answer_goes_on_with_the_words_it_is_given(chat):
    stage = chat(" world", templates.QWEN, (), info=INFO_LONG)
    create(stage, messages=[*HI, {"role": "assistant", "content": "Hello"}])
    tokenizer = stage.state.async_llm.input_processor.tokenizer
    text = tokenizer.backend.decode(stage.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("assistant\nHello")


def test_sampling_format_and_the_user_reach_the_engine(make_stage):
    stage = make_stage('{"a": "b"}')
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    create(stage, output_config=config, max_tokens=50, temperature=0.5, top_k=3, seed=1, metadata={"user_id": "u"})
    params = stage.engine.requests[0].params
    assert (params.max_tokens, params.temperature, params.top_k) == (50, 0.5, 3)
    assert params.grammar is not None and json.loads(params.grammar.text) == SCHEMA


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_strict_tool_binds_the_calls_that_the_model_makes_by_itself(chat, strict):
    stage = chat(CALL, templates.QWEN, (), info=INFO_LONG)
    create(stage, tools=[{**TOOLS[0], "strict": strict}])
    grammar = stage.engine.requests[0].params.grammar
    assert (grammar is not None) is (strict is True)
    assert strict is not True or json.dumps(SCHEMA["properties"]) in grammar.text


def test_a_full_context_is_not_the_limit_of_the_request(make_stage):
    stage = make_stage(lambda request: [5] * 4096)
    answer = create(stage, max_tokens=INFO.max_model_len)
    assert answer["stop_reason"] == "model_context_window_exceeded"


def test_tokens_are_counted_without_an_answer(chat):
    stage = chat("Yes.", templates.QWEN, (), info=INFO_LONG)
    body = {"messages": HI, "system": "A.", "tools": TOOLS}
    answer = send(stage, body, "/v1/messages/count_tokens")
    usage = create(stage, system="A.", tools=TOOLS)["usage"]
    assert answer.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert len(stage.engine.requests) == 1


def test_a_failure_in_the_middle_is_an_event_of_this_api(make_stage):
    stage = make_stage("one two three", fail_after=2)
    events = events_of(send(stage, {"messages": HI, "max_tokens": 9, "stream": True}).text)
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] in ("api_error", "overloaded_error")
    assert events[-1]["request_id"]


@pytest.mark.parametrize(
    ("body", "path", "headers", "status", "kind", "names"),
    [
        ({"messages": HI}, "", {}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": [], "max_tokens": 1}, "", {}, 400, "invalid_request_error", "messages"),
        ({"messages": HI, "max_tokens": 1, "model": "other"}, "", {}, 404, "not_found_error", "other"),
        ({"messages": HI, "max_tokens": 0}, "", {}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": HI, "max_tokens": 1, "n": 2}, "", {}, 400, "invalid_request_error", "'n'"),
        ({"messages": HI, "max_tokens": 1, "stop": ["x"]}, "", {}, 400, "invalid_request_error", "stop_sequences"),
        ({"messages": HI, "max_tokens": 1, "inference_geo": "us"}, "", {}, 400, "invalid_request_error", "_geo"),
        (
            {"messages": HI, "max_tokens": 1, "tools": [WEB, TOOLS[0]], "tool_choice": {"type": "tool", "name": "w"}},
            "", {}, 400, "invalid_request_error", "tool_choice",
        ),
        (
            {"messages": HI, "max_tokens": 1, "tools": [{"type": "function", "function": {"name": "f"}}]},
            "", {}, 400, "invalid_request_error", "'function'",
        ),
        (
            {"messages": HI, "max_tokens": 1, "tools": [WEB], "tool_choice": {"type": "any"}},
            "", {}, 400, "invalid_request_error", "tool_choice",
        ),
        (
            {"messages": HI, "max_tokens": 1, "tools": [TOOLS[0] | {"allowed_callers": ["code_execution_20250825"]}]},
            "", {}, 400, "invalid_request_error", "allowed_callers",
        ),
        (
            {"messages": HI, "max_tokens": 1, "tools": [TOOLS[0], TOOLS[0]]},
            "", {}, 400, "invalid_request_error", "'f'",
        ),
        (
            {"messages": HI, "max_tokens": 1, "output_config": {"effort": "most"}},
            "", {}, 400, "invalid_request_error", "output_config.effort",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 1},
            "", {}, 400, "invalid_request_error", "image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}], "max_tokens": 1},
            "", {}, 400, "invalid_request_error", "thinking",
        ),
        ({"messages": HI, "stream": True}, "/count_tokens", {}, 400, "invalid_request_error", "stream"),
        ({"messages": HI}, "/batches", {}, 404, "not_found_error", "/v1/messages/batches"),
        ({"messages": HI, "max_tokens": 1}, "", {"X-Request-Timeout": "x"}, 400, "invalid_request_error", "Timeout"),
    ],
)  # fmt: skip
def test_errors_have_the_shape_of_this_api(make_stage, body, path, headers, status, kind, names):
    answer = send(make_stage(), body, f"/v1/messages{path}", headers)
    assert answer.status_code == status, answer.text
    error = answer.json()
    assert error.keys() == {"type", "error", "request_id"} and error["type"] == "error"
    assert error["error"].keys() == {"type", "message"} and error["error"]["type"] == kind
    assert names in error["error"]["message"]
    assert answer.headers["request-id"] == error["request_id"] == answer.headers["x-request-id"]


def test_keys_are_taken_where_this_apis_clients_put_them(make_stage):
    stage = make_stage(api_key=("secret",))
    body = {"messages": HI, "max_tokens": 2}
    assert send(stage, body, headers={"x-api-key": "secret"}).status_code == 200
    assert send(stage, body, headers={"Authorization": "Bearer secret"}).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": "secret", "Authorization": "Bearer wrong"}):
        refused = send(stage, body, headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    other = send(stage, {"prompt": "x"}, "/v1/completions")
    assert set(other.json()["error"]) == {"message", "type", "param", "code"}  # elsewhere nothing has changed


def test_arguments_that_are_cut_or_broken_are_what_can_be_read_of_them():
    from oarlock.server.chat.tool_parsers.call_parser import ArgumentsDelta, ToolCallStart

    for text, value in (('{"a": [1, 2', {"a": [1, 2]}), ("[1]", {}), ("{broken", {}), ("", {}), ('{"a": 1}', {"a": 1})):
        blocks = ContentBlocks(shows_reasoning=True)
        list(blocks.push([ToolCallStart("f"), ArgumentsDelta(text)]))
        list(blocks.end())
        assert blocks.items[0]["input"] == value


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("MessageCreateParamsBase", schema.MessagesRequest),
        ("MessageCountTokensParams", schema.CountTokensRequest),
        ("TextBlockParam", schema.TextBlock),
        ("ThinkingBlockParam", schema.ThinkingBlock),
        ("ToolUseBlockParam", schema.ToolUseBlock),
        ("ToolResultBlockParam", schema.ToolResultBlock),
        ("CacheControlEphemeralParam", schema.CacheControl),
        ("ToolParam", schema.MessagesTool),
        ("ToolChoiceAnyParam", schema.ToolChoice),
        ("ToolChoiceToolParam", schema.NamedTool),
        ("ThinkingConfigEnabledParam", schema.Thinking),
        ("OutputConfigParam", schema.OutputConfig),
    ],
    ids=lambda kind: getattr(kind, "__name__", kind),
)
def test_every_field_of_the_official_types_is_known(theirs, ours):
    types = client_types()
    fields = getattr(types, theirs, None) or getattr(types.message_create_params, theirs)
    assert sorted(fields.__annotations__.keys() - ours.model_fields.keys()) == []


KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"context_management": KEEP_ALL}, "context_management"),
        ({"context_management": {"edits": []}}, "context_management"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"context_management": {"edits": [{"type": "compact_20260112", "trigger": {}}]}}, "context_management"),
        ({"tools": [WEB, TOOLS[0]]}, "tools.web_search_20250305"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.bash_20250124"),
        ({"tools": [TOOLS[0] | {"defer_loading": True}]}, "tools.defer_loading"),
        ({"tools": [TOOLS[0] | {"input_examples": [{"a": "x"}]}]}, "tools.input_examples"),
        ({"tools": [TOOLS[0] | {"defer_loading": False, "input_examples": []}]}, None),
        ({"container": "c"}, "container"),
        ({"container": {"skills": []}}, "container"),
        ({"mcp_servers": [{"type": "url", "url": "u", "name": "n"}]}, "mcp_servers"),
        ({"mcp_servers": [], "container": None, "fallbacks": [], "inference_geo": "global"}, None),
        ({"diagnostics": {"previous_message_id": "m"}}, "diagnostics"),
        ({"fallbacks": [{"model": "m"}]}, "fallbacks"),
        ({"speed": "fast"}, "speed"),
        ({"speed": "standard", "store": True}, None),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"thinking": {"type": "adaptive"}}, "thinking"),
        ({"thinking": {"type": "disabled"}}, None),
        ({"thinking": {"type": "disabled", "display": "summarized"}}, None),
        ({"thinking": {"type": "disabled", "display": "updates"}}, "thinking.display"),
        ({"betas": ["x"]}, "betas"),
        ({"context_management": None}, None),
        ({"context_management": {}}, None),
    ],
)
def test_fields_that_cannot_be_followed_are_reported(make_stage, body, ignored):
    stage = make_stage()
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for more in ({}, {"stream": True}) if path == "/v1/messages" else ({},):
            sent = {"messages": HI, "max_tokens": 9, **body, **more}
            if path != "/v1/messages":
                del sent["max_tokens"]
            answer = send(stage, sent, path)
            assert answer.status_code == 200, answer.text
            assert answer.headers.get("X-Ignored-Parameters") == ignored
    assert stage.counters.ignored_parameters == (3 if ignored else 0)
    strict = send(make_stage(strict_parameters=True), {"messages": HI, "max_tokens": 9, **body})
    assert strict.status_code == (400 if ignored else 200)
    assert ignored is None or ignored in strict.json()["error"]["message"]


def test_tools_of_other_servers_are_not_offered(chat):
    stage = chat("Yes.", templates.QWEN, (), info=INFO_LONG)
    for tools in ([WEB, *TOOLS], TOOLS, [WEB], None):
        create(stage, tools=tools)
    with_web, without, only_web, nothing = (request.prompt_token_ids for request in stage.engine.requests)
    assert with_web == without and only_web == nothing


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli;"


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        ([BILLING, "A.", "B."], "A.B."),
        ([f"{BILLING}\nA.", "B."], "A.B."),
        (f"{BILLING}\nA.", "A."),
        ([BILLING], None),
        (BILLING, None),
    ],
)
def test_the_billing_line_of_a_client_is_left_out(chat, system, kept):
    stage = chat("Yes.", templates.QWEN, (), info=INFO_LONG)
    counts = []
    for text in (system, kept):
        given = [{"type": "text", "text": one} for one in text] if isinstance(text, list) else text
        body = {} if given is None else {"system": given}
        create(stage, **body)
        counts.append(send(stage, {"messages": HI, **body}, "/v1/messages/count_tokens").json())
    lengths = [len(request.prompt_token_ids) for request in stage.engine.requests]
    assert stage.engine.requests[0].prompt_token_ids == stage.engine.requests[1].prompt_token_ids, lengths
    assert counts[0] == counts[1] == {"input_tokens": lengths[0]}


@pytest.mark.parametrize(
    "system", [["A.", BILLING], f"A.\n{BILLING}", f" {BILLING}", "x-anthropic-billing-headers: x", BILLING.upper()]
)
def test_only_the_first_line_of_a_system_prompt_is_a_billing_line(chat, system):
    stage = chat("Yes.", templates.QWEN, (), info=INFO_LONG)
    blocks = [{"type": "text", "text": one} for one in system] if isinstance(system, list) else system
    create(stage, system=blocks)
    tokenizer = stage.state.async_llm.input_processor.tokenizer
    text = tokenizer.backend.decode(stage.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert "".join(system).strip() in text


def test_an_effort_decides_about_thinking(chat):
    stage = chat("Yes.", templates.QWEN, (), info=INFO_LONG)
    tokenizer = stage.state.async_llm.input_processor.tokenizer
    for config, thinking, is_on in (
        (None, None, False),
        ("high", None, True),
        ("none", None, False),
        ("low", {"type": "adaptive"}, True),
        ("high", {"type": "disabled"}, False),
    ):
        body = {"output_config": config and {"effort": config}, "thinking": thinking}
        answer = send(stage, {"messages": HI, "max_tokens": 9, **body})
        text = tokenizer.backend.decode(stage.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
        assert text.endswith("</think>\n\n") is not is_on
        ignored = "output_config.effort" if (config, thinking) == ("high", {"type": "disabled"}) else None
        assert answer.headers.get("X-Ignored-Parameters") == ignored


def test_fields_of_a_large_body_are_reported_too(make_stage):
    stage = make_stage()
    answer = send(stage, {"messages": HI, "max_tokens": 9, "context_management": KEEP_ALL, "x": [[]] * 40_000})
    assert answer.status_code == 200, answer.text
    assert stage.state.large_bodies.pid is not None
    assert answer.headers["X-Ignored-Parameters"] == "context_management, x"


def test_an_edit_that_is_not_known_is_refused(make_stage):
    for edits in ([{"type": "replace_all_20270101"}], [{}], ["x"], {"type": "x"}):
        answer = send(make_stage(), {"messages": HI, "max_tokens": 9, "context_management": {"edits": edits}})
        assert answer.status_code == 400 and "context_management" in answer.json()["error"]["message"]
