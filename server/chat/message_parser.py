"""Parses a choice's text into a message: reasoning, content, tool calls, and the reason of its end.

Streams and whole answers use the same parser, so they cannot differ. Line ends next to the marks of thoughts
(`<think>…</think>`) belong to the marks, as templates write them. `<think>` anywhere but at the start is text. Some
models use other marks (`REASONING_FORMATS`). Whether a model uses any is found out in `prompt.py`.
"""

from dataclasses import dataclass

from oarlock.engine.types import FinishReason
from oarlock.server.chat.draft_calls import DraftCalls
from oarlock.server.chat.tool_choice import ToolChoice
from oarlock.server.chat.tool_parsers.call_parser import (
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
    ToolCallStart,
    merged,
)
from oarlock.server.chat.tool_parsers.harmony import HarmonyParser
from oarlock.server.llm.output_processor import Delta

_START, _INSIDE, _BEHIND, _ANSWER = range(4)
TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around a model's thoughts."""

    name: str  # vLLM's
    models: str
    start: str
    end: str
    special: tuple[str, ...] = ()  # tokens inside the marks; without: each mark is one
    aliases: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """Tokens of the marks: they are kept in the answer's text, even where they are special tokens."""
        return self.special or (self.start, self.end)


HARMONY = ReasoningFormat(
    "openai_gptoss", "gpt-oss; its calls and thoughts go together", "<|channel|>analysis<|message|>", "<|end|>"
)  # parsed with the calls
THINK = ReasoningFormat(
    "deepseek_r1", "DeepSeek, Qwen 3, GLM, Kimi and most others", "<think>", "</think>", aliases=("qwen3", "glm45")
)
REASONING_FORMATS: list[ReasoningFormat] = [
    THINK,
    ReasoningFormat("mistral", "Magistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "Seed-OSS", "<seed:think>", "</seed:think>"),
    ReasoningFormat("cohere", "Command A and R7B", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("minimax_m3", "MiniMax-M3", "<mm:think>", "</mm:think>"),
    ReasoningFormat("granite", "Granite 3.2", "Here is my thought process:", "Here is my response:"),
    ReasoningFormat("gemma4", "Gemma 4", "<|channel>thought\n", "<channel|>", special=("<|channel>", "<channel|>")),
]


class ReasoningParser:
    """Parser of one answer's thoughts. Holds back no more than a piece of a mark and the white space before it."""

    def __init__(self, is_open: bool, marks: ReasoningFormat = THINK) -> None:
        """`is_open`: the prompt ends inside the thoughts already."""
        self._start, self._end = marks.start, marks.end
        self._state = _INSIDE if is_open else _START
        self._held = ""  # what may be the beginning of a tag
        self._blank: list[str] = []  # white space that is text only if something else follows
        self._thinks = is_open  # there are thoughts in this answer
        self._began = False  # their first character has come: line ends count from here on
        self._num_undecided = 0
        self.num_tokens = 0  # of the thoughts and their tags

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends inside the thoughts."""
        return self._state == _INSIDE

    def push(self, text: str, num_tokens: int = 0) -> list[MessageEvent]:
        """The events that this piece of text, made of so many tokens, completes."""
        before = self._state
        events: list[MessageEvent] = []
        text, self._held = self._held + text, ""
        for parse in (self._at_start, self._inside, self._behind, self._answer):
            text = parse(text, events)
        if before == _START:
            self._num_undecided += num_tokens
            self.num_tokens = self._num_undecided if self._thinks else 0
        elif before == _INSIDE:
            self.num_tokens += num_tokens
        return merged(events)

    def flush(self) -> list[MessageEvent]:
        """The events of what was held back, when no more text comes."""
        held, blank = self._held, "".join(self._blank)
        self._held, self._blank = "", []
        if self._state == _INSIDE:
            return merged([ReasoningDelta(blank + held)] if held else [])
        return merged([ContentDelta(blank + held if self._state == _START else held)])

    def _at_start(self, text: str, events: list[MessageEvent]) -> str:
        if self._state != _START or not text:
            return text
        words = text.lstrip()
        self._blank.append(text[: len(text) - len(words)])
        if words.startswith(self._start):
            self._state, self._thinks, self._blank = _INSIDE, True, []
            return words[len(self._start) :]
        if self._start.startswith(words):
            self._held = words
            return ""
        self._state = _ANSWER
        events.append(ContentDelta("".join(self._blank)))
        self._blank = []
        return words

    def _inside(self, text: str, events: list[MessageEvent]) -> str:
        if self._state != _INSIDE or not text:
            return text
        end = text.find(self._end)
        thought = text[: end if end >= 0 else len(text) - _partial(text, self._end)]
        self._think(thought, events)
        if end < 0:
            self._held = text[len(thought) :]
            return ""
        self._blank = []
        self._state = _BEHIND
        return text[end + len(self._end) :]

    def _think(self, thought: str, events: list[MessageEvent]) -> None:
        """Emit thoughts without the line ends around them."""
        if not self._began:
            thought = thought.lstrip("\n")
        if not thought:
            return
        self._began = True
        words = thought.rstrip("\n")
        if words:
            events.append(ReasoningDelta("".join(self._blank) + words))
            self._blank = []
        self._blank.append(thought[len(words) :])

    def _behind(self, text: str, events: list[MessageEvent]) -> str:
        if self._state != _BEHIND:
            return text
        text = text.lstrip("\n")
        if text:
            self._state = _ANSWER
        return text

    def _answer(self, text: str, events: list[MessageEvent]) -> str:
        if self._state == _ANSWER and text:
            events.append(ContentDelta(text))
        return ""


def _partial(text: str, mark: str) -> int:
    """Number of characters at the end of `text` that may begin the closing mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


def formats_as_markdown() -> str:
    """Table of the reasoning formats for the documentation."""
    rows = ["| `--reasoning-parser` | models | thoughts |", "|---|---|---|"]
    for known in [*REASONING_FORMATS, HARMONY]:
        names = ", ".join(f"`{name}`" for name in (known.name, *known.aliases))
        written = f"{known.start}…{known.end}".replace("|", "\\|").replace("\n", "↵")
        rows.append(f"| {names} | {known.models} | `{written}` |")
    return "\n".join(rows) + "\n"


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """Parts that an answer may have beside plain text: thoughts, tool calls, messages of Harmony."""

    may_think: bool = False
    is_thinking: bool = False
    tool_choice: ToolChoice | None = None
    reasoning: ReasoningFormat = THINK
    harmony: str | None = None  # for answers in Harmony: what the prompt holds of this one

    @property
    def is_plain(self) -> bool:
        """Whether the text of the answer is its content, with nothing to parse."""
        return not (self.may_think or self.is_thinking or self.tool_choice or self.harmony is not None)


class MessageParser:
    """One choice's message as it grows."""

    def __init__(self, shape: AnswerShape, *, in_items: bool = False) -> None:
        """`in_items`: thoughts, texts and calls are shown in the order that they came in, not one text of each kind."""
        thinks = (shape.may_think or shape.is_thinking) and shape.harmony is None
        choice = shape.tool_choice
        self._reasoning_parser = ReasoningParser(shape.is_thinking, shape.reasoning) if thinks else None
        self._tool_parser = choice.parser() if choice else None
        self._drafts = DraftCalls(choice.parser(parallel=True)) if choice and thinks else None
        self._thought_tokens = 0  # where the reasoning parser does not count them, and corrections of its count
        if shape.harmony is not None:
            messages = self._tool_parser if isinstance(self._tool_parser, HarmonyParser) else HarmonyParser({})
            messages.thoughts = ReasoningDelta if shape.may_think else ContentDelta
            messages.in_items = in_items
            messages.push(shape.harmony)
            self._tool_parser = messages
        self._choice = choice
        self._is_named = choice is not None and choice.is_named
        self._only_calls = choice is not None and choice.must_call
        self._num_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, its tags included."""
        return self._thought_tokens + (self._reasoning_parser.num_tokens if self._reasoning_parser else 0)

    def push(self, delta: Delta) -> list[MessageEvent]:
        """The events that one piece of the choice's text completes."""
        if delta.read is not None:  # stop strings needed them already
            self._thought_tokens = delta.read.reasoning_tokens
            self._num_calls += sum(isinstance(event, ToolCallStart) for event in delta.read.events)
            return merged(delta.read.events)
        is_ended = delta.finish_reason == FinishReason.STOP.value and delta.stop_reason is None
        return self.read(delta.text, delta.num_tokens, is_last=delta.finish_reason is not None, is_ended=is_ended)

    def read(self, text: str, num_tokens: int, *, is_last: bool, is_ended: bool = False) -> list[MessageEvent]:
        """The events that a piece of text, made of so many tokens, completes.

        `is_last`: no more text comes. `is_ended`: the model itself has ended its answer.
        """
        events: list[MessageEvent] = [ContentDelta(text)]
        if self._reasoning_parser is not None:
            events = self._reasoning_parser.push(text, num_tokens)
            if is_last:
                events = merged([*events, *self._reasoning_parser.flush()])
            if self._drafts is not None:
                events = self._without_drafts(self._reasoning_parser, self._drafts, events, num_tokens, is_last)
        if self._tool_parser is not None:
            parsed: list[MessageEvent] = []
            for event in events:
                parsed += self._tool_parser.push(event.text) if isinstance(event, ContentDelta) else [event]
            if is_last:
                parsed += self._tool_parser.flush(is_ended)
            if any(isinstance(event, ReasoningDelta) for event in parsed) and self._reasoning_parser is None:
                self._thought_tokens += num_tokens
            # Where calls are forced, the rest is their packing, or the beginning of one that was cut short.
            events = [event for event in parsed if not (self._only_calls and isinstance(event, ContentDelta))]
        return merged(map(self._counted, events))

    def _without_drafts(
        self,
        reasoning: ReasoningParser,
        drafts: DraftCalls,
        events: list[MessageEvent],
        num_tokens: int,
        is_last: bool,
    ) -> list[MessageEvent]:
        """Hold back calls inside the thoughts; those with which the answer ends become its text."""
        kept: list[MessageEvent] = []
        for event in events:
            if isinstance(event, ReasoningDelta):
                kept.append(ReasoningDelta(drafts.push(event.text, num_tokens)))
            else:
                kept += [ReasoningDelta(drafts.close()), event]
        if is_last and reasoning.is_inside:
            self._thought_tokens -= drafts.held_tokens
            thoughts, calls = drafts.end()
            kept += [ReasoningDelta(thoughts), ContentDelta(calls)]
        elif not reasoning.is_inside:
            kept.append(ReasoningDelta(drafts.close()))
        return merged(kept)

    def _counted(self, event: MessageEvent) -> MessageEvent:
        """Count a call, and give it its id where the model's template needs one of its own notation."""
        if not isinstance(event, ToolCallStart):
            return event
        self._num_calls += 1
        return event if self._choice is None else self._choice.with_id(event, self._num_calls - 1)

    def finish_reason(self, delta: Delta) -> str | None:
        """Finish reason of the message: `tool_calls` if it has calls, is not cut short, and no function was named."""
        called = self._num_calls > 0 and not self._is_named
        return TOOL_CALLS if called and delta.finish_reason == FinishReason.STOP.value else delta.finish_reason
