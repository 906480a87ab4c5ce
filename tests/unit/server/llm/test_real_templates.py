"""Published chat templates: they render as in transformers, and no turn of a conversation is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from oarlock.engine.errors import RequestError
from oarlock.server.chat.conversation import in_parts, template_messages
from oarlock.server.chat.detection import tool_format_of
from oarlock.server.chat.prompt import render_prompt
from oarlock.server.chat.template_report import foldings_needed
from oarlock.server.chat.turn_folding import Folding
from oarlock.server.llm.chat_template import ChatTemplate
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.server.schemas.chat import ChatRequest
from tests.unit.server.chat.conversation_shapes import CALLS, ODD_RESULTS, PLAIN, Conversation, conversation, fault
from tests.unit.server.chat.test_turn_folding import load
from tests.unit.server.llm.real_templates import real_templates

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "hi <&> é"}
ANSWER = {"role": "assistant", "content": "Hello!"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
CONVERSATIONS = {
    "user": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, ANSWER, USER],
}


def _ours(source: str, messages: list[dict[str, str]]) -> str | None:
    template = ChatTemplate(source, NAMES)
    try:
        return asyncio.run(template.render(messages, True, 1 << 20))
    except RequestError:
        return None
    finally:
        template.close()


def _theirs(source: str, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    fixed = {"tools": tools, "chat_template": source, "add_generation_prompt": True, **NAMES}
    try:
        prompts, _ = render_jinja_template([list(messages)], **fixed)
    except Exception:  # whatever the template raises
        return None
    return prompts[0]


@pytest.mark.soak
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_published_templates_render_as_in_transformers(conversation):
    messages = CONVERSATIONS[conversation]
    different, refused = [], []
    for name, source in real_templates().items():
        ours = _ours(source, messages)
        if ours != _theirs(source, messages) and ours != _theirs(source, messages):  # the date may change once
            different.append(name)
        elif ours is None:
            refused.append(name)
    print(f"{conversation}: {len(real_templates())} compared; both refuse {refused}")
    assert not different


# Need tools or a variable of their own in each conversation, or do what the sandbox of transformers refuses.
INCOMPLETE = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "fireworks-ai-llama-3-firefunction-v2",
    "llama-cpp-deepseek-r1",
}


def _outcome(tokenizer: Tokenizer, made: Conversation, tools: list[dict[str, Any]]) -> str:
    """Return "kept", "rewritten" or "refused" for a conversation, or what is wrong with its prompt."""
    fields = {"tools": tools, "tool_choice": "required"} if tools else {}
    request = ChatRequest.model_validate({"messages": made.messages, **fields})
    try:
        prompt = asyncio.run(render_prompt(tokenizer, request)).text
    except RequestError:
        return "refused"
    wrong = fault(prompt, made)
    if wrong is not None:
        return wrong
    template = tokenizer.template
    written, shown = template_messages(
        request.messages,
        [tool.for_template() for tool in request.tools or ()] or None,
        asyncio.run(tool_format_of(template)),
        Folding(),
        has_developer="developer" in template.source,
    )
    written = in_parts(written, request.messages) if asyncio.run(template.reads_parts()) else written
    theirs = _theirs(template.source, written, tools=shown)
    if prompt == theirs:
        return "kept"
    hides_tools = bool(tools) and TOOL["function"]["name"] not in (theirs or "")
    quotes_arguments = '"{\\"x' in (theirs or "") and '"{\\"x' not in prompt  # JSON in a JSON string
    return "rewritten" if theirs is None or hides_tools or quotes_arguments or fault(theirs, made) else "changed"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["bare", "tools"])
def test_published_templates_show_each_turn_in_its_place_or_refuse(tools):
    """A conversation that a template shows is rendered as in transformers; others are rewritten, or refused by name."""
    totals: Counter[str] = Counter()
    wrong: dict[str, dict[str, str]] = {}
    refused: dict[str, list[str]] = {}
    for name, source in real_templates().items():
        tokenizer = load(source)
        try:
            outcomes = {shape: _outcome(tokenizer, conversation(shape), tools) for shape in [*PLAIN, *CALLS]}
            odd = {shape: _outcome(tokenizer, conversation(shape), tools) for shape in ODD_RESULTS}
            needed = asyncio.run(foldings_needed(tokenizer.template))
        finally:
            tokenizer.close()
        # Results in another order may be rewritten for a template that shows the words and not whose they are.
        outcomes |= {shape: "rewritten" if found == "changed" else found for shape, found in odd.items()}
        counts = Counter(outcomes.values())
        totals += counts
        print(f"{name}: {dict(counts)} {needed}")
        bad = {shape: found for shape, found in outcomes.items() if found not in ("kept", "rewritten", "refused")}
        wrong |= {name: bad} if bad else {}
        if counts["refused"] and name not in INCOMPLETE:
            refused[name] = [shape for shape, found in outcomes.items() if found == "refused"]
    print(f"{'with' if tools else 'without'} tools: {dict(totals)}")
    assert not wrong
    assert not refused
