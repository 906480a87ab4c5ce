"""Templates in their sandbox: the constructs of published ones work as transformers has them, and the limits hold."""

from __future__ import annotations

import json

import pytest

from engine.errors import RequestError
from server.tokenizer.chat_template import ChatTemplate
from tests.unit.server import chat_templates as templates

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "hi <&> é"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": 'of "a" city', "parameters": PARAMETERS}}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "12 C", "tool_call_id": "abcdefgh1"},
    {"role": "assistant", "content": "12 degrees", "reasoning_content": "\nso\n"},
    {"role": "user", "content": "thanks"},
]


@pytest.mark.parametrize("name", ["QWEN", "THINKING", "LLAMA", "MISTRAL", "PLAIN"])
@pytest.mark.parametrize("messages", [[USER], TURNS[:2], TURNS], ids=["user", "system", "calls"])
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL]], ids=["bare", "tools"])
def test_it_renders_what_transformers_renders(name, messages, tools):
    from transformers.utils.chat_template_utils import render_jinja_template

    source, more = getattr(templates, name), {"date_string": "26 Jul 2024"}
    expected, _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=True, **NAMES, **more
    )
    ours = ChatTemplate(source, NAMES).render(messages, True, 100_000, tools=tools, variables=more)
    assert ours == expected[0]
    assert "<&> é" in ours


def test_variables_reach_the_template_and_never_replace_its_own():
    template = ChatTemplate(templates.QWEN, NAMES)
    assert template.render([USER], True, 1000, variables={"enable_thinking": False}).endswith("</think>\n\n")
    shadowed = template.render([USER], True, 1000, variables={"messages": [], "add_generation_prompt": False})
    assert shadowed == template.render([USER], True, 1000)


def test_the_template_for_tools_is_taken_when_there_are_tools():
    template = ChatTemplate({"default": "D{{ tools }}", "tool_use": "T{{ tools | length }}"}, {})
    assert template.render([USER], True, 100) == "DNone"
    assert template.render([USER], True, 100, tools=[TOOL]) == "T1"


ENDLESS = {
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(90000) %}{% for b in range(90000) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
    "blocks": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "loops inside themselves": (
        "{% for a in [1, 2] recursive %}{% if loop.depth < 40 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}"
    ),
}
HUGE = {
    "output": "{% for a in range(90000) %}{{ messages[0].content }}{% endfor %}",
    "product": "{{ 'x' * 10 ** 9 }}",
    "list product": "{{ ([1] * 10 ** 9) | length }}",
    "power": "{{ 10 ** 999999 }}",
    "doubling by +": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a block of text": "{% set x %}{% for i in range(90000) %}xxxxxxxx{% endfor %}{% endset %}",
    "padding": "{{ 'x'.ljust(10 ** 9) }}",
    "a filter's padding": "{{ 'x' | indent(10 ** 9) }}",
    "a format's width": "{{ '%1000000000d' % 1 }}",
    "a format's width from outside": "{{ '%*d' % (10 ** 9, 1) }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "the method format": "{{ '{:1000000000}'.format(1) }}",
    "a width inside a width": "{{ '{:{}}'.format(1, 10 ** 9) }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=list(ENDLESS))
def test_a_template_cannot_run_without_end(source):
    template = ChatTemplate(source, {}, max_seconds=0.05)
    with pytest.raises(RequestError, match=r"takes too long|fails on these messages") as caught:
        template.render([USER], True, 10_000)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", HUGE.values(), ids=list(HUGE))
def test_a_template_cannot_make_something_huge(source):
    with pytest.raises(RequestError):
        ChatTemplate(source, {}).render([USER], True, 10_000)


def test_limits_end_with_the_rendering():
    template = ChatTemplate("{{ messages[0].content * 2 }}", {})
    with pytest.raises(RequestError):
        template.render([USER], True, 3)
    assert template.render([USER], True, 100) == USER["content"] * 2


def test_json_is_written_as_transformers_writes_it():
    template = ChatTemplate("{{ messages[0] | tojson(indent=2, sort_keys=true) }}", {})
    assert template.render([USER], True, 1000) == json.dumps(USER, indent=2, sort_keys=True, ensure_ascii=False)
