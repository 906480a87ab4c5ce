"""Calls of DeepSeek V3.2 and V4: XML whose tags contain a special token and mark each value as text or JSON."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat
from oarlock.server.chat.tool_parsers.call_parser import CallReader, MalformedError, Reads
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema
from oarlock.server.chat.tool_parsers.text_values import Schema, is_text
from oarlock.server.chat.tool_parsers.xml import QwenCoderToolParser, TaggedCall, Tags, forced_calls

_TOKEN = "\uff5cDSML\uff5c"
_TEXT, _JSON = '" string="true">', '" string="false">'
_MAX_KEY = 256  # limit in characters
_STRING: dict[str, Any] = {"type": "string"}


def _tags(outer: str) -> Tags:
    return Tags(
        f"<{_TOKEN}{outer}>",
        f'<{_TOKEN}invoke name="',
        '">',
        f'<{_TOKEN}parameter name="',
        _TEXT,
        "",
        f"</{_TOKEN}parameter>",
        "",
        f"</{_TOKEN}invoke>",
        f"</{_TOKEN}{outer}>",
    )


class DsmlCall(TaggedCall):
    """Reader of one call, whose tags mark each value as text or JSON."""

    def _key(self) -> Reads:
        read = ""
        while (character := (yield from self._character())) != '"':
            read += character
            if len(read) > _MAX_KEY:
                raise MalformedError
        self._kind = yield from self._one_of(_TEXT[1:], _JSON[1:], ">")
        if not read:
            raise MalformedError
        return read

    def _schema(self, root: Schema, key: str) -> Any:
        if self._kind == ">":  # the model has omitted the attribute
            return super()._schema(root, key)
        return _STRING if self._kind == _TEXT[1:] else True


class DeepSeekV32ToolParser(QwenCoderToolParser):
    """Parser of DeepSeek V3.2's calls."""

    TAGS = _tags("function_calls")
    DELIMITERS = (TAGS.start, TAGS.before_name, TAGS.call_end, TAGS.end)
    CLOSING = (TAGS.call_end, TAGS.end)

    def _reader(self, delimiter: str) -> CallReader:
        return DsmlCall(self._tools, self.TAGS, delimiter)


class DeepSeekV4ToolParser(DeepSeekV32ToolParser):
    """Parser of DeepSeek V4's calls, whose outer tags have another name."""

    TAGS = _tags("tool_calls")
    DELIMITERS = (TAGS.start, TAGS.before_name, TAGS.call_end, TAGS.end)
    CLOSING = (TAGS.call_end, TAGS.end)


def _forced_calls(tags: Tags, tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for forced calls. Raises `RequestError` if the arguments' schema cannot be enforced."""

    def after_key(schema: Any, root: Schema) -> str:
        return _TEXT if is_text(schema, root) else _JSON

    return forced_calls(tags, tools, most, special_ids, after_key, _TOKEN)


def _optional_calls(tags: Tags, special_ids: SpecialIds) -> tuple[str, str]:
    """Return rules for any text, optionally followed by calls."""
    return grammar.text_then_calls(_TOKEN if _TOKEN in special_ids else tags.start, special_ids)


def _format(name: str, models: str, parser: type[DeepSeekV32ToolParser]) -> ToolFormat:
    tags = parser.TAGS
    argument = f"{tags.before_key}a{_TEXT}x{tags.value_end}"
    return ToolFormat(
        name=name,
        models=models,
        example=f"{tags.start}\n{tags.before_name}f{tags.after_name}\n{argument}\n{tags.call_end}\n{tags.end}",
        parser=parser,
        delimiters=(_TOKEN,),
        forced_calls=partial(_forced_calls, tags),
        optional_calls=partial(_optional_calls, tags),
    )


DEEPSEEK_V32 = _format("deepseek_v32", "DeepSeek V3.2", DeepSeekV32ToolParser)
DEEPSEEK_V4 = _format("deepseek_v4", "DeepSeek V4", DeepSeekV4ToolParser)
