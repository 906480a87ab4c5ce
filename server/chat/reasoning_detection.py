"""Detection of the tags that a model writes around its reasoning and its response.

The operator's choice comes first, then the tags in the chat template, then the tags in a conversation that it renders,
then the vocabulary. Formats with tags around the response have the same reasoning tags as others. They are told apart
by texts in the template, or by the response of the rendered conversation, which the template writes between its tags.
"""

import re
from weakref import WeakKeyDictionary

from oarlock.server.chat.message_parser import REASONING_FORMATS, ReasoningFormat
from oarlock.server.llm.chat_template import ChatTemplate, text_parts
from oarlock.server.llm.template_renderers import TemplateLimitError
from oarlock.server.llm.tokenizer import Tokenizer

_ANSWER = "trial4answer"
_MAX_TRIAL = 64 * 1024  # limit in characters for the rendered conversation
_known: WeakKeyDictionary[ChatTemplate, ReasoningFormat | None] = WeakKeyDictionary()


async def reasoning_format_of(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return the format of the model's reasoning, None if it has none.

    Raises `EngineError` if the renderer process is lost.
    """
    template = tokenizer.template
    if template not in _known:
        _known[template] = await _choose(tokenizer, template)
    return _known[template]


async def _choose(tokenizer: Tokenizer, template: ChatTemplate) -> ReasoningFormat | None:
    name = template.parsers.get("reasoning_parser")
    if name is not None:
        return next((known for known in REASONING_FORMATS if name in (known.name, *known.aliases)), None)
    rendered = await _rendered_answer(template) if template.exists else ""
    for known in REASONING_FORMATS:
        is_named = known.start in template.source or known.end in template.source
        if is_named and (known.answer is None or _has_answer_tags(template.source, rendered, known)):
            return known
    plain = [known for known in REASONING_FORMATS if known.answer is None]
    for known in plain:
        if known.start in rendered or known.end in rendered:
            return known
    token_to_id = tokenizer.backend.token_to_id
    return next((known for known in plain if all(token_to_id(token) is not None for token in known.tokens)), None)


def _has_answer_tags(source: str, rendered: str, known: ReasoningFormat) -> bool:
    """Return whether the template names the tags around a response, or writes them."""
    start, end = map(re.escape, known.answer_tokens)
    is_written = re.search(rf"{start}\s*{_ANSWER}\s*{end}", rendered) is not None
    return is_written or any(sign in source for sign in known.signs)


async def _rendered_answer(template: ChatTemplate) -> str:
    """Return a conversation with a response as the template renders it, "" if the template refuses it."""
    as_parts = await template.reads_parts()
    turns = [
        {"role": role, "content": text_parts(text) if as_parts else text}
        for role, text in (("user", "Hi"), ("assistant", _ANSWER))
    ]
    try:
        return await template.try_render(turns, False, _MAX_TRIAL) or ""
    except TemplateLimitError:  # which requests will meet too, and report
        return ""
