"""Separates what a model thinks (`<think>…</think>`) from what it answers, piece by piece.

Line ends next to the tags belong to the tags, as templates write them. `<think>` anywhere but at the start is text.
Some models use other marks (`FORMATS`). Whether a model uses any is found out in `prompt.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from oarlock.server.chat.events import ContentDelta, MessageEvent, ReasoningDelta, merged

_START, _INSIDE, _BEHIND, _ANSWER = range(4)


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
FORMATS: list[ReasoningFormat] = [
    THINK,
    ReasoningFormat("mistral", "Magistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "Seed-OSS", "<seed:think>", "</seed:think>"),
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


def as_markdown() -> str:
    """Table of the reasoning formats for the documentation."""
    rows = ["| `--reasoning-parser` | models | thoughts |", "|---|---|---|"]
    for known in [*FORMATS, HARMONY]:
        names = ", ".join(f"`{name}`" for name in (known.name, *known.aliases))
        written = f"{known.start}…{known.end}".replace("|", "\\|").replace("\n", "↵")
        rows.append(f"| {names} | {known.models} | `{written}` |")
    return "\n".join(rows) + "\n"
