"""Parser of a choice's text into a message: reasoning, content, tool calls and the finish reason.

Streams and complete responses use the same parser, so they cannot differ. Line ends next to the reasoning tags
(`<think>…</think>`) belong to the tags, as templates write them. `<think>` is plain text unless it is at the start.
Some models use other tags (`REASONING_FORMATS`), and some write tags around the response after it. `prompt.py`
determines whether a model reasons, and `reasoning_detection.py` how.
"""

from dataclasses import dataclass

from oarlock.engine.types import FinishReason
from oarlock.server.chat.answer_parser import AnswerParser, AnswerTags
from oarlock.server.chat.draft_calls import DraftCalls
from oarlock.server.chat.tool_choice import RequestTools
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
    """Tags around a model's reasoning."""

    name: str  # vLLM's name
    models: str
    start: str
    end: str
    special: tuple[str, ...] = ()  # special tokens inside the tags; empty: each tag is one token
    aliases: tuple[str, ...] = ()
    answer: AnswerTags | None = None
    signs: tuple[str, ...] = ()  # texts, one of which distinguishes its templates from those of an equal format

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags, of the reasoning and of the response."""
        return (self.start, self.end, *self.answer_tokens)

    @property
    def answer_tokens(self) -> tuple[str, ...]:
        """Tokens of the tags around the response, if there are any."""
        return (self.answer.start, self.answer.end) if self.answer is not None else ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """Tokens of the reasoning tags; they stay in the output text even if they are special tokens."""
        return self.special or (self.start, self.end)


HARMONY = ReasoningFormat(
    "openai_gptoss", "gpt-oss; reads tool calls and reasoning together", "<|channel|>analysis<|message|>", "<|end|>"
)  # Harmony's calls and reasoning share one parser
THINK = ReasoningFormat(
    "deepseek_r1",
    "DeepSeek, Qwen 3, GLM, Kimi, SmolLM3, OLMo 3, EXAONE 4, MiniMax-M2, Nemotron 3 and most others",
    "<think>",
    "</think>",
    aliases=("qwen3", "glm45", "olmo3", "minimax_m2"),
)
REASONING_FORMATS: list[ReasoningFormat] = [
    ReasoningFormat(
        "hunyuan_a13b",
        "Hunyuan",
        "<think>",
        "</think>",
        answer=AnswerTags("<answer>", "</answer>", speaker="\u52a9\u624b\uff1a"),
        signs=("<answer>", "<|extra_0|>"),
    ),
    ReasoningFormat(
        "ernie45",
        "Ernie 4.5 Thinking, Granite 3.3",
        "<think>",
        "</think>",
        answer=AnswerTags("<response>", "</response>"),
        signs=("<response></response>",),
    ),
    THINK,
    ReasoningFormat("hy_v3", "Hunyuan 3", "<think:opensource>", "</think:opensource>"),
    ReasoningFormat("mistral", "Magistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "Seed-OSS", "<seed:think>", "</seed:think>"),
    ReasoningFormat("cohere", "Command A and R7B", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("minimax_m3", "MiniMax-M3", "<mm:think>", "</mm:think>"),
    ReasoningFormat("granite", "Granite 3.2", "Here is my thought process:", "Here is my response:"),
    ReasoningFormat("gemma4", "Gemma 4", "<|channel>thought\n", "<channel|>", special=("<|channel>", "<channel|>")),
]


class ReasoningParser:
    """Parser of one output's reasoning. Holds back only a partial tag and the white space before it."""

    def __init__(self, is_open: bool, marks: ReasoningFormat = THINK) -> None:
        """`is_open`: the prompt ends inside the reasoning."""
        self._start, self._end = marks.start, marks.end
        self._state = _INSIDE if is_open else _START
        self._held = ""  # possible start of a tag
        self._blank: list[str] = []  # white space that is part of the text only if other characters follow
        self._thinks = is_open  # this output contains reasoning
        self._began = False  # the first reasoning character has been seen: line ends are text from here on
        self._num_undecided = 0
        self.num_tokens = 0  # number of tokens in the reasoning and its tags

    @property
    def is_inside(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._state == _INSIDE

    def push(self, text: str, num_tokens: int = 0) -> list[MessageEvent]:
        """Return the events that this piece of text of `num_tokens` tokens completes."""
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
        """Return the events of the text that was held back, at the end of the output."""
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
        reasoning = text[: end if end >= 0 else len(text) - _partial(text, self._end)]
        self._push_reasoning(reasoning, events)
        if end < 0:
            self._held = text[len(reasoning) :]
            return ""
        self._blank = []
        self._state = _BEHIND
        return text[end + len(self._end) :]

    def _push_reasoning(self, reasoning: str, events: list[MessageEvent]) -> None:
        """Emit reasoning without leading and trailing line ends."""
        if not self._began:
            reasoning = reasoning.lstrip("\n")
        if not reasoning:
            return
        self._began = True
        words = reasoning.rstrip("\n")
        if words:
            events.append(ReasoningDelta("".join(self._blank) + words))
            self._blank = []
        self._blank.append(reasoning[len(words) :])

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
    """Return the number of characters at the end of `text` that may begin the closing tag."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


def formats_as_markdown() -> str:
    """Return the table of reasoning formats for the documentation."""
    rows = ["| `--reasoning-parser` | models | reasoning |", "|---|---|---|"]
    for known in [*REASONING_FORMATS, HARMONY]:
        names = ", ".join(f"`{name}`" for name in (known.name, *known.aliases))
        response = "…".join(known.answer_tokens)
        written = f"{known.start}…{known.end}{response}".replace("|", "\\|").replace("\n", "↵")
        rows.append(f"| {names} | {known.models} | `{written}` |")
    return "\n".join(rows) + "\n"


@dataclass(frozen=True, slots=True)
class MessageShape:
    """Parts that a response may have besides plain text: reasoning, tool calls, Harmony messages."""

    may_think: bool = False
    is_thinking: bool = False
    tool_choice: RequestTools | None = None
    reasoning: ReasoningFormat = THINK
    harmony: str | None = None  # Harmony only: the part of the assistant message that the prompt contains

    @property
    def is_plain(self) -> bool:
        """Whether the text of the output is its content, with nothing to parse."""
        has_tags = self.may_think or self.is_thinking or self.reasoning.answer is not None
        return not (has_tags or self.tool_choice or self.harmony is not None)


class MessageParser:
    """Incremental parser of one choice's message."""

    def __init__(self, shape: MessageShape, *, in_items: bool = False) -> None:
        """`in_items`: keep reasoning, texts and calls in the order of the output instead of one text per kind."""
        thinks = (shape.may_think or shape.is_thinking) and shape.harmony is None
        choice = shape.tool_choice
        self._reasoning_parser = ReasoningParser(shape.is_thinking, shape.reasoning) if thinks else None
        answer = shape.reasoning.answer if shape.harmony is None else None
        self._answer_parser = AnswerParser(answer) if answer is not None else None
        self._tool_parser = choice.parser() if choice else None
        self._drafts = DraftCalls(choice.parser(parallel=True)) if choice and thinks else None
        self._thought_tokens = 0  # reasoning tokens not counted by the reasoning parser, and corrections of its count
        if shape.harmony is not None:
            messages = self._tool_parser if isinstance(self._tool_parser, HarmonyParser) else HarmonyParser({})
            messages.reasoning_type = ReasoningDelta if shape.may_think else ContentDelta
            messages.in_items = in_items
            messages.push(shape.harmony)
            self._tool_parser = messages
        self._choice = choice
        self._is_named = choice is not None and choice.is_named
        self._only_calls = choice is not None and choice.must_call
        self._num_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far, including the tags."""
        return self._thought_tokens + (self._reasoning_parser.num_tokens if self._reasoning_parser else 0)

    def push(self, delta: Delta) -> list[MessageEvent]:
        """Return the events that one piece of the choice's text completes."""
        if delta.read is not None:  # the stop-string check has already parsed this piece
            self._thought_tokens = delta.read.reasoning_tokens
            self._num_calls += sum(isinstance(event, ToolCallStart) for event in delta.read.events)
            return merged(delta.read.events)
        is_ended = delta.finish_reason == FinishReason.STOP.value and delta.stop_reason is None
        return self.read(delta.text, delta.num_tokens, is_last=delta.finish_reason is not None, is_ended=is_ended)

    def read(self, text: str, num_tokens: int, *, is_last: bool, is_ended: bool = False) -> list[MessageEvent]:
        """Return the events that a piece of text of `num_tokens` tokens completes.

        `is_last`: no more text follows. `is_ended`: the model itself has ended its output.
        """
        events: list[MessageEvent] = [ContentDelta(text)]
        if self._reasoning_parser is not None:
            events = self._reasoning_parser.push(text, num_tokens)
            if is_last:
                events = merged([*events, *self._reasoning_parser.flush()])
            if self._drafts is not None:
                events = self._without_drafts(self._reasoning_parser, self._drafts, events, num_tokens, is_last)
        if self._answer_parser is not None:
            answer = self._answer_parser
            events = [ContentDelta(answer.push(e.text)) if isinstance(e, ContentDelta) else e for e in events]
            if is_last:
                events.append(ContentDelta(answer.flush()))
        if self._tool_parser is not None:
            parsed: list[MessageEvent] = []
            for event in events:
                parsed += self._tool_parser.push(event.text) if isinstance(event, ContentDelta) else [event]
            if is_last:
                parsed += self._tool_parser.flush(is_ended)
            if any(isinstance(event, ReasoningDelta) for event in parsed) and self._reasoning_parser is None:
                self._thought_tokens += num_tokens
            # If calls are forced, other content is white space and tags around them, or a truncated call.
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
        """Hold back calls inside the reasoning; calls at the end of the output become its content."""
        kept: list[MessageEvent] = []
        for event in events:
            if isinstance(event, ReasoningDelta):
                kept.append(ReasoningDelta(drafts.push(event.text, num_tokens)))
            else:
                kept += [ReasoningDelta(drafts.close()), event]
        if is_last and reasoning.is_inside:
            self._thought_tokens -= drafts.held_tokens
            reasoning_text, calls = drafts.end()
            kept += [ReasoningDelta(reasoning_text), ContentDelta(calls)]
        elif not reasoning.is_inside:
            kept.append(ReasoningDelta(drafts.close()))
        return merged(kept)

    def _counted(self, event: MessageEvent) -> MessageEvent:
        """Count a call, and replace its id if the model's template uses its own id notation."""
        if not isinstance(event, ToolCallStart):
            return event
        self._num_calls += 1
        return event if self._choice is None else self._choice.with_id(event, self._num_calls - 1)

    def finish_reason(self, delta: Delta) -> str | None:
        """Return the finish reason: `tool_calls` if there are calls, no function was named, and it is not cut short."""
        called = self._num_calls > 0 and not self._is_named
        return TOOL_CALLS if called and delta.finish_reason == FinishReason.STOP.value else delta.finish_reason
