"""Published chat templates: they render as in transformers."""

from __future__ import annotations

import asyncio

import pytest

from oarlock.engine.errors import RequestError
from oarlock.server.llm.chat_template import ChatTemplate
from tests.unit.server.llm.real_templates import real_templates

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "hi <&> é"}
ANSWER = {"role": "assistant", "content": "Hello!"}
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


def _theirs(source: str, messages: list[dict[str, str]]) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        prompts, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, **NAMES)
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
