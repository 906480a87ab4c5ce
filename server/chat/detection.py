"""Detection of the format in which a model writes its tool calls, by rendering its chat template.

A chat template shows the model its earlier calls, so it writes them in the format that the model was trained on. A
conversation with a call is rendered, and each format parses the rendered text. The model's format is the first that
finds exactly that call, without other content that a client would see. If there is no such format, the format is
unknown, and requests with tools are refused unless a call is forced.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from oarlock.server.chat.message_parser import REASONING_FORMATS
from oarlock.server.chat.tool_parsers.base import Messages, ToolFormat
from oarlock.server.chat.tool_parsers.call_parser import ArgumentsDelta, ContentDelta, MessageEvent, ToolCallStart
from oarlock.server.chat.tool_parsers.harmony import FINAL, HARMONY
from oarlock.server.chat.tool_parsers.hermes import GENERIC, HERMES, UNKNOWN
from oarlock.server.chat.tool_parsers.registry import FORMATS, by_name
from oarlock.server.llm.chat_template import ChatTemplate, text_parts
from oarlock.server.llm.template_renderers import TemplateLimitError

_QUESTION, _ANSWER, _FUNCTION = "trial4question", "trial4answer", "trial4function"
_ARGUMENTS: dict[str, Any] = {"city": "Zurich", "days": 3}
_QUOTED = {name: str(value) for name, value in _ARGUMENTS.items()}  # some templates put quotes around all values
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
_USER = {"role": "user", "content": _QUESTION}
_MAX_CHARACTERS = 64 * 1024  # limit for one rendered trial
_CALL_ID = "abc123def"  # an id that every template accepts
_MARKS = re.compile("|".join(re.escape(tag) for known in REASONING_FORMATS for tag in known.tags))
# special tokens that end a turn, not the tags of a call that is written as text
_TOKENS = re.compile(r"(?:<[|\uff5c][^<>|\uff5c]*[|\uff5c]>)+")
_known: WeakKeyDictionary[ChatTemplate, ToolFormat] = WeakKeyDictionary()


async def tool_format_of(template: ChatTemplate) -> ToolFormat:
    """Return the format that the operator chose (`ChatTemplate.parsers`), or the format that a trial detects.

    Raises `EngineError` if the renderer process is lost.
    """
    if template not in _known:
        _known[template] = await _choose(template)
    return _known[template]


async def _choose(template: ChatTemplate) -> ToolFormat:
    name = template.parsers.get("tool_call_parser")
    if template.parsers.get("reasoning_parser") == "openai_gptoss":
        return HARMONY
    chosen = None if name is None else by_name(name)
    if not template.exists:
        return chosen or GENERIC
    if chosen is not None and (chosen.passes_tools or not _variants(chosen)):
        return chosen
    trial = _Trial(template, await template.reads_parts())
    shown = await trial.prompt_with_tools()
    if chosen is None:
        return await _detect(trial, shown)
    if shown is None or _FUNCTION in shown:
        return chosen
    return await _passing_tools(trial, _variants(chosen), chosen)


def _variants(chosen: ToolFormat) -> list[ToolFormat]:
    """Return the formats with the same calls whose templates get the tools in another way."""
    return [known for known in FORMATS if known.parser is chosen.parser and known.passes_tools]


async def hides_tools(template: ChatTemplate) -> bool:
    """Return whether the prompts of a template lack the tools, which it gets in the usual variable.

    Raises `EngineError` if the renderer process is lost.
    """
    tool_format = await tool_format_of(template)
    if not template.exists or tool_format.passes_tools:
        return False
    shown = await _Trial(template, await template.reads_parts()).prompt_with_tools(tool_format)
    return shown is not None and _FUNCTION not in shown


async def _detect(trial: "_Trial", shown: str | None) -> ToolFormat:
    """Return the format found by trial. `shown`: a prompt with tools, None if the template refuses it."""
    frame = await trial.frame()
    if frame is not None and FINAL in frame.before[-1]:  # all responses are in Harmony, with or without tools
        return HARMONY
    if shown is not None and _FUNCTION not in shown:
        return await _passing_tools(trial, [known for known in FORMATS if known.passes_tools])
    if frame is None:
        return UNKNOWN
    writes_calls = False
    for known in FORMATS:
        if known.passes_tools:
            continue
        for text in await trial.rendered_calls(known):
            writes_calls = writes_calls or (_FUNCTION in text and known.own_turns is None)
            if known.needs in text and _reads(known, text, frame):
                return known
    if writes_calls or shown is None:
        return UNKNOWN
    return next((known for known in FORMATS if known.marks and all(mark in shown for mark in known.marks)), UNKNOWN)


async def _passing_tools(trial: "_Trial", formats: list[ToolFormat], chosen: ToolFormat = GENERIC) -> ToolFormat:
    """Return the format in whose way the template gets the tools.

    If there is none, return `GENERIC`, which every template can show, or the operator's choice if its calls differ.
    """
    for known in formats:
        if known is GENERIC or (known.needs and not trial.writes_any(known.delimiters)):
            continue
        if _FUNCTION not in (await trial.prompt_with_tools(known) or ""):
            continue
        if known.own_turns is None and not known.needs:
            return known
        frame = await trial.frame()
        for text in await trial.rendered_calls(known):
            if known.needs in text and _reads(known, text, frame):
                return known
    return GENERIC if GENERIC in formats else chosen


@dataclass(frozen=True, slots=True)
class _Frame:
    """Text that a template writes around an assistant message."""

    before: tuple[str, ...]  # text between the question and the response: in a prompt, and in an earlier turn
    behind: str


class _Trial:
    """Renders trial conversations. The methods return None if the template refuses a conversation."""

    def __init__(self, template: ChatTemplate, as_parts: bool) -> None:
        self._template = template
        self._as_parts = as_parts
        self._is_stopped = False  # the template has reached a limit: nothing more is tried
        self._answers: dict[tuple[str, bool, str], str | None] = {}  # properties of formats -> rendered turn

    def writes_any(self, texts: Sequence[str]) -> bool:
        """Return whether the template has one of the texts."""
        return any(text in self._template.source for text in texts)

    async def prompt_with_tools(self, tool_format: ToolFormat = HERMES) -> str | None:
        """Return a prompt with the tools, passed as this format passes them."""
        return await self._render([_USER], True, tool_format)

    async def frame(self) -> _Frame | None:
        """Return the text around an assistant message."""
        prompt = await self._render([_USER], True)
        whole = await self._render([_USER, {"role": "assistant", "content": _ANSWER}], False)
        if prompt is None or whole is None or _QUESTION not in prompt or _ANSWER not in whole:
            return None
        before, _, behind = _behind(whole).partition(_ANSWER)
        return _Frame((_behind(prompt), before), behind)

    async def rendered_calls(self, tool_format: ToolFormat) -> list[str]:
        """Return the texts that the template may write after the user's turn for a call in the given format.

        If the format has the arguments as text, some templates expect an object nevertheless (`Folding`).
        """
        kinds = (True, False) if tool_format.text_arguments else (False,)
        texts = [await self._rendered_call(tool_format, as_text) for as_text in kinds]
        return [text for text in texts if text is not None]

    async def _rendered_call(self, tool_format: ToolFormat, as_text: bool) -> str | None:
        call_id = tool_format.call_id(_FUNCTION, 0) if tool_format.call_id is not None else _CALL_ID
        is_unusual = tool_format.own_turns is not None or tool_format.passes_tools
        key = (tool_format.name if is_unusual else "", as_text, call_id)
        if key not in self._answers:
            arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
            call = {"id": call_id, "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}
            turns = [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
            text = await self._render(turns, False, tool_format)
            self._answers[key] = None if text is None else _behind(text)
        return self._answers[key]

    async def _render(self, turns: Messages, opens: bool, tool_format: ToolFormat = HERMES) -> str | None:
        if self._is_stopped:
            return None
        turns, tools = tool_format.passed(turns, _TOOLS)
        if tool_format.own_turns is not None:
            turns = tool_format.own_turns(turns)
        if self._as_parts:
            turns = [{**turn, "content": text_parts(*filter(None, [turn["content"]]))} for turn in turns]
        try:
            return await self._template.try_render(
                turns, opens, _MAX_CHARACTERS, tools=tools, tools_variable=tool_format.tools_variable
            )
        except TemplateLimitError:
            self._is_stopped = True
            return None


def _behind(text: str) -> str:
    return text.rpartition(_QUESTION)[2]


def _reads(tool_format: ToolFormat, text: str, frame: _Frame | None) -> bool:
    """Return whether the format parses exactly the trial call from the text after the user's turn."""
    if frame is None:
        return False
    head = max((head for head in frame.before if text.startswith(head)), key=len, default=None)
    if head is None:
        head = _common(text, frame.before[-1])
    parser = tool_format.parser({_FUNCTION: _SCHEMA})
    events = [*parser.push(text[len(head) :]), *parser.flush()]
    starts = [index for index, event in enumerate(events) if isinstance(event, ToolCallStart)]
    if len(starts) != 1:
        return False
    arguments = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    try:
        is_equal = json.loads(arguments) in (_ARGUMENTS, _QUOTED)
    except ValueError:
        return False
    before, behind = _content(events[: starts[0]]), _content(events[starts[0] :])
    is_end = _content([ContentDelta(frame.behind)]).endswith(behind) or _TOKENS.fullmatch(behind) is not None
    return is_equal and not before and is_end


def _content(events: list[MessageEvent]) -> str:
    """Return the content without white space and reasoning tags, which have a parser of their own."""
    text = "".join(event.text for event in events if isinstance(event, ContentDelta))
    return "".join(_MARKS.sub("", text).split())


def _common(text: str, other: str) -> str:
    """Return the longest common prefix that does not end inside a tag."""
    size = next((size for size, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), None)
    common = text[: min(len(text), len(other)) if size is None else size]
    begun = common.rfind("<")
    return common[:begun] if begun > common.rfind(">") else common
