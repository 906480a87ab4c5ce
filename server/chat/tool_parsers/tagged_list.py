"""JSON calls between a model's own tags: Apriel, Hunyuan, MiniMax-M1, Nemotron, GigaChat, Cohere and Apertus.

They differ in the tags, in the names of an object's members, and in whether the calls form a list.
"""

from collections.abc import Sequence
from functools import partial

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat
from oarlock.server.chat.tool_parsers.call_parser import (
    CallParser,
    CallReader,
    ContentDelta,
    MessageEvent,
    NoCallError,
    Tools,
)
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema, delimiter, literal
from oarlock.server.chat.tool_parsers.json_list import JsonListToolParser


class TaggedListToolParser(JsonListToolParser):
    """Parser of a list of calls between two tags, or of consecutive objects."""

    def _on_character(self, character: str, events: list[MessageEvent]) -> bool:
        was_inside = self._call is not None
        consumed = super()._on_character(character, events)
        if was_inside and self._call is None and self._searching and consumed and self._sink is ContentDelta:
            self._searching, self._accept = False, self._list  # another object may follow without brackets
        return consumed


class AprielToolParser(TaggedListToolParser):
    """Parser of lists between `<tool_calls>` tags."""

    DELIMITERS = ("<tool_calls>", "</tool_calls>")
    CLOSING = DELIMITERS[1:]


class NemotronToolParser(TaggedListToolParser):
    """Parser of lists between `<TOOLCALL>` tags."""

    DELIMITERS = ("<TOOLCALL>", "</TOOLCALL>")
    CLOSING = DELIMITERS[1:]


class GigaChatToolParser(TaggedListToolParser):
    """Parser of one object after a token."""

    DELIMITERS = ("<|function_call|>",)


class CohereToolParser(TaggedListToolParser):
    """Parser of lists of actions between tokens."""

    DELIMITERS = ("<|START_ACTION|>", "<|END_ACTION|>")
    CLOSING = DELIMITERS[1:]


class CommandRToolParser(TaggedListToolParser):
    """Parser of a list of actions in a fenced block after a word."""

    DELIMITERS = ("Action:", "```")
    CLOSING = DELIMITERS[1:]
    FENCE = "```json"

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        super().__init__(tools, parallel)
        self._fence_size = 0  # characters of the fence that have been read

    def _on_delimiter(self, delimiter: str, events: list[MessageEvent]) -> None:
        self._fence_size = 0
        super()._on_delimiter(delimiter, events)

    def _head(self, character: str) -> bool:
        if character == self.FENCE[self._fence_size : self._fence_size + 1]:
            self._fence_size += 1
            return True
        return super()._head(character)


class ApertusCall(CallParser):
    """Reader of an object whose only member is the function with its arguments: `{"f": {…}}`."""

    def _begin_value(self, character: str, events: list[MessageEvent]) -> None:
        if self._name is None:
            if self._scanner.key not in self._tools or character != "{":
                raise NoCallError
            self._name = self._scanner.key
            self._streams = True


class ApertusToolParser(TaggedListToolParser):
    """Parser of lists of `ApertusCall` objects between tokens."""

    DELIMITERS = ("<|tools_prefix|>", "<|tools_suffix|>")
    CLOSING = DELIMITERS[1:]

    def _reader(self, delimiter: str) -> CallReader:
        return ApertusCall(self._tools)


def _objects(style: str, tools: Sequence[ToolSchema]) -> list[str]:
    """Return rules for `call`: an object with the members of this style."""
    if style == "apertus":
        heads = [f'{{"{name}": ' for name, _ in tools]
    elif style == "cohere":
        heads = [f'{{"tool_name": "{name}", "parameters": ' for name, _ in tools]
    else:
        heads = [f'{{"name": "{name}", "arguments": ' for name, _ in tools]
    rules = [f"call_{i}: {literal(head)} args_{i} {literal('}')}" for i, head in enumerate(heads)]
    return [grammar.one_of_calls(tools), *rules, *grammar.arguments(tools)]


def _forced_calls(
    parser: type[TaggedListToolParser],
    style: str,
    brackets: tuple[str, str, str],
    tools: Sequence[ToolSchema],
    most: int,
    special_ids: SpecialIds,
) -> str:
    """Return rules for forced calls. `brackets`: text before the first call, between calls, and after the last call."""
    first, between, last = brackets
    start = delimiter(parser.DELIMITERS[0], special_ids)
    end = f" {delimiter(parser.CLOSING[0], special_ids)}" if parser.CLOSING else ""
    more = f" ({literal(between)} call){{0,{most - 1}}}" if most > 1 and between else ""
    before, behind = (f"{literal(text)} " if text else "" for text in (first, last))
    rules = [f"calls: {start} tail", f"tail: {before}call{more} {behind}{end}"]
    return "\n".join([*rules, *_objects(style, tools)])


_LIST = ("[", ", ", "]")


def _format(
    name: str,
    models: str,
    parser: type[TaggedListToolParser],
    *,
    style: str = "plain",
    brackets: tuple[str, str, str] = _LIST,
    aliases: tuple[str, ...] = (),
    needs: str = "",
) -> ToolFormat:
    first, _, last = brackets
    members = {"apertus": '{"f": {"a": "x"}}', "cohere": '{"tool_name": "f", "parameters": {"a": "x"}}'}
    call = members.get(style, '{"name": "f", "arguments": {"a": "x"}}')
    return ToolFormat(
        name=name,
        models=models,
        example=f"{parser.DELIMITERS[0]}{first}{call}{last}{''.join(parser.CLOSING)}",
        aliases=aliases,
        parser=parser,
        delimiters=tuple(text for text in parser.DELIMITERS if text.startswith("<")),
        forced_calls=partial(_forced_calls, parser, style, brackets),
        optional_calls=partial(grammar.text_then_calls, parser.DELIMITERS[0]),
        needs=needs,
    )


APRIEL = _format("apriel", "Apriel, Hunyuan A13B", AprielToolParser, aliases=("hunyuan_a13b",), needs="<tool_calls>[")
MINIMAX = _format("minimax", "MiniMax-M1", AprielToolParser, brackets=("\n", "\n", "\n"))
NEMOTRON = _format("nemotron_json", "Nemotron Nano 2", NemotronToolParser)
GIGACHAT = _format("gigachat3", "GigaChat 3.1", GigaChatToolParser, brackets=("", "", ""))
COHERE = _format("cohere", "Command R7B and A", CohereToolParser, style="cohere", aliases=("cohere_command",))
COMMAND_R = _format(
    "command_r", "Command R and R+", CommandRToolParser, style="cohere", brackets=("\n```json\n[\n", ",\n", "\n]")
)
APERTUS = _format("apertus", "Apertus", ApertusToolParser, style="apertus")
