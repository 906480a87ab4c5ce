"""Functionary's calls, since its version 3.1: `<function=f>{…}</function>`."""

from collections.abc import Sequence
from functools import partial

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import CallReader, CallScript, Steps
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema, delimiter, literal

_START, _END = "<function=", "</function>"


class FunctionTagCall(CallScript):
    """Reader of `f>{…}`."""

    def _read(self) -> Steps:
        name = yield from self._word()
        yield from self._one_of(">")
        yield from self._json_arguments(name)


class FunctionaryToolParser(ToolParser):
    """Parser of calls between tags."""

    DELIMITERS = (_START, _END)
    CLOSING = (_END,)

    def _reader(self, delimiter: str) -> CallReader:
        return FunctionTagCall(self._tools)


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for consecutive forced calls."""
    opening, closing = delimiter(_START, special_ids), delimiter(_END, special_ids)
    more = f" ({opening} call){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"calls: {opening} tail", f"tail: call{more}", grammar.one_of_calls(tools)]
    rules += [f"call_{i}: {literal(name + '>')} args_{i} {closing}" for i, (name, _) in enumerate(tools)]
    return "\n".join([*rules, *grammar.arguments(tools)])


FUNCTIONARY = ToolFormat(
    name="functionary_v3_1",
    models="Functionary 3.1",
    example='<function=f>{"a": "x"}</function>',
    parser=FunctionaryToolParser,
    delimiters=(_START, _END),
    forced_calls=_forced_calls,
    optional_calls=partial(grammar.text_then_calls, _START),
)
