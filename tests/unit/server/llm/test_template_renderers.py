"""Processes that render templates are killed or stopped by others: no conversation is blamed for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from oarlock.engine.errors import UnavailableError
from oarlock.server.errors import describe
from oarlock.server.llm import template_renderers
from oarlock.server.llm.chat_template import ChatTemplate
from oarlock.server.llm.template_messages import ReplyKind
from oarlock.server.llm.template_renderers import TemplateLimitError, _children
from tests.e2e.running import eventually

pytestmark = pytest.mark.slow

SLOW = "{% for i in range(120) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"  # about a second
SOURCE = "{% if messages[0].content == 'slow' %}" + SLOW + "{% endif %}{{ messages[0].content }}"


@pytest.fixture
def template(monkeypatch):
    """A template with processes of its own."""
    monkeypatch.setattr(template_renderers, "processes", template_renderers.RendererProcesses())
    made = ChatTemplate(SOURCE, {})
    yield made
    made.close()


async def _rendered(template, *contents):
    turns = [[{"role": "user", "content": content}] for content in contents]
    return await asyncio.gather(*(template.render(messages, True, 1000) for messages in turns))


def _pids():
    parent = template_renderers.processes._process.pid
    return parent, _children(parent)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("which", ["parent", "renderers", "all"])
def test_renderings_go_on_in_other_processes(template, number, which):
    contents = [f"text {index}" for index in range(12)]

    async def scenario():
        await _rendered(template, *contents)  # several renderers are idle now
        parent, renderers = _pids()
        assert renderers
        for pid in {"parent": [parent], "renderers": renderers, "all": [parent, *renderers]}[which]:
            os.kill(pid, number)
        begun = time.monotonic()
        assert await _rendered(template, *contents) == contents
        return time.monotonic() - begun

    assert asyncio.run(scenario()) < template_renderers._WALL_TIME_LIMIT_S


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_rendering_that_lost_its_process_is_done_once_more(template, number):
    async def scenario():
        work = asyncio.create_task(_rendered(template, "slow"))
        await asyncio.sleep(0)
        _, renderers = _pids()
        os.kill(max(renderers), number)
        return await work

    assert asyncio.run(scenario()) == ["slow"]


def test_one_that_loses_two_is_refused_for_now_and_the_next_one_is_rendered(template, monkeypatch):
    async def is_killed(*_):
        return ReplyKind.KILLED, str(int(signal.SIGKILL))

    async def scenario():
        with monkeypatch.context() as patch:
            patch.setattr(template_renderers, "_exchange", is_killed)
            with pytest.raises(UnavailableError) as lost:
                await _rendered(template, "text")
        assert await _rendered(template, "text") == ["text"]
        return describe(lost.value)

    answer = asyncio.run(scenario())
    assert (answer.status, answer.code, answer.headers) == (503, "template_process_lost", {"Retry-After": "1"})


def test_silence_by_the_clock_is_not_the_fault_of_the_template(template, monkeypatch):
    async def is_silent(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr(template_renderers, "_exchange", is_silent)
    monkeypatch.setattr(template_renderers, "_WALL_TIME_LIMIT_S", 0.01)
    with pytest.raises(UnavailableError):
        asyncio.run(_rendered(template, "text"))


def test_the_processors_time_is_the_fault_of_the_template(template):
    endless = ChatTemplate(SOURCE.replace("range(120)", "range(99999)"), {}, cpu_limit_s=0.3)
    with pytest.raises(TemplateLimitError, match=r"takes longer than 0\.3 s of processor time"):
        asyncio.run(_rendered(endless, "slow"))
    endless.close()
    eventually(lambda: len(_pids()[1]) <= 1, 30, "renderers that were stopped end")
