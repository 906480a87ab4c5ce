"""The Llama 3 and the Mistral way of writing calls, as readers.

Knows their marks and separators; everything else is `readers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from server.chat.events import Content, Event
from server.chat.tool_parsers.base import ToolParser


class LlamaToolParser(ToolParser):
    """`{"name": …, "parameters": {…}}` as the whole answer, or behind `<|python_tag|>`; several are cut by `;`."""

    MARKS = ("<|python_tag|>",)

    def __init__(self, names: Collection[str], parallel: bool = True) -> None:
        super().__init__(names, parallel)
        self._searching = False
        self._tag_size = 0  # how much of the mark the attempt ends with
        self._any_call = False

    def _mark(self, mark: str, events: list[Event]) -> None:
        self._begin_call(mark)

    def _step(self, character: str, events: list[Event]) -> bool:
        if self._call is None:
            return self._before_call(character, events)
        taken = self._step_call(self._call, character, events)
        if taken and self._searching and self._sink is Content:
            self._searching = False  # complete: another may follow
            self._any_call = True
        return taken

    def _before_call(self, character: str, events: list[Event]) -> bool:
        """At the start, or behind a call: only a separator, the mark or a brace may come."""
        tag = self.MARKS[0]
        if character == tag[self._tag_size]:
            self._tag_size += 1
            self._attempt.append(character)
            if self._tag_size == len(tag):
                self._tag_size = 0
                self._begin_call("".join(self._attempt))
            return True
        if self._tag_size:
            return self._give_up(events)
        if character.isspace() or (character == ";" and self._any_call and ";" not in self._attempt):
            self._attempt.append(character)
            return True
        if character != "{":
            return self._give_up(events)
        self._begin_call("".join(self._attempt))
        return False


class MistralToolParser(ToolParser):
    """`[TOOL_CALLS]` and then a list of objects, or `name[ARGS]{…}` with one mark per call."""

    MARKS = ("[TOOL_CALLS]",)
    _TAGS = ("[ARGS]", "[CALL_ID]")

    def __init__(self, names: Collection[str], parallel: bool = True) -> None:
        super().__init__(names, parallel)
        self._place: Callable[[str], bool] = self._head  # what may come between the mark and the call
        self._name = ""
        self._tag = ""
        self._in_list = False

    def _mark(self, mark: str, events: list[Event]) -> None:
        self._searching = self._in_list = False
        self._attempt = [mark]
        self._name = self._tag = ""
        self._place = self._head

    def _step(self, character: str, events: list[Event]) -> bool:
        if self._call is not None:
            taken = self._step_call(self._call, character, events)
            if taken and self._searching and self._sink is Content and self._in_list:
                self._searching = False
            return taken
        if not self._place(character):
            return self._give_up(events)
        if self._call is not None:
            return False  # the brace is the call's first character
        self._attempt.append(character)
        if self._searching:  # the list is closed: its brackets were packing
            self._attempt = []
        return True

    def _head(self, character: str) -> bool:
        if character == "[":
            self._in_list, self._place = True, self._list
        elif character == "{":
            self._begin_call("".join(self._attempt))
        elif _is_name(character):
            self._name, self._place = character, self._after_name
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
            self._tag, self._place = character, self._in_tag
            return True
        if character != "{" or self._name not in self._names:
            return False
        self._begin_call("".join(self._attempt), self._name)
        return True

    def _in_tag(self, character: str) -> bool:
        self._tag += character
        if self._tag in self._TAGS:
            self._place = self._after_call_id if self._tag == "[CALL_ID]" else self._arguments
        return any(tag.startswith(self._tag) for tag in self._TAGS)

    def _after_call_id(self, character: str) -> bool:
        return character.isalnum() or character.isspace() or self._tag_or_arguments(character)

    def _arguments(self, character: str) -> bool:
        return character.isspace() or (character == "{" and self._tag_or_arguments(character))


def _is_name(character: str) -> bool:
    return character.isalnum() or character in "_-.:/"
