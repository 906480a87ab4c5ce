"""FunctionGemma's calls, `call:f{a:<escape>x<escape>}`, and Gemma 4's, which differ in their tokens.

Strings stand between tokens and are not escaped; keys have no quotes
(https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import Tools
from oarlock.server.chat.tool_parsers.call_script import CallReader, Steps
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema, delimiter, literal
from oarlock.server.chat.tool_parsers.literals.call import LiteralCall
from oarlock.server.chat.tool_parsers.literals.schema_grammar import SchemaGrammar

FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")
GEMMA4 = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")


class GemmaCall(LiteralCall):
    """Reader of a call such as `call:f{a:1}`."""

    is_lenient = True

    def __init__(self, tools: Tools, quote: str) -> None:
        self._quote = quote
        super().__init__(tools)

    def _read(self) -> Steps:
        yield from self._space()
        yield from self._one_of("call:")
        name = yield from self._word()
        yield from self._one_of("{")
        self._announce(name)
        yield from self._pairs("}", ":")

    def _begins_string(self, character: str) -> bool:
        return character == "<"

    def _string(self) -> Steps:
        quote = self._quote
        yield from self._one_of(quote[1:])
        held = ""  # what may be the beginning of the end
        while True:
            held += yield from self._character()
            if held == quote:
                return
            if not quote.startswith(held):
                text, held = (held[:-1], held[-1]) if held[-1] == quote[0] else (held, "")
                self._write(json.dumps(text, ensure_ascii=False)[1:-1])


class FunctionGemmaToolParser(ToolParser):
    """Parser of FunctionGemma's calls. The token of a response, where the model should have stopped, is packing."""

    TOKENS = FUNCTION_GEMMA
    DELIMITERS = (TOKENS[0], TOKENS[1], TOKENS[3])
    CLOSING = (TOKENS[1], TOKENS[3])

    def _reader(self, delimiter: str) -> CallReader:
        return GemmaCall(self._tools, self.TOKENS[2])


class Gemma4ToolParser(FunctionGemmaToolParser):
    """Parser of Gemma 4's calls: FunctionGemma's format between other tokens."""

    TOKENS = GEMMA4
    DELIMITERS = (TOKENS[0], TOKENS[1], TOKENS[3])
    CLOSING = (TOKENS[1], TOKENS[3])


def _forced_calls(tokens: Sequence[str], tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Rules for forced calls between `tokens`. Raises `RequestError` for arguments that cannot be bound."""
    start, end = delimiter(tokens[0], special_ids), delimiter(tokens[1], special_ids)
    more = f" ({start} body){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"calls: {start} tail", f"tail: body{more}", f"body: call {end}", grammar.one_of_calls(tools)]
    for index, (name, schema) in enumerate(tools):
        rules.append(f"call_{index}: {literal('call:' + name)} args_{index}")
        bound = SchemaGrammar(schema, tokens[2], special_ids)
        bound.arguments(f"args_{index}")
        rules += bound.rules
    return "\n".join(rules)


def _format(name: str, models: str, parser: type[FunctionGemmaToolParser]) -> ToolFormat:
    tokens = parser.TOKENS
    return ToolFormat(
        name=name,
        models=models,
        example=f"{tokens[0]}call:f{{a:{tokens[2]}x{tokens[2]}}}{tokens[1]}",
        parser=parser,
        delimiters=tokens,
        matches=lambda template: tokens[0] in template and tokens[2] in template,
        forced_calls=partial(_forced_calls, tokens),
        optional_calls=partial(grammar.text_then_calls, tokens[0]),
    )


FUNCTIONGEMMA = _format("functiongemma", "FunctionGemma", FunctionGemmaToolParser)
GEMMA_4 = _format("gemma4", "Gemma 4", Gemma4ToolParser)
