"""Inputs of templates: calls, names, ids and thoughts; continued messages; prompts that end inside thoughts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tokenizers
import transformers

from oarlock.engine.errors import RequestError
from oarlock.server.chat.message_parser import REASONING_FORMATS, MessageShape
from oarlock.server.chat.prompt import render_prompt
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.server.schemas.chat import ChatRequest
from tests.unit.server.llm import chat_templates as templates

DEMO = Path(__file__).resolve().parents[4] / "models" / "oarlock-demo"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
TURNS = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "b"}]},
]
DUMP = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}tools={{ tools | tojson }}{# <tool_call> #}"


def _prompt(source, messages, parsers=None, **fields):
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    config = {"chat_template": source, "bos_token": "<s>", "eos_token": "<|im_end|>"}
    loaded = Tokenizer(backend, config | ({"parsers": parsers} if parsers else {}))
    try:
        request = ChatRequest.model_validate({"messages": messages, **fields})
        prompt = asyncio.run(render_prompt(loaded, request))
        ids = asyncio.run(loaded.aencode(prompt.text, False))
        return loaded.backend.decode(ids, skip_special_tokens=False), prompt
    finally:
        loaded.close()


def test_calls_are_given_as_templates_expect_them():
    text, _ = _prompt(DUMP, TURNS, {"tool_call_parser": "hermes"}, tools=[TOOL])
    lines = text.split("\n")
    assert '"tool_calls": [{"id": "call_1", "type": "function", "function": ' in lines[1]
    assert '{"name": "f", "arguments": {"x": [1]}}' in lines[1]
    assert lines[1].startswith('{"role": "assistant", "content": "", "reasoning_content": "hm"')
    assert lines[2] == '{"role": "tool", "content": "b", "name": "f", "tool_call_id": "call_1"}'
    assert lines[3] == 'tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
    assert "tool_calls" not in lines[0]


PARTS = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}{# role #}"


def test_contents_are_lists_of_parts_where_the_template_writes_those_alone_or_the_operator_says_so():
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": t} for t in "bc"]}]
    chosen = [{"chat_template_content_format": name} for name in ("string", "openai")]
    assert _prompt(PARTS, turns)[0] == "<a><b><c>"
    with pytest.raises(RequestError, match=r"omits messages\[0\]"):  # jinja walks through the characters of a text
        _prompt(PARTS, turns, chosen[0])
    assert '"content": "bc"' in _prompt(DUMP, turns)[0]
    text = _prompt(DUMP, turns, chosen[1])[0]
    assert '"content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]' in text
    turns[1] = {"role": "assistant", "content": "c"}
    assert _prompt(PARTS, turns, continue_final_message=True, add_generation_prompt=False)[0] == "<a><c"


def test_no_tools_and_tools_that_must_not_be_called_are_not_shown():
    assert _prompt(DUMP, TURNS[:1])[0].endswith("tools=null")
    assert _prompt(DUMP, TURNS[:1], tools=[])[0].endswith("tools=null")
    assert _prompt(DUMP, TURNS[:1], tools=[TOOL], tool_choice="none")[0].endswith("tools=null")


def test_broken_arguments_stay_unchanged():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    text, _ = _prompt(DUMP, [TURNS[0], {"role": "assistant", "content": "t", "tool_calls": [call]}])
    assert '"arguments": "{\\"x\\": "' in text


def test_the_developer_is_the_system_where_there_is_no_developer():
    messages = [{"role": "developer", "content": "d"}, TURNS[0]]
    assert _prompt(DUMP, messages)[0].startswith('{"role": "system"')
    assert _prompt(DUMP + "{# developer #}", messages)[0].startswith('{"role": "developer"')


@pytest.mark.parametrize("source", [templates.QWEN, templates.MISTRAL, templates.LLAMA, templates.PLAIN])
def test_a_conversation_with_calls_fits_every_template(source):
    text, prompt = _prompt(source, TURNS, tools=[TOOL])
    assert '"f"' in text
    assert "[1]" in text
    assert prompt.tool_choice is not None


def test_a_template_without_tools_gets_them_as_words():
    text, prompt = _prompt(templates.PLAIN, [{"role": "system", "content": "s"}, *TURNS], tools=[TOOL])
    assert prompt.tool_choice is not None
    assert prompt.tool_choice.format.name == "generic"
    assert text.startswith(
        '<|im_start|>system\ns\n\nYou can call these functions; each line describes one as JSON:\n{"'
    )
    assert '<tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\nb\n</tool_response><|im_end|>" in text


BRIEF = {"role": "system", "content": "Be brief."}
STRICT = [templates.GEMMA2, templates.GEMMA3, templates.DROPS_SYSTEM]
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "c"}


@pytest.mark.parametrize("source", STRICT)
@pytest.mark.parametrize("opening", [[], [BRIEF], [{"role": "assistant", "content": "Hello."}]])
def test_tools_reach_templates_with_no_system_or_strict_turns(source, opening):
    """The prompt equals the one that transformers makes of the same words in turns that the template takes."""
    text, prompt = _prompt(source, [*opening, *TURNS, RESULT, {"role": "user", "content": "d"}], tools=[TOOL])
    assert prompt.tool_choice is not None
    words = text[text.index("You can call") : text.index(" and nothing else.") + len(" and nothing else.")]
    assert '"name": "f"' in words
    call = '<tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call>'
    results = ["<tool_response>\nb\n</tool_response>", "<tool_response>\nc\n</tool_response>", "d"]
    is_strict = source is not templates.DROPS_SYSTEM
    turns = [("assistant", call), *(("user", each) for each in (["\n\n".join(results)] if is_strict else results))]
    if opening and opening[0]["role"] == "assistant":
        # Gemma 3 writes a system turn before the user's, which is empty here.
        first = [("system", words), ("user", "")] if source is templates.GEMMA3 else [("user", words)]
        turns = [*first, ("assistant", "Hello."), ("user", "a"), *turns]
    else:
        system = f"Be brief.\n\n{words}" if opening else words
        turns = [("user", f"{system}\n\na"), *turns]
    backend = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", chat_template=source)
    messages = [{"role": role, "content": content} for role, content in turns]
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("source", STRICT)
def test_results_reach_such_templates_when_no_tools_are_given(source):
    text, _ = _prompt(source, [*TURNS, RESULT])
    assert text.count("<tool_response>") == 2
    assert "You can call" not in text


def test_a_conversation_that_no_rewriting_keeps_is_the_templates_own_to_refuse():
    refuses = "{{ raise_exception('Not today') }}{{ messages }}"
    with pytest.raises(RequestError, match="refuses these messages: Not today"):
        _prompt(refuses, [BRIEF, TURNS[0]])


@pytest.mark.parametrize("last", ["Sure: ", "e", "<|im_end|", "Sure"])
def test_the_answer_goes_on_with_the_last_message(last):
    messages = [TURNS[0], {"role": "assistant", "content": last}]
    text, _ = _prompt(templates.PLAIN, messages, continue_final_message=True)
    assert text == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{last}"
    whole, _ = _prompt(templates.PLAIN, messages, add_generation_prompt=False)
    assert whole == text + "<|im_end|>\n"


def test_a_template_that_hides_the_last_message_cannot_continue_it():
    hides = "{% for m in messages %}{{ m.content.replace('\ue0c7', '') }}{% endfor %}"
    with pytest.raises(RequestError, match="cannot be continued") as caught:
        _prompt(hides, TURNS[:1], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("source", "fields", "expected"),
    [
        (templates.PLAIN, {}, (False, False)),
        (templates.QWEN, {}, (True, False)),
        (templates.QWEN, {"chat_template_kwargs": {"enable_thinking": False}}, (False, False)),
        (templates.THINKING, {}, (False, True)),
        (templates.QWEN, {"continue_final_message": True}, (False, True)),
    ],
)
def test_whether_the_model_thinks(source, fields, expected):
    last = [{"role": "assistant", "content": "<think>\nwell"}] if fields.get("continue_final_message") else []
    _, prompt = _prompt(source, [TURNS[0], *last], **fields)
    assert (prompt.may_think, prompt.is_thinking) == expected


@pytest.mark.parametrize("marks", REASONING_FORMATS, ids=lambda marks: marks.name)
def test_how_reasoning_is_marked_is_found_out_or_named(marks):
    sign = f"{{# {marks.signs[0]} #}}" if marks.signs else ""  # an equal format without it comes later
    _, prompt = _prompt(f"{sign}{{{{ messages }}}} {marks.start}..{marks.end} so", TURNS[:1])
    assert (prompt.may_think, prompt.is_thinking, prompt.reasoning) == (True, False, marks)
    _, prompt = _prompt(f"{sign}{{{{ messages[0].content }}}}{marks.start}", TURNS[:1])
    assert (prompt.may_think, prompt.is_thinking, prompt.reasoning) == (False, True, marks)
    for name in (marks.name, *marks.aliases):
        _, prompt = _prompt(templates.PLAIN, TURNS[:1], parsers={"reasoning_parser": name})
        assert (prompt.may_think, prompt.reasoning) == (True, marks)
    _, prompt = _prompt(templates.QWEN, TURNS[:1], parsers={"reasoning_parser": "none"})
    assert prompt.shape == MessageShape()


@pytest.mark.parametrize(("parsers", "thinks"), [({}, True), ({"reasoning_parser": "none"}, False)])
def test_an_answer_in_harmony_goes_on_where_the_prompt_ends(parsers, thinks):
    source = (
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    _, prompt = _prompt(source, TURNS[:1], parsers)
    assert prompt.shape == MessageShape(may_think=thinks, harmony="")
    last = {"role": "assistant", "content": "Sure: "}
    _, prompt = _prompt(source, [TURNS[0], last], parsers, continue_final_message=True, add_generation_prompt=False)
    assert prompt.harmony == "<|channel|>final<|message|>Sure: "


def test_the_operator_names_the_format_of_calls():
    _, prompt = _prompt(DUMP, TURNS[:1], tools=[TOOL], parsers={"tool_call_parser": "glm45"})
    assert prompt.tool_choice is not None
    assert prompt.tool_choice.format.name == "glm45"
    assert "<arg_key>" in prompt.delimiters


def test_templates_that_copy_arguments_get_them_as_text_and_others_as_an_object():
    copied = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    copied += "{{ call.function.name + call.function.arguments }}{% endfor %}{% endfor %}"
    for source in (copied, copied.replace("call.function.arguments", "(call.function.arguments | tojson)")):
        text, _ = _prompt(source, TURNS, tools=[TOOL], parsers={"tool_call_parser": "deepseek_v3"})
        assert 'f{"x": [1]}' in text


def test_the_tools_of_phi_4_mini_are_a_text_of_the_system_message():
    source = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
        "{% if 'tools' in m %}{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}{% endif %}<|end|>{% endfor %}"
    )
    text, prompt = _prompt(source, TURNS, tools=[TOOL])
    assert prompt.tool_choice is not None
    assert prompt.tool_choice.format.name == "phi4_mini"
    assert text == (
        '<|system|><|tool|>[{"name": "f", "parameters": {"type": "object"}}]<|/tool|><|end|><|user|>a<|end|>'
        '<|assistant|><|tool_call|>[{"name": "f", "arguments": {"x": [1]}}]<|/tool_call|><|end|><|tool|>b<|end|>'
    )


SHOWS_DOCUMENTS = DUMP + "{% for d in documents or [] %}<doc {{ d.doc_id }}>{{ d.text }}{% endfor %}"


def test_documents_reach_templates_that_show_them():
    documents = [{"doc_id": 1, "text": "It rained."}, {"doc_id": 2, "text": ' "Wet"\n'}]
    text, _ = _prompt(SHOWS_DOCUMENTS, TURNS[:1], documents=documents)
    assert text.endswith('<doc 1>It rained.<doc 2> "Wet"\n')
    assert _prompt(SHOWS_DOCUMENTS, TURNS[:1], documents=[])[0] == _prompt(SHOWS_DOCUMENTS, TURNS[:1])[0]
    as_json = DUMP + "{{ documents | tojson }}"
    assert '{"doc_id": 2, "text": " \\"Wet\\"\\n"}' in _prompt(as_json, TURNS[:1], documents=documents)[0]


@pytest.mark.parametrize(
    ("source", "document"),
    [(DUMP, {"text": "It rained."}), (SHOWS_DOCUMENTS, {"contents": "It rained."}), (SHOWS_DOCUMENTS, {"text": " "})],
)
def test_documents_that_a_template_does_not_show_are_refused(source, document):
    shown = {"doc_id": 1, "text": "Wet."}
    documents = [shown, document] if source is SHOWS_DOCUMENTS else [document]
    with pytest.raises(RequestError, match=rf"does not show documents\[{len(documents) - 1}\]") as caught:
        _prompt(source, TURNS[:1], documents=documents)
    assert caught.value.param == "documents"
