"""Templates in their sandbox: the constructs of published ones work as transformers has them, and the limits hold."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.engine.errors import RequestError
from oarlock.server.llm import template_renderers
from oarlock.server.llm.chat_template import ChatTemplate
from tests.e2e.running import ROOT, eventually
from tests.unit.server.llm import chat_templates as templates
from tests.unit.server.llm.chat_templates import rendered

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
def test_it_renders_like_transformers(name, messages, tools):
    from transformers.utils.chat_template_utils import render_jinja_template

    source, more = getattr(templates, name), {"date_string": "26 Jul 2024"}
    expected, _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=True, **NAMES, **more
    )
    ours = rendered(ChatTemplate(source, NAMES), messages, True, 100_000, tools=tools, variables=more)
    assert ours == expected[0]
    assert "<&> é" in ours


def test_variables_reach_the_template_and_never_replace_its_own():
    template = ChatTemplate(templates.QWEN, NAMES)
    assert rendered(template, [USER], True, 1000, variables={"enable_thinking": False}).endswith("</think>\n\n")
    shadowed = rendered(template, [USER], True, 1000, variables={"messages": [], "add_generation_prompt": False})
    assert shadowed == rendered(template, [USER], True, 1000)


def test_the_template_for_tools_is_taken_when_there_are_tools():
    template = ChatTemplate({"default": "D{{ tools }}", "tool_use": "T{{ tools | length }}"}, {})
    assert rendered(template, [USER], True, 100) == "DNone"
    assert rendered(template, [USER], True, 100, tools=[TOOL]) == "T1"


# Most of these compute within one operation, where no check between a template's statements could stop them.
LONG = "{% set ns = namespace(l='x', n=[[]]) %}{% for i in range(24) %}{% set ns.l = ns.l + ns.l %}{% endfor %}"
ATTACKS = {
    "a product, forty times": (
        "{% set ns = namespace(l='x') %}{% for i in range(40) %}{% set ns.l = ns.l * 1000 %}{% endfor %}"
    ),
    "replace": LONG + "{% set a = ns.l.replace('x', ns.l) %}",
    "join": LONG + "{% set a = ns.l | join(ns.l) %}",
    "format by %": "{% set a = '%1000000000d' % (messages | length) %}{{ a }}{{ '%*d' % (10 ** 9, 1) }}",
    "format by its filter": "{% set a = '%1000000000d' | format(messages | length) %}",
    "format by its method": "{% set a = '{:{}}'.format(messages | length, 10 ** 9) %}",
    "indent": LONG + "{% set a = ns.l.replace('x', 'x\n') | indent(100000) %}",
    "expandtabs": LONG + "{% set a = ns.l.replace('x', '\t').expandtabs(10 ** 6) %}",
    "tojson with an indent": (
        "{% set ns = namespace(n=[]) %}{% for i in range(200) %}{% set ns.n = [ns.n] %}{% endfor %}"
        "{{ ns.n | tojson(indent=10 ** 7) }}"
    ),
    "sum with a start": "{% set x = [] %}{{ ([[1] * 10000] * 100000) | sum(start=x) | length }}",
    "center": "{% set a = messages[0].content | center(10 ** 10) %}",
    "ljust": "{% set a = messages[0].content.ljust(10 ** 10) %}",
    "a large power": "{% set n = messages | length + 9 %}{{ (n ** 9999999) % 7 }}",
    "a large product": (
        "{% set ns = namespace(n=messages | length + 9) %}"
        "{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"
    ),
    "a constant": "{% if ('x' * 10 ** 11) | length %}{% endif %}",
    "a constant in an output": "{{ ('x' * 10 ** 11) | upper | length }}",
    "doubling by +": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a block of text": (
        "{% set x %}{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxx{% endfor %}{% endfor %}{% endset %}"
    ),
    "output": "{% for a in range(90000) %}{{ messages[0].content }}{% endfor %}",
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(90000) %}{% for b in range(90000) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
    "macros without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "blocks": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "loops inside themselves": (
        "{% for a in [1, 2] recursive %}{% if loop.depth < 40 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}"
    ),
    "a long range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "an expression that nests": "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "lists that nest": "{{ " + "[" * 20000 + "]" * 20000 + " }}",
    "conditions that nest": "{% if messages %}" * 2000 + "{% endif %}" * 2000,
    "loops that nest": "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
}


async def _outcome(source: str, turn: asyncio.Semaphore) -> str:
    """The error that a template ends with, or what it wrote."""
    try:
        async with turn:
            return await ChatTemplate(source, {}, cpu_limit_s=0.05).render([USER], True, 10_000)
    except StartupError as error:
        return f"{error.cause} {error.fix}"
    except RequestError as error:
        return f"{error.param}: {error.message}"


@pytest.mark.slow
def test_templates_are_stopped_and_take_nothing_from_the_server():
    """Each error is named; memory and time of this process, which stands for the server, do not move."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.process_time()

    async def together() -> list[str]:
        turn = asyncio.Semaphore(4)
        return await asyncio.gather(*(_outcome(source, turn) for source in ATTACKS.values()))

    outcomes = dict(zip(ATTACKS, asyncio.run(together()), strict=True))
    named = ("The chat template in tokenizer_config.json", "messages: The chat", "messages: The model's chat template")
    assert {name: said for name, said in outcomes.items() if not said.startswith(named)} == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss < 64 * 1024  # KiB
    assert time.process_time() - started < 2


def test_the_limit_and_the_fix_are_named():
    template = ChatTemplate(ATTACKS["loops"], {}, cpu_limit_s=0.1)
    with pytest.raises(RequestError, match=r"chat template takes longer than 0\.1 s .* with a --chat-template"):
        rendered(template, [USER], True, 100)
    with pytest.raises(RequestError, match=r"chat template takes more than \d+ MiB of memory"):
        rendered(ChatTemplate(ATTACKS["ljust"], {}), [USER], True, 100)
    with pytest.raises(RequestError, match=r"chat template writes more than 100 characters"):
        rendered(ChatTemplate(ATTACKS["output"], {}), [USER], True, 100)


def test_a_template_that_cannot_be_compiled_ends_the_start():
    with pytest.raises(StartupError, match=r"not valid Jinja: line 2: ") as caught:
        ChatTemplate("\n{% for %}", {})
    assert "--chat-template" in caught.value.fix
    for value in (5, ["junk"], [{"name": "default", "template": 5}], {"default": "x"}, True):
        with pytest.raises(StartupError, match=r"chat_template in tokenizer_config\.json is neither"):
            ChatTemplate.from_config({"chat_template": value}, {})


def test_renderings_after_a_killed_one_are_as_before():
    source = "{% if messages[0].content == 'x' %}" + ATTACKS["loops"] + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, {}, cpu_limit_s=0.2)
    for _ in range(2):
        with pytest.raises(RequestError, match="takes longer"):
            rendered(template, [{"role": "user", "content": "x"}], True, 100)
        assert rendered(template, [USER], True, 100) == USER["content"]
    with pytest.raises(RequestError):
        rendered(template, [USER], True, 3)
    assert rendered(template, [USER], True, 100) == USER["content"]


@pytest.mark.slow
def test_others_do_not_wait_for_renderings_that_are_stopped():
    """Twelve hostile conversations take 24 s of processor time; one beside them needs a moment."""
    source = "{% if messages[0].content == 'x' %}" + ATTACKS["loops"] + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, {})

    async def both() -> None:
        hostile = [
            asyncio.create_task(template.render([{"role": "user", "content": "x"}], True, 100)) for _ in range(12)
        ]
        await asyncio.sleep(0)
        assert await template.render([USER], True, 100) == USER["content"]
        assert not all(task.done() for task in hostile)
        for task in hostile:
            task.cancel()
        assert len(await asyncio.gather(*hostile, return_exceptions=True)) == 12
        assert await template.render([USER], True, 100) == USER["content"]

    asyncio.run(both())


def _children(pid: int) -> list[int]:
    return [int(name) for name in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_no_process_or_descriptor_is_left_of_what_was_stopped_cancelled_or_lost():
    rendered(ChatTemplate("{{ messages[0].content }}", {}), [USER], True, 100)
    parent = template_renderers.processes._process.pid
    before, fds = set(_children(parent)), len(os.listdir("/proc/self/fd"))
    template = ChatTemplate(ATTACKS["loops"], {}, cpu_limit_s=0.2)

    async def cancelled() -> None:
        task = asyncio.create_task(template.render([USER], True, 100))
        await asyncio.wait([task], timeout=0.05)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cancelled())
    with pytest.raises(RequestError):
        rendered(template, [USER], True, 100)
    template.close()
    eventually(lambda: not set(_children(parent)) - before, 30, "renderers have ended")
    assert len(os.listdir("/proc/self/fd")) == fds

    os.kill(parent, signal.SIGKILL)
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert rendered(template, [USER], True, 100) == USER["content"]
    assert template_renderers.processes._process.pid != parent


def test_processes_end_with_their_last_user(monkeypatch):
    monkeypatch.setattr(template_renderers, "processes", template_renderers.RendererProcesses())
    templates = [ChatTemplate("{{ messages }}", {}) for _ in range(2)]
    process = template_renderers.processes._process
    templates.pop().close()
    assert process.poll() is None
    del templates[:]  # closed as garbage
    assert process.poll() is not None and template_renderers.processes._process is None


@pytest.mark.slow
def test_processes_end_with_their_parent():
    code = (
        "import asyncio, os, sys\nfrom oarlock.server.llm.chat_template import ChatTemplate\n"
        "from oarlock.server.llm import template_renderers as renderers\n"
        f"template = ChatTemplate({ATTACKS['loops']!r}, {{}})\n"
        "print(renderers.processes._process.pid, 'jinja2' in sys.modules, flush=True)\n"
        "asyncio.run(template.render([], True, 10))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        pid, has_jinja = process.stdout.readline().split()
        assert has_jinja == "False"
        eventually(lambda: _children(int(pid)), 30, "a template is rendered")
        renderers = _children(int(pid))
        process.kill()
    for number in (int(pid), *renderers):
        eventually(lambda number=number: not Path(f"/proc/{number}").exists(), 30, "the process ends")


def test_json_is_written_as_transformers_writes_it():
    template = ChatTemplate("{{ messages[0] | tojson(indent=2, sort_keys=true) }}", {})
    assert rendered(template, [USER], True, 1000) == json.dumps(USER, indent=2, sort_keys=True, ensure_ascii=False)
