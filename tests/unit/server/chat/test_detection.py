"""The format of tool calls by trial: foreign wrappers, templates that refuse or drop calls, published templates."""

from __future__ import annotations

import asyncio
import logging

import pytest

from oarlock.server.chat.detection import tool_format_of
from oarlock.server.endpoints.chat.serving import try_tool_format
from oarlock.server.llm.chat_template import ChatTemplate
from tests.unit.server.chat.tool_parsers.written import TEMPLATES
from tests.unit.server.llm.real_templates import real_templates

OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'


def _detected(source, parsers=None, **options):
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, parsers, **options)
    try:
        return asyncio.run(tool_format_of(template)).name
    finally:
        template.close()


def _calling(call):
    """A template that writes each call `f` like this, with a word of Hermes in it, which says nothing."""
    start = TEMPLATES["hermes"].index("\n<tool_call>")
    end = TEMPLATES["hermes"].index("</tool_call>") + len("</tool_call>")
    return "{# <tool_call> #}" + TEMPLATES["hermes"][:start] + call + TEMPLATES["hermes"][end:]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (f"<tool_call>{OBJECT}</tool_call>", "hermes"),
        (f"<tool_calls>[{OBJECT}]</tool_calls>", "apriel"),
        (f"<calls><tool_call>{OBJECT}</tool_call></calls>", "unknown"),
        (f"<tool_call>[{OBJECT}]</tool_call>", "unknown"),
        (f"<tool_call>{OBJECT}</tool_call></tool_calls>", "unknown"),
        (f"functions: {OBJECT}", "unknown"),
        (f"```json\n{OBJECT}\n```", "unknown"),
        (f"{OBJECT}<|eom|>", "llama3"),
        ('<tool_call>{"name": "{{ f.name }}", "arguments": {"city": "Bern"}}</tool_call>', "unknown"),
        ('<tool_call>{"function": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>', "unknown"),
        (f"<think></think><tool_call>{OBJECT}</tool_call>", "hermes"),
        ("{{ raise_exception('no calls') }}", "unknown"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "unknown"),
        ("", "unknown"),
    ],
)
def test_only_a_call_that_comes_back_as_it_was_tells_a_format(call, name):
    assert _detected(_calling(call), cpu_limit_s=0.2) == name


def test_tools_that_a_template_does_not_write_get_into_the_messages():
    """Also where it has words of a format, or takes the tools under a name that no format knows."""
    without = _calling(f"<tool_call>{OBJECT}</tool_call>").replace("{% if tools %}{{ tools | tojson }}{% endif %}", "")
    assert _detected(without) == _detected("{% if my_tools %}{{ my_tools }}{% endif %}" + without) == "generic"


@pytest.mark.parametrize("parsers", [None, {"tool_call_parser": "hermes"}, {"tool_call_parser": "granite4"}])
def test_tools_get_into_the_variable_that_the_template_reads(parsers):
    calling = _calling(f"<tool_call>{OBJECT}</tool_call>")
    assert _detected(calling, parsers) == "hermes"
    assert _detected(calling.replace("tools", "xml_tools"), parsers) == "smollm3"
    assert _detected(calling.replace("tools", "my_tools"), parsers) == "generic"


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
def test_a_chosen_format_writes_the_tools_that_the_template_leaves_out(name):
    chosen = {"tool_call_parser": name}
    assert _detected(TEMPLATES[f"{name}_text"], chosen) == f"{name}_text"
    assert _detected(TEMPLATES[name], chosen) == name


def test_content_in_parts():
    source = TEMPLATES["qwen3_coder"].replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    assert _detected(source) == "qwen3_coder"


def test_an_unknown_format_is_logged_once_with_the_flag_that_helps(caplog):
    template = ChatTemplate(TEMPLATES["unknown"], {})
    known = ChatTemplate(TEMPLATES["hermes"], {})
    named = ChatTemplate(TEMPLATES["unknown"], {}, {"tool_call_parser": "hermes"})
    with caplog.at_level(logging.WARNING, "oarlock.chat"):
        for tried in (template, known, named):
            asyncio.run(try_tool_format(tried))
            tried.close()
    (record,) = caplog.records
    assert "tool_calls_unknown" in record.getMessage()
    assert "--tool-call-parser" in record.getMessage()


def test_tools_that_no_prompt_shows_are_logged_with_the_flag_that_helps(caplog):
    shown = TEMPLATES["kimi_k2"]
    hidden = shown.replace("{% if tools %}{{ tools | tojson }}{% endif %}", "")
    assert hidden != shown
    for source in (shown, hidden):
        with caplog.at_level(logging.WARNING, "oarlock.chat"):
            template = ChatTemplate(source, {}, {"tool_call_parser": "kimi_k2"})
            asyncio.run(try_tool_format(template))
            template.close()
    (record,) = caplog.records
    assert "tools_not_shown" in record.getMessage() and "--chat-template" in record.getMessage()


# Names of published templates begin so -> the format.
PUBLISHED = {
    "Apertus": "apertus", "Apriel": "apriel", "unsloth-Apriel": "apriel", "Bielik": "hermes", "ByteDance": "seed_oss",
    "Cohere2MoE": "cohere", "CohereForAI-c4ai-command-r-plus": "command_r", "CohereForAI-c4ai-command-r7b": "cohere",
    "GLM": "glm45", "GigaChat3-": "unknown", "GigaChat3.1": "gigachat3", "HuggingFaceTB-SmolLM3": "generic",
    "Kimi-K2": "unknown", "Kimi-K3": "unknown", "LFM2": "lfm2", "MiMo": "hermes", "MiniMax-M1": "minimax",
    "MiniMax-M2": "minimax_m2", "MiniMax-M3": "minimax_m3", "Mistral-Small-3.2": "mistral_named",
    "NVIDIA-Nemotron-3": "qwen3_coder", "NVIDIA-Nemotron-Nano-v2": "nemotron_json", "NousResearch": "hermes",
    "Qwen-": "hermes", "Qwen3-Coder": "qwen3_coder", "Qwen3.5": "qwen3_coder", "Reka": "hermes", "Spark": "glm45",
    "StepFun": "qwen3_coder", "deepseek-ai-DeepSeek-R1-Distill-Llama": "generic",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen": "deepseek_v3_text", "deepseek-ai-DeepSeek-V3.1": "deepseek_v31_text",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32", "deepseek-ai-DeepSeek-V4": "deepseek_v4", "fireworks": "unknown",
    "google-gemma-2": "generic", "google-gemma-4": "gemma4", "ibm-granite-granite-3": "granite",
    "ibm-granite-granite-4": "hermes", "inclusionai-ling": "glm45", "llama-cpp-deepseek-r1": "unknown",
    "llama-cpp-rwkv": "generic", "meetkai-functionary-medium-v3.1": "functionary_v3_1",
    "meetkai-functionary-medium-v3.2": "unknown", "meta-llama": "llama3", "microsoft-Phi-3.5": "generic",
    "mistralai-Ministral": "mistral_named", "mistralai-Mistral-Nemo": "mistral", "moonshotai-Kimi-K2": "kimi_k2",
    "muse": "unknown", "openai-gpt-oss": "openai", "openbmb": "unknown", "poolside": "glm45", "tencent": "hy_v3",
    "unsloth-mistral-Devstral": "mistral_named", "upstage": "unknown",
}  # fmt: skip


@pytest.mark.soak
def test_published_templates():
    found = {name: _detected(source) for name, source in real_templates().items()}
    expected = {name: next(PUBLISHED[start] for start in PUBLISHED if name.startswith(start)) for name in found}
    assert found == expected
