"""The Mistral formats: `[TOOL_CALLS]` and a list of objects, or, in newer models, `[TOOL_CALLS]name[ARGS]{…}`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat
from oarlock.server.chat.tool_parsers.call_parser import CallParser, Tools
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema
from oarlock.server.chat.tool_parsers.json_list import JsonListToolParser, forced_list

START, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralToolParser(JsonListToolParser):
    """Both formats: a list of calls behind one delimiter, or a delimiter before each call."""

    DELIMITERS = (START,)
    _TAGS = (ARGS, CALL_ID)

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        super().__init__(tools, parallel)
        self._name = ""
        self._tag = ""

    def _head(self, character: str) -> bool:
        if _is_name(character):
            self._name, self._accept = character, self._after_name
            return True
        return super()._head(character)

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
        if character != "{" or self._name not in self._tools:
            return False
        self._begin_call("".join(self._attempt), CallParser(self._tools, self._name))
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


def _forced_named_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Rules for forced calls: delimiter, name, delimiter and arguments of each."""
    start, between = grammar.delimiter(START, special_ids), grammar.delimiter(ARGS, special_ids)
    more = f" ({start} call){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"call_{i}: {grammar.literal(name)} {between} args_{i}" for i, (name, _) in enumerate(tools)]
    heads = [f"calls: {start} tail", f"tail: call{more}", grammar.one_of_calls(tools)]
    return "\n".join([*heads, *rules, *grammar.arguments(tools)])


MISTRAL = ToolFormat(
    name="mistral",
    models="Mistral, until 2024",
    example='[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}]',
    parser=MistralToolParser,
    delimiters=(START,),
    matches=lambda template: START in template and ARGS not in template,
    forced_calls=partial(forced_list, START),
    optional_calls=partial(grammar.text_then_calls, START),
    short_call_ids=True,
)
MISTRAL_NAMED = replace(
    MISTRAL,
    name="mistral_named",
    models="Mistral, since 2025",
    example='[TOOL_CALLS]f[ARGS]{"a": "x"}',
    delimiters=(START, ARGS, CALL_ID),
    matches=lambda template: START in template and ARGS in template,
    forced_calls=_forced_named_calls,
)
