"""The Mistral formats: `[TOOL_CALLS]` and a list of objects, or, in newer models, `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from server.chat.events import ContentDelta, MessageEvent
from server.chat.tool_parsers import grammar
from server.chat.tool_parsers.base import ToolFormat, ToolParser
from server.chat.tool_parsers.grammar import SpecialIds, ToolSchema

START, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralToolParser(ToolParser):
    """Both formats: a list of calls behind one delimiter, or a delimiter before each call."""

    DELIMITERS = (START,)
    _TAGS = (ARGS, CALL_ID)

    def __init__(self, names: Collection[str], parallel: bool = True) -> None:
        super().__init__(names, parallel)
        # Between the delimiter and the call: takes the next character, False where it cannot come there.
        self._accept: Callable[[str], bool] = self._head
        self._name = ""
        self._tag = ""
        self._in_list = False

    def _on_delimiter(self, delimiter: str, events: list[MessageEvent]) -> None:
        self._searching = self._in_list = False
        self._attempt = [delimiter]
        self._name = self._tag = ""
        self._accept = self._head

    def _on_character(self, character: str, events: list[MessageEvent]) -> bool:
        if self._call is not None:
            consumed = self._follow_call(self._call, character, events)
            if consumed and self._searching and self._sink is ContentDelta and self._in_list:
                self._searching = False
            return consumed
        if not self._accept(character):
            return self._give_up(events)
        if self._call is not None:
            return False  # the brace is the call's first character
        self._attempt.append(character)
        if self._searching:  # the list is closed: its brackets were packing
            self._attempt = []
        return True

    def _head(self, character: str) -> bool:
        if character == "[":
            self._in_list, self._accept = True, self._list
        elif character == "{":
            self._begin_call("".join(self._attempt))
        elif _is_name(character):
            self._name, self._accept = character, self._after_name
        return character.isspace() or character in "[{" or _is_name(character)

    def _list(self, character: str) -> bool:
        if character == "{":
            self._begin_call("".join(self._attempt))
        elif character == "]":
            self._searching = True
        return character.isspace() or character in "{],"

    def _after_name(self, character: str) -> bool:
        """The name, and then its arguments, or a tag."""
        if _is_name(character) and self._attempt[-1] == self._name[-1]:
            self._name += character
            return True
        return character.isspace() or self._tag_or_arguments(character)

    def _tag_or_arguments(self, character: str) -> bool:
        if character == "[":
            self._tag, self._accept = character, self._in_tag
            return True
        if character != "{" or self._name not in self._names:
            return False
        self._begin_call("".join(self._attempt), self._name)
        return True

    def _in_tag(self, character: str) -> bool:
        self._tag += character
        if self._tag in self._TAGS:
            self._accept = self._after_call_id if self._tag == CALL_ID else self._arguments
        return any(tag.startswith(self._tag) for tag in self._TAGS)

    def _after_call_id(self, character: str) -> bool:
        return character.isalnum() or character.isspace() or self._tag_or_arguments(character)

    def _arguments(self, character: str) -> bool:
        return character.isspace() or (character == "{" and self._tag_or_arguments(character))


def _is_name(character: str) -> bool:
    return character.isalnum() or character in "_-.:/"


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """A list behind the delimiter."""
    more = f' (", " call){{0,{most - 1}}}' if most > 1 else ""
    rules = [f"calls: {grammar.delimiter(START, special_ids)} tail", f'tail: "[" call{more} "]"']
    return "\n".join([*rules, *grammar.call_objects(tools, "arguments")])


def _forced_named_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Delimiter, name, delimiter, arguments; as often as there are calls."""
    start, between = grammar.delimiter(START, special_ids), grammar.delimiter(ARGS, special_ids)
    more = f" ({start} call){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"call_{i}: {grammar.literal(name)} {between} args_{i}" for i, (name, _) in enumerate(tools)]
    heads = [f"calls: {start} tail", f"tail: call{more}", grammar.one_of_calls(tools)]
    return "\n".join([*heads, *rules, *grammar.arguments(tools)])


MISTRAL = ToolFormat(
    name="mistral",
    parser=MistralToolParser,
    delimiters=(START,),
    matches=lambda template: START in template and ARGS not in template,
    forced_calls=_forced_calls,
    optional_calls=partial(grammar.text_then_calls, START),
    short_call_ids=True,
)
MISTRAL_NAMED = replace(
    MISTRAL,
    name="mistral_named",
    delimiters=(START, ARGS, CALL_ID),
    matches=lambda template: START in template and ARGS in template,
    forced_calls=_forced_named_calls,
)
