"""The Llama 3 format: `{"name": …, "parameters": {…}}`, bare or behind `<|python_tag|>`."""

from collections.abc import Sequence

from oarlock.server.chat.events import ContentDelta, MessageEvent
from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import CallParser, CallReader, Tools
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema

TAG = "<|python_tag|>"


class LlamaToolParser(ToolParser):
    """A call as the whole answer, or behind the tag; `;` separates several."""

    DELIMITERS = (TAG,)

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        super().__init__(tools, parallel)
        self._searching = False
        self._tag_size = 0  # characters of the tag that the attempt ends with
        self._any_call = False

    def _reader(self, delimiter: str) -> CallReader:
        return CallParser(self._tools)

    def _on_character(self, character: str, events: list[MessageEvent]) -> bool:
        if self._call is None:
            return self._before_call(character, events)
        consumed = self._follow_call(self._call, character, events)
        if consumed and self._searching and self._sink is ContentDelta:
            self._searching = False  # complete: another may follow
            self._any_call = True
        return consumed

    def _before_call(self, character: str, events: list[MessageEvent]) -> bool:
        """At the start, or behind a call: only white space, a separator, the tag or a brace may come."""
        if character == TAG[self._tag_size]:
            self._tag_size += 1
            self._attempt.append(character)
            if self._tag_size == len(TAG):
                self._tag_size = 0
                self._begin_call("".join(self._attempt), self._reader(TAG))
            return True
        if self._tag_size:
            self._tag_size = 0
            return self._give_up(events)
        if character.isspace() or (character == ";" and self._any_call and ";" not in self._attempt):
            self._attempt.append(character)
            return True
        if character != "{":
            return self._give_up(events)
        self._begin_call("".join(self._attempt), self._reader(TAG))
        return False


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Rules for one forced call as a bare object: the model was not trained to write several."""
    return "\n".join(["calls: call", *grammar.call_objects(tools, "parameters")])


def _optional_calls(special_ids: SpecialIds) -> tuple[str, str]:
    """An answer that begins with a brace is a call."""
    before = f"<[{special_ids[TAG]}]>? " if TAG in special_ids else ""
    return "(words | tagged)", f"tagged: {before}calls\nwords: /([^{{](?s:.*))?/"


def _matches(template: str) -> bool:
    is_llama = "python_tag" in template or "<|start_header_id|>" in template
    return is_llama and '"parameters"' in template and "<tool_call>" not in template


LLAMA = ToolFormat(
    name="llama3",
    models="Llama 3",
    example='{"name": "f", "parameters": {"a": "x"}}',
    aliases=("llama3_json", "llama4_json"),
    parser=LlamaToolParser,
    delimiters=(TAG,),
    matches=_matches,
    forced_calls=_forced_calls,
    optional_calls=_optional_calls,
)
