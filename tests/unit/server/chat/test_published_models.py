"""Instruct models as their authors publish them: detection, responses in one piece and in single characters, history,
and reasoning switched on and off through the API.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache

import pytest

from oarlock.server.chat.message_parser import MessageParser
from oarlock.server.chat.prompt import ChatPrompt, render_prompt
from oarlock.server.chat.reasoning_detection import reasoning_format_of
from oarlock.server.chat.tool_parsers.call_parser import ArgumentsDelta, ContentDelta, ReasoningDelta, ToolCallStart
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.server.schemas.chat import ChatRequest
from tests.unit.server.chat.conversation_shapes import conversation, fault
from tests.unit.server.chat.published_json_calls import MODELS as JSON_MODELS
from tests.unit.server.chat.published_latent_calls import MODELS as LATENT_MODELS
from tests.unit.server.chat.published_models import BERN, Model
from tests.unit.server.chat.published_other_calls import MODELS as OTHER_MODELS
from tests.unit.server.chat.test_turn_folding import load

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A city."}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "Time.", "parameters": {"type": "object"}}},
]
QUESTION = {"role": "user", "content": "Will it rain?"}
HISTORY = [
    QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": json.dumps(BERN)}}
        ],
    },
    {"role": "tool", "tool_call_id": "abcdef123", "content": "rain"},
]
MODELS = JSON_MODELS | OTHER_MODELS | LATENT_MODELS
CALL = ("weather", {"city": "Bern", "days": 3})
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
thinking_models = {name: model for name, model in MODELS.items() if model.reasoning}
switched_models = {name: model for name, model in MODELS.items() if model.switches}


@cache
def _tokenizer(template: str) -> Tokenizer:
    return load(template)


@pytest.fixture(scope="module", autouse=True)
def _closed():
    yield
    for model in MODELS.values():
        _tokenizer(model.template).close()
    _tokenizer.cache_clear()


def _prompt(model: Model, messages=None, **fields) -> ChatPrompt:
    request = ChatRequest.model_validate({"messages": messages or [QUESTION], "tools": TOOLS, **fields})
    return asyncio.run(render_prompt(_tokenizer(model.template), request))


def _read(prompt: ChatPrompt, text: str):
    """Return (reasoning, content, [(name, arguments as text)]), the same for one piece and for single characters."""
    results = []
    for pieces in ([text], list(text)):
        parser = MessageParser(prompt.shape)
        events = [
            event
            for number, piece in enumerate(pieces)
            for event in parser.read(piece, 1, is_last=number == len(pieces) - 1, is_ended=number == len(pieces) - 1)
        ]
        texts = {
            kind: "".join(e.text for e in events if isinstance(e, kind)) for kind in (ReasoningDelta, ContentDelta)
        }
        calls: list[list[str]] = []
        for event in events:
            if isinstance(event, ToolCallStart):
                calls.append([event.name, ""])
            elif isinstance(event, ArgumentsDelta):
                calls[-1][1] += event.text
        results.append((texts[ReasoningDelta], texts[ContentDelta], calls))
    assert results[0] == results[1]
    return results[0]


def _calls(read) -> list[tuple[str, dict]]:
    return [(name, json.loads(arguments)) for name, arguments in read[2]]


def _with_tags(model: Model, text: str) -> str:
    return model.answer[0] + text + model.answer[1]


@every_model
def test_formats_are_recognised_from_the_template(model):
    prompt = _prompt(model)
    assert prompt.tool_choice is not None
    assert prompt.tool_choice.format.name == model.tool_format
    found = asyncio.run(reasoning_format_of(_tokenizer(model.template)))
    assert (found.name if found else None) == model.reasoning
    assert "weather" in prompt.text
    assert "Forecast." in prompt.text or model.tool_format == "seed_oss"  # which shows the names in this template


@every_model
def test_calls_of_a_response(model):
    prompt = _prompt(model)
    thoughts = "".join((model.think[0], "Bern?", model.think[1])) if prompt.is_thinking else ""
    one = _read(prompt, thoughts + model.write([CALL]))
    assert (_calls(one), one[1]) == ([CALL], "")
    two = _read(prompt, thoughts + model.write([CALL, ("now", {})]))
    assert (_calls(two), two[1]) == ([CALL, ("now", {})], "")
    inside = _read(prompt, thoughts + _with_tags(model, model.write([CALL])))
    assert (_calls(inside), inside[1]) == ([CALL], "")


@every_model
def test_text_before_a_call(model):
    prompt = _prompt(model)
    thoughts = "".join((model.think[0], "Bern?", model.think[1])) if prompt.is_thinking else ""
    text = "Let me see. < [ {"
    between = "<|assistant|>" if model.tool_format in ("glm4", "glm4_9b") else ""
    response = f"{text}\n{between}{model.write([CALL])}"
    read = _read(prompt, thoughts + response)
    if model.tool_format == "pythonic":  # its instructions forbid text next to a call, which begins with a bracket
        assert read[1:] == (response, [])
    else:
        assert _calls(read) == [CALL]
        assert read[1].rstrip() == text


@pytest.mark.parametrize("model", thinking_models.values(), ids=thinking_models)
def test_reasoning_before_a_call_and_before_text(model):
    prompt = _prompt(model, reasoning_effort="high")
    thoughts = model.think[0] + "Bern, I think. <" + model.think[1]
    read = _read(prompt, thoughts + model.write([CALL]))
    assert (read[0].strip(), read[1], _calls(read)) == ("Bern, I think. <", "", [CALL])
    read = _read(prompt, thoughts + _with_tags(model, "It rains.\n\nTake < an umbrella."))
    assert (read[0].strip(), read[1].strip(), read[2]) == ("Bern, I think. <", "It rains.\n\nTake < an umbrella.", [])


@every_model
def test_broken_responses(model):
    prompt = _prompt(model)
    thoughts = "".join((model.think[0], "Bern?", model.think[1])) if prompt.is_thinking else ""
    written = model.write([CALL])
    cut = _read(prompt, thoughts + written[: written.index("Bern") + 2])
    assert (cut[1], [name for name, _ in cut[2]]) == ("", ["weather"])
    assert "Be" in cut[2][0][1]
    unknown = model.write([("snow", BERN)])
    assert _read(prompt, thoughts + unknown)[1:] == (unknown, [])
    begun = written[: written.index("weather")]
    assert _read(prompt, f"{thoughts}{begun}well")[1:] == (f"{begun}well", [])


@every_model
def test_a_call_in_the_history_is_rendered_as_the_template_wants_it(model):
    assert model.history in _prompt(model, HISTORY).text
    assert model.history in _prompt(model, [*HISTORY, {"role": "assistant", "content": "Yes."}, QUESTION]).text


@pytest.mark.parametrize("model", switched_models.values(), ids=switched_models)
def test_reasoning_is_switched_through_the_api(model):
    on, off = model.prompts
    for fields in (
        {"reasoning_effort": "high"},
        *({"chat_template_kwargs": {k: v[0]}} for k, v in model.switches.items()),
    ):
        prompt = _prompt(model, tools=None, **fields)
        assert on in prompt.text
        assert prompt.may_think or prompt.is_thinking
        assert prompt.ignored == ()
    for fields in (
        {"reasoning_effort": "none"},
        *({"chat_template_kwargs": {k: v[1]}} for k, v in model.switches.items()),
    ):
        prompt = _prompt(model, tools=None, **fields)
        assert off in prompt.text
        assert not prompt.is_thinking
        assert prompt.ignored == ()
        assert _read(prompt, _with_tags(model, "It rains."))[:2] == ("", "It rains.")


@every_model
def test_conversations_with_calls_keep_each_turn_in_its_place(model):
    for shape in ("s u A1 t0 a u", "u B1 t0 a u", "u A2 t0 t1 a u", "u A2 t1 t0", "u A1 t0 A1 t1 a u", "u A1 u"):
        made = conversation(shape)
        assert fault(_prompt(model, made.messages).text, made) is None, shape


def test_a_system_message_switches_smollm3():
    model = MODELS["SmolLM3"]
    for word, mode, thinks in (("/no_think", "/no_think", False), ("/think", "/think", True)):
        prompt = _prompt(model, [{"role": "system", "content": f"{word} Be brief."}, QUESTION])
        assert f"Reasoning Mode: {mode}\n" in prompt.text
        assert prompt.text.endswith("<think>\n\n</think>\n") is not thinks
        assert prompt.may_think is thinks
        assert "Be brief." in prompt.text
        assert "{'name': 'weather'" in prompt.text  # as Python writes the tool: the published template does so
