"""`/v1/capabilities` is correct: every parameter is accepted at its limits, and refused one step beyond them."""

from __future__ import annotations

import dataclasses
import json
import math

import anyio
import pytest

from oarlock.server.http.docs_page import parameters
from oarlock.server.http.request_body import NEUTRAL_VALUES
from oarlock.server.schemas.chat import TokenizeRequest
from tests.contract.conftest import INFO

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEEDED = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
# What must stand beside a parameter at its limits.
BESIDE = {
    "max_tokens": {"echo": True},
    "min_tokens": {"max_tokens": 2**31 - 1},
    "stream_options": {"stream": True},
    "return_progress": {"stream": True},
    "top_logprobs": {"logprobs": True},
}
# Other rules than ranges: named here so that nothing else can hide among them.
OTHER_RULES = {
    "model",
    "prompt",
    "messages",
    "truncate_prompt_tokens",
    "cache_salt",
    "chat_template",
    "reasoning_effort",
}


def _render_path(path):
    return f"{path}/render" if path in (COMPLETIONS, CHAT) else path


@pytest.fixture
def ask(make_stage):
    """Bodies for a path, all on one stage; render routes check everything and generate nothing."""

    def send(calls):
        stage = make_stage()

        async def run():
            answers = []
            async with stage.client(headers={"Content-Type": "application/json"}) as client:
                for path, body in calls:
                    answers.append(await client.post(_render_path(path), content=json.dumps(body)))
                return answers, (await client.get("/v1/capabilities")).json()

        return anyio.run(run)

    return send


def _inside_and_outside(parameter):
    """Values at the limits, and just beyond them, of one form of a parameter."""
    kind, inside, outside = parameter.get("type"), [], []
    step = 1 if kind == "integer" else 0.01
    if kind in ("integer", "number"):
        for limit, sign in (("minimum", -1), ("maximum", 1)):
            if limit in parameter:
                inside.append(parameter[limit])
                outside.append(parameter[limit] + sign * step)
        if "above" in parameter:
            inside.append(math.nextafter(parameter["above"], math.inf))
            outside.append(parameter["above"])
        outside += ["1", True, *([1.5] if kind == "integer" else [])]
    elif kind == "boolean":
        inside, outside = [True, False], [1, "true"]
    elif kind == "string" and "values" in parameter:
        inside, outside = list(parameter["values"]), ["no-such-value", 5]
    elif kind == "string":
        if "max_length" in parameter:
            inside.append("a" * parameter["max_length"])
            outside.append("a" * (parameter["max_length"] + 1))
        if parameter.get("min_length"):
            inside.append("a" * parameter["min_length"])
            outside.append("")
        outside += [5, True]
    elif kind == "array":
        inside, outside = _lists(parameter)
    elif kind == "object":
        outside = ["x", 5, []]
    return inside, outside


def _lists(parameter):
    items = parameter.get("items", {})
    good, bad = _inside_and_outside(items)
    good = [value for value in good if items.get("type") != "integer" or 0 <= value < 4096]
    inside, outside = [[value] for value in good], [[value] for value in bad]
    sample = good[0] if good else None
    if sample is not None and parameter.get("max_items", 10**9) <= 2048:
        inside.append([sample] * parameter["max_items"])
        outside.append([sample] * (parameter["max_items"] + 1))
    if parameter.get("min_items"):
        outside.append([])
    return inside, outside


def _calls(path, entry):
    """(body, parameter, whether its range allows the value) of every parameter with one form."""
    for name, parameter in entry["parameters"].items():
        if name in OTHER_RULES or "forms" in parameter:
            continue
        of_text = path != "/tokenize" or name in TokenizeRequest.model_fields
        needed = NEEDED[path] if of_text else NEEDED[CHAT]
        inside, outside = _inside_and_outside(parameter)
        for is_good, values in ((True, inside), (False, outside)):
            for value in values:
                if name == "stream" and value is True:
                    continue
                yield {**needed, **BESIDE.get(name, {}), name: value}, name, is_good
        if parameter["nullable"]:
            yield {**needed, name: None}, name, True


@pytest.mark.parametrize("path", list(NEEDED))
@pytest.mark.slow
def test_every_parameter_at_its_limits(ask, path):
    _, found = ask([])
    cases = list(_calls(path, found["endpoints"][path]))
    assert len(cases) > (100 if path == COMPLETIONS else 3)
    answers, _ = ask([(path, body) for body, _, _ in cases])
    for (body, name, is_good), answer in zip(cases, answers, strict=True):
        shown = f"{path} {json.dumps(body)[:150]}: {answer.text[:200]}"
        if is_good:
            blamed = answer.status_code != 200 and answer.json()["error"]["param"]
            assert blamed != name, shown
            assert answer.status_code in (200, 400), shown
        else:
            assert answer.status_code == 400, shown
            assert answer.json()["error"]["param"].split(".")[0].split("[")[0] == name, shown


def test_parameters_listed_as_refused_are_refused(ask):
    _, found = ask([])
    for path in (COMPLETIONS, CHAT):
        refused = found["endpoints"][path]["refused"]
        assert refused.keys() == NEUTRAL_VALUES.keys() - found["endpoints"][path]["parameters"].keys()
        calls = [(path, {**NEEDED[path], name: {"some": "thing"}}) for name in refused]
        calls += [(path, {**NEEDED[path], name: value}) for name, values in refused.items() for value in values]
        answers, _ = ask(calls)
        for name, answer in zip(refused, answers, strict=False):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert [answer.text for answer in answers[len(refused) :] if answer.status_code != 200] == []


def test_limits_features_and_every_route(make_stage):
    stage = make_stage(strict_parameters=True)

    async def get():
        async with stage.client() as client:
            document = (await client.get("/openapi.json")).json()
            return document, (await client.get("/v1/capabilities")).json()

    document, found = anyio.run(get)
    assert found["models"] == ["demo", "alias/with/slash"]
    assert found["limits"]["max_model_len"] == 256
    assert found["limits"]["vocab_size"] == 4096
    assert found["features"]["strict_parameters"] is True
    assert found["features"]["fill_in_the_middle"] is False
    assert set(found["endpoints"]) == set(document["paths"])
    assert found["endpoints"][COMPLETIONS]["parameters"]["n"] == {
        "required": False,
        "nullable": True,
        "default": 1,
        "does": found["endpoints"][COMPLETIONS]["parameters"]["n"]["does"],
        "type": "integer",
        "minimum": 1,
        "maximum": 128,
    }
    schemas = document["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        assert all(parameter.get("does") for parameter in parameters(schemas, name).values()), name


def test_the_card_and_the_features_name_the_code_that_computes_the_model(make_stage):
    async def cards(stage):
        async with stage.client() as client:
            card = (await client.get("/v1/models/demo")).json()
            return card, (await client.get("/v1/capabilities")).json()["features"]

    for shown in anyio.run(cards, make_stage()):
        assert (shown["served_by"], shown["served_by_note"]) == ("oarlock", None)
    info = dataclasses.replace(INFO, served_by="transformers", is_replicated=True)
    for shown in anyio.run(cards, make_stage(info=info)):
        assert shown["served_by"] == "transformers"
        assert "slower" in shown["served_by_note"] and "every rank holds" in shown["served_by_note"]
