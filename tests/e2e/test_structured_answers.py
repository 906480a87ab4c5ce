"""Structured output through the whole server: one rank and two, streamed or not, alone and among other requests."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from tests.e2e.running import events

PROMPT = "Q: What does os.path.join do?\nA:"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "size": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "size", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 10}]},
    {"$defs": {"t": {"enum": [1, "x", None]}}, "type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 4},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}, "required": ["when"]},
]
FORMS = [
    ({"structured_outputs": {"choice": ["left", "right"]}}, r"left|right"),
    ({"guided_choice": ["ü", "😀 yes"]}, r"ü|😀 yes"),
    ({"guided_regex": r"[A-Z][a-z]{2,8} \d{3}"}, r"[A-Z][a-z]{2,8} \d{3}"),
    ({"structured_outputs": {"regex": "(ab){3}"}, "ignore_eos": True}, "ababab"),
    ({"guided_grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,5}/'}, r"<[a-z]{1,5}>"),
    ({"structured_outputs": {"grammar": 'root ::= "no" | "yes" [!?]'}}, r"no|yes[!?]"),
]


def choices(server, prompt=PROMPT, **fields):
    return server.complete(prompt, **{"max_tokens": 120, "temperature": 0, **fields})["choices"]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_json_matches_its_schema(tp1, schema):
    for fields in ({"guided_json": schema}, {"structured_outputs": {"json": json.dumps(schema)}}):
        for more in ({}, {"temperature": 1.2, "seed": 7, "n": 3}):
            for choice in choices(tp1, **fields, **more):
                assert choice["finish_reason"] == "stop", choice
                jsonschema.validate(value := json.loads(choice["text"]), schema)
                compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
                assert "\n" not in choice["text"] and len(choice["text"]) <= len(compact) + 200


@pytest.mark.parametrize(("fields", "pattern"), FORMS, ids=range(len(FORMS)))
def test_text_matches_its_constraint_on_one_rank_and_on_two(tp1, tp2, fields, pattern):
    for more in ({}, {"temperature": 1.0, "seed": 3, "n": 2}):
        one, two = choices(tp1, **fields, **more), choices(tp2, **fields, **more)
        assert [choice["text"] for choice in one] == [choice["text"] for choice in two]
        for choice in one:
            assert re.fullmatch(pattern, choice["text"]) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 0.9, "seed": 1}, {"stop": '"age"'}, {"logprobs": 2}])
def test_a_stream_has_the_same_text(tp1, more):
    request = {"response_format": FORMAT, "max_tokens": 100, "temperature": 0, **more}
    plain = choices(tp1, **request)
    texts, reasons = [""] * len(plain), [None] * len(plain)
    for chunk in tp1.stream(PROMPT, **request):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == [choice["text"] for choice in plain]
    assert reasons == [choice["finish_reason"] for choice in plain] == ["stop"] * len(plain)


def test_a_chat_answer_matches_its_schema(tp1):
    request = {"messages": [{"role": "user", "content": "Who?"}], "response_format": FORMAT, "temperature": 0}
    plain = tp1.client.post("/v1/chat/completions", json=request).json()["choices"][0]
    jsonschema.validate(json.loads(plain["message"]["content"]), PERSON)
    with tp1.client.stream("POST", "/v1/chat/completions", json={**request, "stream": True}) as answer:
        deltas = [choice["delta"].get("content") or "" for chunk in events(answer) for choice in chunk["choices"]]
    assert "".join(deltas) == plain["message"]["content"]
    some_object = {**request, "response_format": {"type": "json_object"}, "max_tokens": 60}
    choice = tp1.client.post("/v1/chat/completions", json=some_object).json()["choices"][0]
    assert choice["message"]["content"].startswith("{") and choice["finish_reason"] in ("stop", "length")


def test_other_requests_change_nothing_and_bad_grammars_fail_alone(tp1):
    """Free, constrained and refused requests at once: every answer equals the one of the request alone."""
    free = [{"max_tokens": 16}, {"max_tokens": 16, "temperature": 1.0, "seed": 5}]
    forms = [{"guided_json": SCHEMAS[0]}, {"guided_json": SCHEMAS[1]}, {"guided_choice": ["x", "yy", "zzz"]}]
    requests = [*free, *forms, *({**form, "temperature": 1.0, "seed": 9} for form in forms)] * 2
    alone = [choices(tp1, **fields)[0]["text"] for fields in requests]
    wrong = [
        ({"guided_regex": "((("}, "guided_regex"),
        ({"response_format": {**FORMAT, "json_schema": {"name": "x", "schema": {"type": "foo"}}}}, "response_format"),
        ({"guided_json": {"type": "integer", "multipleOf": 999_983}}, "guided_json"),  # would take seconds to compile
        (
            {"guided_grammar": "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(4000)), 'r4000: "a"'])},
            "guided_grammar",
        ),
    ]

    def refusal(fields):
        streamed = {"prompt": PROMPT, "stream": True, **fields}
        return [tp1.client.post("/v1/completions", json=body) for body in ({"prompt": PROMPT, **fields}, streamed)]

    with ThreadPoolExecutor(32) as pool:
        refusals = [pool.submit(refusal, fields) for fields, _ in wrong]
        answers = [pool.submit(choices, tp1, **fields) for fields in requests]
        assert [future.result()[0]["text"] for future in answers] == alone
        for (_, param), future in zip(wrong, refusals, strict=True):
            for response in future.result():
                if response.status_code == 200:  # a stream that had begun before a slow grammar was refused
                    (event, end) = re.findall(r"^data: (.*)$", response.text, re.MULTILINE)
                    assert end == "[DONE]"
                    error = json.loads(event)["error"]
                else:
                    assert response.status_code == 400, response.text
                    error = response.json()["error"]
                assert (error["param"], error["code"]) == (param, "invalid_grammar") and set(error) == {
                    "message",
                    "type",
                    "param",
                    "code",
                }
