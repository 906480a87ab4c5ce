"""Finds out by trial in which format a model writes its calls.

A chat template shows the model its earlier calls, so it writes them in the form that the model was trained on. So a
conversation with a call is rendered, and each format reads the answer back that the template wrote: the first to find
exactly that call, with nothing before or behind it that a client would see, is the model's. If none does, the format is
unknown, and requests with tools are refused unless a call is forced.
"""

import json
import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from oarlock.engine.errors import RequestError
from oarlock.server.chat.message_parser import REASONING_FORMATS
from oarlock.server.chat.tool_parsers.base import ToolFormat
from oarlock.server.chat.tool_parsers.call_parser import ArgumentsDelta, ContentDelta, MessageEvent, ToolCallStart
from oarlock.server.chat.tool_parsers.harmony import FINAL, HARMONY
from oarlock.server.chat.tool_parsers.hermes import GENERIC, HERMES, UNKNOWN
from oarlock.server.chat.tool_parsers.registry import FORMATS, by_name
from oarlock.server.llm.chat_template import ChatTemplate, text_parts
from oarlock.server.llm.template_renderers import TemplateLimitError

_QUESTION, _ANSWER, _FUNCTION = "trial4question", "trial4answer", "trial4function"
_ARGUMENTS: dict[str, Any] = {"city": "Zurich", "days": 3}
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a city"},
        "days": {"type": "integer", "description": "number of days"},
    },
    "required": ["city", "days"],
}
_TOOLS = [
    {"type": "function", "function": {"name": _FUNCTION, "description": "a function", "parameters": _SCHEMA}},
]
_MAX_CHARACTERS = 64 * 1024  # of a rendered trial
_CALL_ID = "abc123def"  # a form that every template takes
_MARKS = re.compile("|".join(re.escape(mark) for known in REASONING_FORMATS for mark in (known.start, known.end)))
_TOKENS = re.compile(r"(?:<[|\uff5c][^<>|\uff5c]*[|\uff5c]>)+")  # end a turn; no tags of a call that is written as text
_known: WeakKeyDictionary[ChatTemplate, ToolFormat] = WeakKeyDictionary()


async def tool_format_of(template: ChatTemplate) -> ToolFormat:
    """The format that the operator named (`ChatTemplate.parsers`), or else the one that a trial finds.

    Raises `EngineError` if the process that renders is lost.
    """
    if template not in _known:
        _known[template] = await _choose(template)
    return _known[template]


async def _choose(template: ChatTemplate) -> ToolFormat:
    name = template.parsers.get("tool_call_parser")
    if template.parsers.get("reasoning_parser") == "openai_gptoss":
        return HARMONY
    if name is not None and name != HERMES.name:
        return by_name(name)
    if not template.exists:
        return HERMES if name else GENERIC
    trial = _Trial(template, await template.reads_parts())
    shown = await trial.prompt_with_tools()
    if name is not None:  # the same calls, and the tools get into the prompt
        return GENERIC if shown is not None and _FUNCTION not in shown else HERMES
    return await _detect(trial, shown)


async def _detect(trial: "_Trial", shown: str | None) -> ToolFormat:
    """The format by trial. `shown`: a prompt with tools."""
    frame = await trial.frame()
    if frame is not None and FINAL in frame.before[-1]:  # all answers are in Harmony, with tools or without
        return HARMONY
    if shown is not None and _FUNCTION not in shown:
        writers = [known for known in FORMATS if known.write_into_messages is not None and known is not GENERIC]
        for known in writers:
            if _FUNCTION in (await trial.prompt_with_tools(known) or ""):
                return known
        return GENERIC
    if frame is None:
        return UNKNOWN
    writes_calls = False
    for known in FORMATS:
        if known.write_into_messages is not None:
            continue
        text = await trial.answer_with_call(known)
        if text is None:
            continue
        writes_calls = writes_calls or _FUNCTION in text
        if known.needs in text and _reads(known, text, frame):
            return known
    if writes_calls or shown is None:
        return UNKNOWN
    return next((known for known in FORMATS if known.marks and all(mark in shown for mark in known.marks)), UNKNOWN)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The texts of a template around an answer."""

    before: tuple[str, ...]  # of a prompt, and of an earlier answer
    behind: str


class _Trial:
    """Renders conversations of a template. Its methods return None if the template refuses them."""

    def __init__(self, template: ChatTemplate, as_parts: bool) -> None:
        self._template = template
        self._as_parts = as_parts
        self._is_stopped = False  # the template has run into a limit: no more is tried
        self._answers: dict[tuple[bool, str], str | None] = {}  # by the form of arguments, and the id

    async def prompt_with_tools(self, tool_format: ToolFormat | None = None) -> str | None:
        """A prompt with the tools, as a variable of the template or as `tool_format` writes them."""
        turns = [self._turn("user", _QUESTION)]
        if tool_format is None or tool_format.write_into_messages is None:
            return await self._render(turns, True, _TOOLS)
        turns = tool_format.write_into_messages([{"role": "user", "content": _QUESTION}], _TOOLS)
        return await self._render(turns, True, None)

    async def frame(self) -> _Frame | None:
        """The texts around an answer."""
        user = self._turn("user", _QUESTION)
        prompt = await self._render([user], True, _TOOLS)
        whole = await self._render([user, self._turn("assistant", _ANSWER)], False, _TOOLS)
        if prompt is None or whole is None or _QUESTION not in prompt or _ANSWER not in whole:
            return None
        before, _, behind = _behind(whole).partition(_ANSWER)
        return _Frame((_behind(prompt), before), behind)

    async def answer_with_call(self, tool_format: ToolFormat) -> str | None:
        """The text behind the user's turn that the template writes for a call, in the form that the format asks for."""
        call_id = tool_format.call_id(_FUNCTION, 0) if tool_format.call_id is not None else _CALL_ID
        key = (tool_format.text_arguments, call_id)
        if key not in self._answers:
            arguments = json.dumps(_ARGUMENTS) if tool_format.text_arguments else _ARGUMENTS
            call = {"id": call_id, "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}
            turns = [self._turn("user", _QUESTION), {**self._turn("assistant", ""), "tool_calls": [call]}]
            text = await self._render(turns, False, _TOOLS)
            self._answers[key] = None if text is None else _behind(text)
        return self._answers[key]

    def _turn(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": text_parts(*filter(None, [text])) if self._as_parts else text}

    async def _render(self, turns: list[dict[str, Any]], opens: bool, tools: list[dict[str, Any]] | None) -> str | None:
        if self._is_stopped:
            return None
        try:
            return await self._template.render(turns, opens, _MAX_CHARACTERS, tools=tools)
        except TemplateLimitError:
            self._is_stopped = True
        except RequestError:
            pass  # the template refuses such a conversation
        return None


def _behind(text: str) -> str:
    return text.rpartition(_QUESTION)[2]


def _reads(tool_format: ToolFormat, text: str, frame: _Frame) -> bool:
    """Whether the format reads exactly the call from what the template wrote behind the user's turn."""
    head = max((head for head in frame.before if text.startswith(head)), key=len, default=None)
    if head is None:
        head = _common(text, frame.before[-1])
    parser = tool_format.parser({_FUNCTION: _SCHEMA})
    events = [*parser.push(text[len(head) :]), *parser.flush()]
    starts = [place for place, event in enumerate(events) if isinstance(event, ToolCallStart)]
    if len(starts) != 1:
        return False
    arguments = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    try:
        is_equal = json.loads(arguments) == _ARGUMENTS
    except ValueError:
        return False
    before, behind = _content(events[: starts[0]]), _content(events[starts[0] :])
    is_end = _content([ContentDelta(frame.behind)]).endswith(behind) or _TOKENS.fullmatch(behind) is not None
    return is_equal and not before and is_end


def _content(events: list[MessageEvent]) -> str:
    """The content without white space and marks of thoughts, which have a parser of their own."""
    text = "".join(event.text for event in events if isinstance(event, ContentDelta))
    return "".join(_MARKS.sub("", text).split())


def _common(text: str, other: str) -> str:
    """The longest common beginning that does not end inside a tag."""
    size = next((size for size, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), None)
    common = text[: min(len(text), len(other)) if size is None else size]
    begun = common.rfind("<")
    return common[:begun] if begun > common.rfind(">") else common
