"""Reasoning effort and switches of thinking, as templates of several kinds take them."""

from __future__ import annotations

import asyncio
import json

import pytest

from oarlock.server.chat.thinking import thinking_of
from oarlock.server.endpoints.messages.translate import turn_of
from oarlock.server.llm.chat_template import ChatTemplate
from oarlock.server.schemas.chat import ChatRequest
from oarlock.server.schemas.messages import MessagesRequest

TURN = "{% for m in messages %}{{ m.content }}{% endfor %}"
# Each writes what it was told behind the conversation.
QWEN3 = TURN + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
BOTH = TURN + (
    "{% if not thinking is defined %}{% set thinking = enable_thinking if enable_thinking is defined else false %}"
    "{% endif %}{{ '<think>' if thinking else '</think>' }}"
)
MODE = TURN + "{% if thinking_mode is defined %}{{ thinking_mode }}{% endif %}"
BUDGET = TURN + "{% if thinking_budget is defined and thinking_budget == 0 %}no thoughts{% endif %}"
VERBATIM = (
    TURN
    + "{% if not reasoning_effort is defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    + ("Reasoning: {{ reasoning_effort }}")
)
REFUSES = TURN + (
    "{% if not reasoning_effort is defined %}{% set reasoning_effort = 'no_think' %}"
    "{% elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('no such effort') }}{% endif %}"
    "effort:{{ reasoning_effort }}"
)
SWITCH_AND_LEVELS = TURN + (
    "{% if thinking is undefined %}{% set thinking = true %}{% endif %}"
    "{% if thinking and thinking_effort is defined %}"
    "{% if thinking_effort not in ['low', 'high', 'max'] %}{{ raise_exception('no such effort') }}{% endif %}"
    "effort:{{ thinking_effort }}{% endif %}{{ '<think>' if thinking else '' }}"
)
SOME_LEVELS = TURN + "{% if reasoning_effort is defined and reasoning_effort == 'max' %}effort:max{% endif %}"
NAMED_ONLY = TURN + "{# reasoning_effort and enable_thinking are named, and read nowhere #}"


def _ask(source, request, reasons=True):
    """Returns (the variables, the ignored fields, the rendered prompt)."""
    template = ChatTemplate(source, {})

    async def run():
        found = await thinking_of(template, request, reasons)
        messages = [{"role": "user", "content": "x"}]
        return *found, await template.render(messages, True, 10_000, variables=found.variables)

    try:
        return asyncio.run(run())
    finally:
        template.close()


def _chat(**fields):
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


def _message(**fields):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, **fields}
    return turn_of(MessagesRequest.model_validate_json(json.dumps(body)))


@pytest.mark.parametrize(
    ("source", "effort", "ending"),
    [
        (QWEN3, "none", "<think></think>"),
        (QWEN3, "low", "x"),
        (QWEN3, "max", "x"),
        (BOTH, "none", "</think>"),
        (BOTH, "high", "<think>"),
        (MODE, "none", "disabled"),
        (MODE, "minimal", "enabled"),
        (BUDGET, "none", "no thoughts"),
        (BUDGET, "high", "x"),
        (VERBATIM, "low", "Reasoning: low"),
        (VERBATIM, "minimal", "Reasoning: low"),
        (VERBATIM, "medium", "Reasoning: medium"),
        (VERBATIM, "xhigh", "Reasoning: high"),
        (VERBATIM, "max", "Reasoning: high"),
        (REFUSES, "none", "effort:no_think"),
        (REFUSES, "minimal", "effort:low"),
        (REFUSES, "medium", "effort:high"),
        (REFUSES, "max", "effort:high"),
        (SWITCH_AND_LEVELS, "none", "x"),
        (SWITCH_AND_LEVELS, "minimal", "effort:low<think>"),
        (SWITCH_AND_LEVELS, "medium", "effort:high<think>"),
        (SWITCH_AND_LEVELS, "xhigh", "effort:max<think>"),
        (SOME_LEVELS, "xhigh", "effort:max"),
        (SOME_LEVELS, "high", "x"),
    ],
)
def test_an_effort_reaches_each_kind_of_template(source, effort, ending):
    _, ignored, text = _ask(source, _chat(reasoning_effort=effort))
    assert (text.removeprefix("x") or "x") == ending
    assert ignored == ()


@pytest.mark.parametrize("source", [TURN, NAMED_ONLY])
@pytest.mark.parametrize("effort", ["none", "high"])
def test_an_effort_that_changes_nothing_is_reported(source, effort):
    variables, ignored, _ = _ask(source, _chat(reasoning_effort=effort), reasons=False)
    assert (variables, ignored) == ({}, ("reasoning_effort",))


def test_thinking_that_cannot_be_switched_off_is_kept_short_and_reported():
    variables, ignored, _ = _ask(VERBATIM, _chat(reasoning_effort="none"))
    assert (variables, ignored) == ({"reasoning_effort": "low"}, ("reasoning_effort",))


@pytest.mark.parametrize(
    ("source", "kwargs", "effort", "ending", "ignored"),
    [
        (QWEN3, {"enable_thinking": True}, "none", "x", True),
        (QWEN3, {"enable_thinking": False}, "high", "<think></think>", True),
        (BOTH, {"enable_thinking": True}, "none", "<think>", True),
        (SWITCH_AND_LEVELS, {"thinking": False}, "high", "x", False),
        (VERBATIM, {"reasoning_effort": "Ultra"}, "low", "Reasoning: Ultra", True),
        (QWEN3, {"other": 1}, "none", "<think></think>", False),
    ],
)
def test_variables_that_the_caller_sets_win(source, kwargs, effort, ending, ignored):
    _, reported, text = _ask(source, _chat(reasoning_effort=effort, chat_template_kwargs=kwargs))
    assert (text.removeprefix("x") or "x") == ending
    assert reported == (("reasoning_effort",) if ignored else ())


def test_without_an_effort_the_template_decides():
    for source in (QWEN3, BOTH, VERBATIM):
        assert _ask(source, _chat())[:2] == ({}, ())


ON, OFF = {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}


@pytest.mark.parametrize(
    ("source", "thinking", "effort", "ending", "ignored"),
    [
        (BOTH, None, None, "</think>", ()),
        (BOTH, None, "high", "<think>", ()),
        (BOTH, {"type": "adaptive"}, None, "<think>", ()),
        (BOTH, {"type": "adaptive"}, "high", "<think>", ()),
        (BOTH, OFF, "high", "</think>", ("reasoning_effort",)),
        (BOTH, ON, "none", "<think>", ("reasoning_effort",)),
        (BOTH, OFF, "none", "</think>", ()),
        (REFUSES, OFF, None, "effort:no_think", ()),
        (REFUSES, ON, "low", "effort:low", ()),
        (VERBATIM, None, None, "Reasoning: medium", ()),
        (VERBATIM, OFF, None, "Reasoning: low", ("thinking",)),
        (TURN, ON, None, "x", ()),
    ],
)
def test_thinking_of_messages_and_its_effort(source, thinking, effort, ending, ignored):
    config = {} if effort is None else {"output_config": {"effort": effort}}
    _, reported, text = _ask(source, _message(thinking=thinking, **config))
    assert (text.removeprefix("x") or "x") == ending
    assert reported == ignored


def test_thinking_is_reported_if_the_model_never_thinks():
    assert _ask(TURN, _message(thinking=ON), reasons=False)[1] == ("thinking",)
    assert _ask(TURN, _message(thinking=OFF), reasons=False)[1] == ()
    assert _ask(TURN, _message(thinking=OFF), reasons=True)[1] == ("thinking",)
