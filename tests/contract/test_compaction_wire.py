"""`/v1/responses/compact`: a conversation becomes the user's messages and a summary, which the next prompt shows."""

from __future__ import annotations

import base64
import dataclasses
import json

import anyio
import openai
import pytest

from oarlock.server.endpoints.responses.compact import MAX_TOKENS
from oarlock.server.llm.generation_config import GenerationConfig
from oarlock.server.llm.pooler_config import PoolerConfig, Task
from oarlock.server.schemas.response_items import REASONING, SUMMARY, sealed
from tests.contract.conftest import INFO
from tests.unit.server.llm import chat_templates as templates

COMPACT = "/v1/responses/compact"
LONG = dataclasses.replace(INFO, max_model_len=2048, max_num_batched_tokens=2048, num_blocks=600)
CALL = {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"}
TALK = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Where is "}, {"type": "input_text", "text": "it?"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    CALL,
    {"type": "function_call_output", "call_id": "c", "output": "a.py"},
    {"role": "assistant", "content": "In a.py."},
    {"role": "user", "content": "Thanks."},
]
SUMMARY_TEXT = "They looked for it: it is in a.py. 😀"


def _send(stage, method, path, body=None, **options):
    async def send():
        async with stage.client(**options) as client:
            return await client.request(method, path, json=body)

    return anyio.run(send)


def _compact(stage, **body):
    answer = _send(stage, "POST", COMPACT, {"input": TALK, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def _prompt(stage, index=-1):
    tokenizer = stage.state.async_llm.input_processor.tokenizer
    return tokenizer.backend.decode(stage.engine.requests[index].prompt_token_ids, skip_special_tokens=False)


def _unsealed(item):
    assert item["type"] == "compaction" and item["encrypted_content"].startswith(SUMMARY)
    return base64.b64decode(item["encrypted_content"].removeprefix(SUMMARY)).decode()


def test_the_answer_has_the_users_messages_and_the_summary(chat):
    stage = chat(f" {SUMMARY_TEXT}\n", info=LONG)
    answer = _compact(stage, instructions="You are a guide.")
    assert answer.keys() == {"id", "object", "created_at", "output", "usage"}
    assert (answer["object"], answer["id"][:5]) == ("response.compaction", "resp_")
    *messages, last = answer["output"]
    assert [(item["type"], item["role"], item["content"]) for item in messages] == [
        ("message", "developer", [{"type": "input_text", "text": "Be brief."}]),
        ("message", "user", [{"type": "input_text", "text": "Where is it?"}]),
        ("message", "user", [{"type": "input_text", "text": "Thanks."}]),
    ]
    assert _unsealed(last) == SUMMARY_TEXT
    assert len({item["id"] for item in answer["output"]}) == 4
    (request,) = stage.engine.requests
    usage = answer["usage"]
    assert usage["input_tokens"] == len(request.prompt_token_ids)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] > 0 < usage["output_tokens"]
    prompt = _prompt(stage)
    places = [prompt.index(text) for text in ("guide", "Where is it?", "a.py", "Thanks.", "Summarise")]
    assert places == sorted(places)


def test_the_model_is_asked_without_reasoning_and_within_bounds(chat):
    huge = dataclasses.replace(INFO, max_model_len=16_384, max_num_batched_tokens=2048, num_blocks=1100)
    config = GenerationConfig(sampling={"temperature": 0.6, "top_k": 20})
    stage = chat("Yes.", info=huge, generation_config=config)
    _compact(stage, timeout=60, priority=3, cache_salt="salt")
    (request,) = stage.engine.requests
    assert (request.params.temperature, request.params.top_k) == (0.6, 20)
    assert (request.params.max_tokens, request.priority) == (MAX_TOKENS, 3)
    assert _prompt(stage).endswith("<think>\n\n</think>\n\n")
    assert b"salt" in request.cache_salt


def test_reasoning_is_no_part_of_the_summary(chat):
    answer = _compact(chat(f"Hm.</think>\n\n{SUMMARY_TEXT}", templates.THINKING, info=LONG))
    assert _unsealed(answer["output"][-1]) == SUMMARY_TEXT
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_the_summary_comes_back_in_the_next_prompt(chat):
    stage = chat(SUMMARY_TEXT, info=LONG)
    compacted = _compact(stage)["output"]
    went_on = [*compacted, {"role": "user", "content": "And now?"}]
    first = _send(stage, "POST", "/v1/responses", {"input": went_on}).json()
    prompt = _prompt(stage)
    places = [prompt.index(text) for text in ("Be brief.", "Where is it?", "Thanks.", SUMMARY_TEXT, "And now?")]
    assert places == sorted(places) and "In a.py." not in prompt
    counted = _send(stage, "POST", "/v1/responses/input_tokens", {"input": went_on}).json()
    assert counted["input_tokens"] == first["usage"]["input_tokens"]
    more = {"input": "More.", "previous_response_id": first["id"]}
    assert _send(stage, "POST", "/v1/responses", more).status_code == 200
    assert SUMMARY_TEXT in _prompt(stage)
    listed = _send(stage, "GET", f"/v1/responses/{first['id']}/input_items?order=asc").json()["data"]
    assert listed[3] == compacted[-1]
    again = _compact(stage, input=went_on)["output"]
    assert [item["type"] for item in again] == ["message"] * 4 + ["compaction"]
    assert SUMMARY_TEXT in _prompt(stage)


@pytest.mark.parametrize("name", [name for name in vars(templates) if name.isupper() and name[0] != "_"])
def test_every_template_shows_the_summary_wherever_it_stands(chat, name):
    reasoning = "Hm.</think>" if name == "THINKING" else ""
    stage = chat(reasoning + SUMMARY_TEXT, getattr(templates, name), info=LONG)
    compacted = _compact(stage, input=[TALK[1], TALK[5], TALK[6]])["output"]
    for more in ([], [{"role": "user", "content": "And now?"}]):
        answer = _send(stage, "POST", "/v1/responses", {"input": [*compacted, *more]})
        assert answer.status_code == 200, answer.text
        prompt = _prompt(stage)
        assert "Where is it?" in prompt and SUMMARY_TEXT in prompt and ("And now?" in prompt) == bool(more)


def test_a_stored_response_is_compacted_by_its_own_key_only(chat):
    stage = chat("In a.py.", info=LONG, api_key=("one", "two"))
    headers = {key: {"Authorization": f"Bearer {key}"} for key in ("one", "two")}
    made = _send(stage, "POST", "/v1/responses", {"input": "Where is it?"}, headers=headers["one"]).json()
    body = {"model": "demo", "previous_response_id": made["id"]}
    answer = _send(stage, "POST", COMPACT, body, headers=headers["one"])
    assert [item["type"] for item in answer.json()["output"]] == ["message", "compaction"]
    assert "Where is it?" in _prompt(stage) and "In a.py." in _prompt(stage)
    refused = _send(stage, "POST", COMPACT, body, headers=headers["two"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert _send(stage, "POST", COMPACT, body).status_code == 401
    assert _send(stage, "GET", f"/v1/responses/{answer.json()['id']}", headers=headers["one"]).status_code == 404


def test_a_summary_that_was_cut_says_so_to_client_and_model(make_stage):
    stage = make_stage("One two three four five six seven", eos=False)
    answer = _compact(stage, input="x")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert _unsealed(answer["output"][-1]).endswith("seven\n\n(The summary was cut short here.)")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [{"type": "web_search_call", "id": "w", "status": "completed"}]}, "input"),
        ({"input": "x " * 4000}, "input"),
        ({"input": "x", "model": "other"}, "model"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "cmp_1"}]}, "input[0]"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "image": {"context_compression": "enabled"}}, "image"),
        ({"input": "x", "timeout": 0}, "timeout"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools"),
        ({"input": "x", "tool_choice": "sometimes"}, "tool_choice"),
        ({"input": "x", "reasoning": {"effort": "most"}}, "reasoning"),
    ],
)
def test_bad_input_is_refused_by_name(make_stage, body, param):
    stage = make_stage("Yes.")
    refused = _send(stage, "POST", COMPACT, body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (404 if param == "model" else 400, param), error
    assert not stage.engine.requests and "messages" not in error["message"]


def test_a_conversation_that_leaves_no_room_for_a_summary_is_refused(make_stage):
    stage = make_stage("Yes.")
    statuses = {}
    for words in range(0, 256, 4):
        answer = _send(stage, "POST", COMPACT, {"input": "x " * words or "x"})
        statuses[words] = answer.status_code
        if answer.status_code == 400:
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert answer.json()["error"]["param"] == "input" and "16" in answer.json()["error"]["message"]
            break
    assert [*statuses.values()][-2:] == [200, 400]
    assert 256 - len(stage.engine.requests[-1].prompt_token_ids) >= 16


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("gAAAAABo", "another server encrypted"),
        (sealed("reasoning", REASONING), "another server encrypted"),
        (f"{SUMMARY}?", "was changed"),
        (f"{SUMMARY}/w==", "was changed"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens", COMPACT])
def test_only_an_own_summary_is_read(make_stage, path, value, words):
    item = {"type": "compaction", "id": "cmp_1", "encrypted_content": value}
    refused = _send(make_stage("Yes."), "POST", path, {"input": [item, {"role": "user", "content": "x"}]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "input[0].encrypted_content") and words in error["message"]


def test_a_summary_is_not_read_as_reasoning(chat):
    stage = chat("Yes.", info=LONG)
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed(SUMMARY_TEXT, SUMMARY)}
    answer = _send(stage, "POST", "/v1/responses", {"input": [item, {"role": "user", "content": "x"}]})
    assert answer.headers["X-Ignored-Parameters"] == "input.encrypted_content" and SUMMARY_TEXT not in _prompt(stage)


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({}, None),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "24h", "service_tier": "fast", "user": "u"}, None),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "auto", "parallel_tool_calls": False,
             "reasoning": {"effort": "high"}, "text": {"verbosity": "low"}},
            "reasoning, text, tool_choice, tools",
        ),
        ({"temperature": 1, "prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options, temperature"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", [templates.QWEN, templates.LLAMA], ids=["with a switch", "without reasoning"])
def test_fields_without_effect_are_reported(chat, template, body, ignored):
    answer = _send(chat("Yes.", template, info=LONG), "POST", COMPACT, {"input": TALK, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("X-Ignored-Parameters") == ignored
    strict = _send(chat("Yes.", template, info=LONG, strict_parameters=True), "POST", COMPACT, {"input": TALK, **body})
    assert strict.status_code == (400 if ignored else 200)


def test_no_answer_without_a_whole_summary(make_stage, chat):
    empty = _send(make_stage(" \n"), "POST", COMPACT, {"input": "x"})
    assert (empty.status_code, empty.json()["error"]["code"]) == (400, "no_summary")
    reasoning = _send(chat("Hm.", templates.THINKING, info=LONG), "POST", COMPACT, {"input": TALK})
    assert reasoning.json()["error"]["code"] == "no_summary"
    slow = make_stage("One two three four five", delay_s=0.1)
    late = _send(slow, "POST", COMPACT, {"input": "x", "timeout": 0.25})
    assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
    assert late.headers["x-should-retry"] == "false"
    failed = _send(make_stage("One two three", fail_after=1), "POST", COMPACT, {"input": "x"})
    assert failed.status_code == 500
    assert len(slow.engine.aborted) == 1


def test_a_summary_that_an_operator_ends_is_an_error(make_stage):
    stage = make_stage("One two three", admin_api_key="boss", pause_after=1)

    async def scenario():
        answers = []

        async def compact(client):
            answers.append(await client.post(COMPACT, json={"input": "x"}))

        async with stage.client() as client, anyio.create_task_group() as tasks:
            tasks.start_soon(compact, client)
            while not stage.engine.requests:
                await anyio.sleep(0.01)
            await client.post("/admin/abort", json={"all": True}, headers={"Authorization": "Bearer boss"})
        return answers[0]

    answer = anyio.run(scenario)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "aborted")
    assert stage.state.num_in_flight == 0 and len(stage.engine.aborted) == 1


def test_a_model_that_writes_no_texts_cannot_compact(make_stage):
    refused = _send(make_stage(pooler=PoolerConfig(Task.EMBED)), "POST", COMPACT, {"input": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_by_model")


def test_it_waits_in_the_same_queue_and_leaves_a_record(make_stage, queue_full):
    stage = make_stage("Yes.", admin_api_key="boss")
    _send(stage, "POST", COMPACT, {"input": "x"}, headers={"X-Request-Id": "mine"})
    admin = {"Authorization": "Bearer boss"}
    record = _send(stage, "GET", "/v1/requests/mine", headers=admin).json()
    assert (record["route"], record["id"]) == (COMPACT, "resp_mine")
    assert 'route="/v1/responses/compact"' in _send(stage, "GET", "/metrics").text
    full = _send(make_stage("Yes.", refuse=queue_full), "POST", COMPACT, {"input": "x"})
    assert full.status_code == 429 and full.headers["Retry-After"]


def test_the_official_client_reads_it_and_sends_it_back(make_server):
    server = make_server("Hello again.", info=LONG)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    compacted = client.responses.compact(
        model="demo", input=[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    )
    assert compacted.object == "response.compaction" and compacted.usage.output_tokens > 0
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    items = [item.to_dict(warnings=False) for item in compacted.output]
    assert json.dumps(items)
    went_on = client.responses.create(model="demo", input=[*items, {"role": "user", "content": "More."}])
    assert went_on.output_text == "Hello again."
    assert "Hello again." in _prompt(server.stage)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.compact(model="demo")
    assert refused.value.param == "input"
