"""Templates that leave out or refuse turns: the conversation is rewritten so that all are shown, or refused by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tokenizers

from oarlock.engine.errors import RequestError
from oarlock.server.chat.prompt import render_prompt
from oarlock.server.chat.template_report import foldings_needed, report_foldings
from oarlock.server.chat.turn_trial import MAX_TRIAL_TURNS, Outline
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.server.schemas.chat import ChatMessage, ChatRequest
from tests.unit.server.chat.conversation_shapes import CALLS, ODD_RESULTS, PLAIN, conversation, fault
from tests.unit.server.llm import chat_templates as templates

DEMO = Path(__file__).resolve().parents[4] / "models" / "oarlock-demo"

# Only the first turn of the system, or of the developer, is shown.
FIRST_SYSTEM = """\
{%- if messages[0].role in ('system', 'developer') %}{{ '<sys>' + messages[0].content }}{% endif %}
{%- for m in messages %}
    {%- if m.role in ('user', 'assistant') %}{{ '<' + m.role + '>' + m.content }}{% endif %}
{%- endfor %}"""

# The last turn of the system replaces the others, and comes first.
LAST_SYSTEM = """\
{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}
{{- '<sys>' + ns.system }}
{%- for m in messages %}{% if m.role != 'system' %}{{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}"""

# The turn of the system is part of the last turn of the user, if the conversation ends with that.
SYSTEM_LAST = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ raise_exception('only one system turn') }}{% endif %}
    {{- '<' + m.role + '>' + (system + ' ' if loop.last and m.role == 'user' and system is defined else '') }}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson }}{% endfor %}
{%- endfor %}{# tools: #}{{ tools }}"""

_WITH_CALLS = """\
{{- tools | tojson }}
{%- set ns = namespace(name='') %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}CALLS
    {%- elif m.role == 'tool' %}{{ '<result of=' + ns.name + '>' + m.content }}
    {%- else %}{{ '<' + m.role + '>' + m.content }}{% endif %}
{%- endfor %}{# <tool_call> #}"""

# The first call of a turn, and its name beside all results; no text beside a call if an answer follows later.
FIRST_CALL = _WITH_CALLS.replace(
    "CALLS",
    """{%- set call = m.tool_calls[0].function %}{% set ns.name = call.name %}
    {%- set later = messages[loop.index:] | selectattr('tool_calls', 'undefined') | list %}
    {{- '<call>' + (m.content if later | selectattr('role', 'eq', 'assistant') | list | length == 0 else '') }}
    {{- call.name + call.arguments | tojson }}""",
)
# All calls with their text, and the last one's name beside all results.
LAST_NAME = _WITH_CALLS.replace(
    "CALLS",
    """{{- m.content }}{% for call in m.tool_calls %}{% set ns.name = call.function.name %}
    {{- call.function | tojson }}{% endfor %}""",
)
# Results without names or ids.
UNNAMED = LAST_NAME.replace("<result of=' + ns.name + '>", "<result>")
# Calls are left out.
NO_CALLS = "{{ tools }}{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}{# <tool_call> #}"
# Arguments are texts.
TEXT_ARGUMENTS = UNNAMED.replace("{{- call.function | tojson }}", "{{- call.function.name + call.function.arguments }}")
# A call or its text.
CALL_OR_TEXT = _WITH_CALLS.replace("CALLS", "{{- m.content or m.tool_calls | tojson }}")
# The user and the assistant take turns, beside calls and results.
STRICT_CALLS = (
    """{%- set plain = messages | rejectattr('role', 'eq', 'tool') | rejectattr('tool_calls', 'defined') | list %}
    {%- for m in plain %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('take turns') }}{% endif %}{% endfor %}"""
    + UNNAMED
)
STRICT_NO_TEXT = STRICT_CALLS.replace("{{- m.content }}", "")
NO_EMPTY_ANSWER = (
    "{% for m in messages %}{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{ raise_exception('empty') }}{% endif %}{% endfor %}"
    # Written as Hermes does: calls of that format can become the model's own text.
    + STRICT_CALLS.replace("call.function | tojson", "'<tool_call>' + (call.function | tojson) + '</tool_call>'")
)

KINDS = {
    "plain": templates.PLAIN,
    "qwen": templates.QWEN,
    "llama": templates.LLAMA,
    "mistral": templates.MISTRAL,
    "gemma 2": templates.GEMMA2,
    "gemma 3": templates.GEMMA3,
    "no system": templates.DROPS_SYSTEM,
    "harmony": templates.HARMONY,
    "first system": FIRST_SYSTEM,
    "last system": LAST_SYSTEM,
    "system in the last turn": SYSTEM_LAST,
    "first call": FIRST_CALL,
    "last name": LAST_NAME,
    "unnamed results": UNNAMED,
    "no calls": NO_CALLS,
    "arguments as text": TEXT_ARGUMENTS,
    "call or text": CALL_OR_TEXT,
    "strict with calls": STRICT_CALLS,
    "strict without text": STRICT_NO_TEXT,
    "strict without empty answers": NO_EMPTY_ANSWER,
}
TOOL = {"type": "function", "function": {"name": "some_tool", "parameters": {"type": "object"}}}


def load(source: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return Tokenizer(backend, {"chat_template": source, "bos_token": "<s>", "eos_token": "</s>"})


def prompt(tokenizer: Tokenizer, messages: list[dict], **fields) -> str:
    request = ChatRequest.model_validate({"messages": messages, **fields})
    return asyncio.run(render_prompt(tokenizer, request)).text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["bare", "tools"])
def test_each_turn_is_shown_in_its_place(kind, tools):
    tokenizer = load(KINDS[kind])
    fields = {"tools": tools, "tool_choice": "required"} if tools else {}  # which needs no known format of calls
    try:
        wrong = {}
        for shape in [*PLAIN, *CALLS, *ODD_RESULTS]:
            made = conversation(shape)
            found = fault(prompt(tokenizer, made.messages, **fields), made)
            if found:
                wrong[shape] = found
        assert not wrong
    finally:
        tokenizer.close()


SAY = {"s": "Be brief.", "d": "In French.", "u": "Hello", "a": "Hi"}


def words(source: str, shape: str) -> str:
    """Return the prompt of a conversation in plain words."""
    messages = [
        {"role": {"s": "system", "d": "developer", "u": "user", "a": "assistant"}[c], "content": SAY[c]} for c in shape
    ]
    tokenizer = load(source)
    try:
        return prompt(tokenizer, messages)
    finally:
        tokenizer.close()


@pytest.mark.parametrize(
    ("source", "shape", "expected"),
    [
        (FIRST_SYSTEM, "sdu", "<sys>Be brief.\n\nIn French.<user>Hello"),
        (FIRST_SYSTEM, "sus", "<sys>Be brief.<user>Hello\n\nBe brief."),
        (FIRST_SYSTEM, "uasu", "<user>Hello<assistant>Hi<user>Be brief.\n\nHello"),
        (FIRST_SYSTEM, "uas", "<user>Hello<assistant>Hi<user>Be brief."),
        (FIRST_SYSTEM, "suau", "<sys>Be brief.<user>Hello<assistant>Hi<user>Hello"),  # kept as it is
        (LAST_SYSTEM, "sdu", "<sys>Be brief.\n\nIn French.<user>Hello"),
        (SYSTEM_LAST, "suau", "<user>Hello<assistant>Hi<user>Be brief. HelloNone"),  # where this template shows it
        (SYSTEM_LAST, "sua", "<user>Be brief.\n\nHello<assistant>HiNone"),
    ],
)
def test_instructions_join_the_first_ones_or_the_users_turn(source, shape, expected):
    assert words(source, shape) == expected


def test_each_call_is_followed_by_its_own_result():
    tokenizer = load(FIRST_CALL)
    try:
        text = prompt(tokenizer, conversation("u A2 t1 t0").messages)
    finally:
        tokenizer.close()
    own = [f'<call>name{i}end{{"x": "argument{i}end"}}<result of=name{i}end>word{3 - i}end' for i in range(2)]
    assert text.endswith("".join(own))


def test_results_are_ordered_if_the_template_does_not_say_whose_they_are():
    for source, results in ((UNNAMED, ["word3end", "word2end"]), (templates.MISTRAL, ["word2end", "word3end"])):
        tokenizer = load(source)
        try:
            text = prompt(tokenizer, conversation("u A2 t1 t0").messages)
        finally:
            tokenizer.close()
        assert sorted(results, key=text.index) == results


def test_a_turn_that_no_rewriting_keeps_is_refused_by_name():
    tokenizer = load("{% for m in messages %}{{ m.content if m.role == 'user' and loop.last else '' }}{% endfor %}")
    try:
        assert prompt(tokenizer, conversation("u").messages) == "word0end"
        assert "word0end" in prompt(tokenizer, conversation("u u").messages)  # both in one turn
        with pytest.raises(RequestError, match=r"omits messages\[0\] \(role 'user'\)") as caught:
            prompt(tokenizer, conversation("u a u").messages)
    finally:
        tokenizer.close()
    assert caught.value.param == "messages"


def test_a_shape_is_tried_once(monkeypatch):
    tokenizer = load(FIRST_SYSTEM)
    rendered = []
    original = tokenizer.template.render

    async def render(messages, *args, **kwargs):
        rendered.append(messages)
        return await original(messages, *args, **kwargs)

    monkeypatch.setattr(tokenizer.template, "render", render)
    try:
        prompt(tokenizer, conversation("s u s u").messages)
        tries = len(rendered)
        for number in range(3):
            longer = conversation(" ".join(["s u s u", *["a u"] * (5 + number)])).messages
            prompt(tokenizer, longer)
    finally:
        tokenizer.close()
    assert tries < 12
    assert len(rendered) < 3 * tries  # three conversations of one shape are tried as one


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("u a u a u", "u a u a u a u a u a u"),
        ("s u A1 t0 A1 t1 a u", "s u A1 t0 A1 t1 A1 t2 A1 t3 a u"),
        ("u A1 t0 B1 t1 A1 t2 B1 t3", "u A1 t0 B1 t1 A1 t2 B1 t3 A1 t4 B1 t5 A1 t6 B1 t7"),
    ],
)
def test_repeated_rounds_and_steps_are_tried_once(short, long):
    outlines = [Outline.of([ChatMessage.model_validate(m) for m in conversation(s).messages]) for s in (short, long)]
    assert outlines[0].turns == outlines[1].turns


def test_a_trial_has_a_limit():
    shape = " ".join(f"u A{1 + i % 7} a" + " u" * (i % 5) for i in range(400))
    outline = Outline.of([ChatMessage.model_validate(m) for m in conversation(shape).messages])
    assert len(outline.turns) <= MAX_TRIAL_TURNS + 8


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("plain", {}),
        ("first system", {"several_system_turns": "system:joined", "late_system_turn": "system:first"}),
        ("llama", {"several_calls": "calls:single", "call_with_text": "call_text:apart_if_answered"}),
    ],
)
def test_the_start_names_the_rewritings_a_template_needs(kind, needed):
    tokenizer = load(KINDS[kind])
    try:
        assert asyncio.run(foldings_needed(tokenizer.template)) == needed
    finally:
        tokenizer.close()


def test_a_conversation_that_a_template_refuses_in_all_forms_is_said_at_the_start(caplog):
    tokenizer = load("{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}")
    try:
        with caplog.at_level("INFO"):
            asyncio.run(report_foldings(tokenizer.template))
    finally:
        tokenizer.close()
    assert "event=chat_template_needs_rewriting" in caplog.text
    assert "late_system_turn=refused" in caplog.text
    assert "user_turns_in_a_row=runs:joined" in caplog.text
