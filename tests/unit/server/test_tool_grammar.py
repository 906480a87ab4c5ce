"""Grammars of forced calls: they compile, they admit what the readers read, and nothing outside the schema."""

from __future__ import annotations

import json
from pathlib import Path

import llguidance
import pytest

from engine.sampling_params import Grammar
from server.chat.answer_grammar import answer_grammar
from server.chat.events import Arguments, CallStart, merged
from server.chat.prompt import ChatPrompt
from server.chat.tool_choice import plan_tools
from server.chat.tool_parsers import registry as formats
from server.protocol.chat_completion import ChatRequest

DEMO = Path(__file__).resolve().parents[3] / "models" / "oarlock-demo"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
GOOD = '{"city":"Zürich","days":3}'
FORMS = [formats.HERMES, formats.LLAMA, formats.MISTRAL, formats.MISTRAL_NAMED, formats.GENERIC, formats.UNKNOWN]


@pytest.fixture(scope="module")
def compiler():
    return llguidance.LLTokenizer((DEMO / "tokenizer.json").read_text())


def _admits(compiler, grammar: Grammar, text: str) -> bool:
    """The whole text, and it may end there."""
    assert grammar.kind == "lark"
    assert "::=" not in grammar.text  # or it would be taken for the other notation
    source = llguidance.LLMatcher.grammar_from_lark(grammar.text)
    assert llguidance.LLMatcher.validate_grammar(source, compiler) == ""
    matcher = llguidance.LLMatcher(compiler, source)
    ids = compiler.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _grammar(form, own=None, think=(False, False), **fields) -> Grammar:
    messages = [{"role": "user", "content": "x"}]
    request = ChatRequest.model_validate({"messages": messages, "tools": TOOLS, "tool_choice": "required", **fields})
    grammar = answer_grammar(own, ChatPrompt((1,), plan_tools(request, form), *think), {})
    assert grammar is not None
    return grammar


def _written(form, arguments=GOOD, name="weather"):
    body = f'{{"name": "{name}", "arguments": {arguments}}}'
    return {
        "llama3": f'{{"name": "{name}", "parameters": {arguments}}}',
        "mistral": f"[TOOL_CALLS][{body}]",
        "mistral_named": f"[TOOL_CALLS]{name}[ARGS]{arguments}",
    }.get(form.name, f"<tool_call>\n{body}\n</tool_call>")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_forced_call_matches_its_schema_and_can_be_read(compiler, form):
    grammar, named = _grammar(form), _grammar(form, tool_choice={"type": "function", "function": {"name": "now"}})
    text = _written(form)
    assert _admits(compiler, grammar, text)
    assert not _admits(compiler, named, text)
    assert _admits(compiler, named, _written(form, "{}", "now"))
    for wrong in ('{"city":"Z"}', '{"city":"Z","days":10}', '{"city":1,"days":3}', '{"city": "Z", "days": 3}', "{}"):
        assert not _admits(compiler, grammar, _written(form, wrong))
    assert not _admits(compiler, grammar, "words " + text)
    assert not _admits(compiler, grammar, text[:-2])
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS})
    plan = plan_tools(request.model_copy(update={"tool_choice": "required"}), form)
    assert plan is not None
    reader = plan.reader()
    assert merged([*reader.push(text), *reader.flush()]) == [CallStart("weather"), Arguments(GOOD)]


@pytest.mark.parametrize("form", [formats.HERMES, formats.MISTRAL_NAMED], ids=lambda form: form.name)
def test_parallel_calls_only_where_they_are_allowed(compiler, form):
    between = "\n" if form is formats.HERMES else ""
    two = _written(form) + between + _written(form, "{}", "now")
    assert _admits(compiler, _grammar(form), two)
    assert not _admits(compiler, _grammar(form, parallel_tool_calls=False), two)


@pytest.mark.parametrize("form", FORMS[:-1], ids=lambda form: form.name)
def test_a_strict_tool_is_bound_even_when_the_model_may_choose(compiler, form):
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    grammar = _grammar(form, tools=strict, tool_choice="auto")
    before = "" if form is formats.LLAMA else "So {\n"
    for text in ("", "Hello < [ world", before + _written(form), "Hello"):
        assert _admits(compiler, grammar, text)
    assert not _admits(compiler, grammar, before + _written(form, "{}"))


def test_special_tokens_begin_calls(compiler):
    messages = [{"role": "user", "content": "x"}]
    strict = [{"type": "function", "function": {"name": "now", "strict": True}}]
    request = ChatRequest.model_validate({"messages": messages, "tools": strict})
    for form, mark in (
        (formats.MISTRAL, "[TOOL_CALLS]"),
        (formats.LLAMA, "<|python_tag|>"),
        (formats.HERMES, "<tool_call>"),
    ):
        prompt = ChatPrompt((1,), plan_tools(request, form), False, False)
        grammar = answer_grammar(None, prompt, {mark: 1})
        assert grammar is not None
        assert "<[1]>" in grammar.text
        assert _admits(compiler, grammar, "Hello")


def test_thoughts_come_before_what_is_bound(compiler):
    call = _written(formats.HERMES)
    inside = _grammar(formats.HERMES, think=(False, True))
    assert _admits(compiler, inside, "so <tool_call> or {\n</think>\n\n" + call)
    assert not _admits(compiler, inside, call)
    optional = _grammar(formats.HERMES, think=(True, False))
    assert _admits(compiler, optional, "<think>so</think>" + call)
    assert _admits(compiler, optional, call)


@pytest.mark.parametrize(
    ("own", "good", "bad"),
    [
        (Grammar("json_schema", json.dumps(SCHEMA), "response_format"), GOOD, "{}"),
        (Grammar("json_object", "", "response_format"), '{"a":1}', "[]"),
        (Grammar("choice", '["yes", "n/o"]', "guided_choice"), "n/o", "maybe"),
        (Grammar("choice", '["a::=", "b"]', "guided_choice"), "a::=", "a"),
        (Grammar("regex", r"(?::=|x)::=\n", "guided_regex"), "x::=\n", "x::"),
        (Grammar("regex", r"[a-c]+/\/x", "guided_regex"), "ab//x", "d"),
    ],
)
def test_the_callers_own_constraint_or_a_call(compiler, own, good, bad):
    either = _grammar(formats.HERMES, own, tool_choice="auto")
    for text in (good, _written(formats.HERMES)):
        assert _admits(compiler, either, text)
    assert not _admits(compiler, either, bad)
    thinking = answer_grammar(own, ChatPrompt((1,), None, False, True), {})
    assert thinking is not None
    assert _admits(compiler, thinking, "so</think>\n" + good)
    assert not _admits(compiler, thinking, good)


def test_without_tools_or_thoughts_the_constraint_is_the_callers():
    own = Grammar("regex", "x", "guided_regex")
    assert answer_grammar(own, ChatPrompt((1,), None, False, False), {}) is own
    assert answer_grammar(None, ChatPrompt((1,), None, True, False), {}) is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }} <tool_call> ", "hermes"),
        ("{{ tools }} <tool_call> <function=", "unknown"),
        ('{{ tools }} "parameters" <|python_tag|>', "llama3"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} [TOOL_CALLS] [ARGS]", "mistral_named"),
        ("{{ tools }}", "unknown"),
        ("{{ messages }}", "generic"),
    ],
)
def test_the_template_tells_the_format(template, name):
    assert formats.detect(template).name == name
