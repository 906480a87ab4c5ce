"""Calls between tags, with a text for each argument: `<function=f><parameter=a>…` and `<arg_key>a</arg_key>…`.

Qwen3-Coder, GLM and Hunyuan models write them. The argument's schema determines the meaning of a text
(`text_values.py`). Models sometimes omit closing tags, so the next tag of the format, opening or closing, ends a value
as well.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import (
    CallReader,
    CallScript,
    EndOfTextError,
    MalformedError,
    Reads,
    Steps,
    Tools,
)
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema
from oarlock.server.chat.tool_parsers.text_values import (
    Schema,
    argument_names,
    is_text,
    json_value,
    property_schema,
    value_rules,
)


@dataclass(frozen=True, slots=True)
class Tags:
    """Texts around the name and around each argument of a call."""

    start: str
    before_name: str
    after_name: str  # "": white space, or the next tag
    before_key: str
    after_key: str
    before_value: str  # "": the value follows the key
    value_end: str
    wrap: str  # a line end inside the value's tags that is not part of the value
    call_end: str  # precedes `end`; "": the format has no such tag
    end: str

    @property
    def value_ends(self) -> tuple[str, ...]:
        """The tags that end a value: its closing tag, or the next tag if the closing tag is missing."""
        others = (self.before_key, self.call_end, self.end, self.start, self.before_name)
        return (self.value_end, *filter(None, others))


QWEN = Tags(
    "<tool_call>", "<function=", ">", "<parameter=", ">", "", "</parameter>", "\n", "</function>", "</tool_call>"
)
SEED = Tags(
    "<seed:tool_call>",
    "<function=",
    ">",
    "<parameter=",
    ">",
    "",
    "</parameter>",
    "",
    "</function>",
    "</seed:tool_call>",
)
MINIMAX = Tags(
    "<minimax:tool_call>",
    '<invoke name="',
    '">',
    '<parameter name="',
    '">',
    "",
    "</parameter>",
    "",
    "</invoke>",
    "</minimax:tool_call>",
)
HUNYUAN = Tags(
    "<tool_calls:opensource>",
    "<tool_call:opensource>",
    "<tool_sep:opensource>",
    "<arg_key:opensource>",
    "</arg_key:opensource>",
    "<arg_value:opensource>",
    "</arg_value:opensource>",
    "",
    "</tool_call:opensource>",
    "</tool_calls:opensource>",
)
GLM = Tags("<tool_call>", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", "", "</tool_call>")


_LINE = "\n"
_MAX_KEY = 256  # limit in characters


class TaggedCall(CallScript):
    """Reader of one call, from after its first tag or after the tag before its name."""

    def __init__(self, tools: Tools, tags: Tags, delimiter: str) -> None:
        self._tags = tags
        self._is_first = delimiter == tags.start
        self._ends = tags.value_ends
        super().__init__(tools)

    def _read(self) -> Steps:
        tags = self._tags
        yield from self._space()
        if self._is_first and tags.before_name:
            yield from self._one_of(tags.before_name)
        name = yield from self._word()
        if tags.after_name:
            yield from self._one_of(tags.after_name)
        elif not (self._back.isspace() or self._back == "<"):
            raise MalformedError
        self._expect(name)
        self._write("{")
        separator, ending = "", tags.value_end
        while True:
            if ending == tags.value_end:
                try:
                    yield from self._space()
                    ending = yield from self._one_of(*self._ends[1:])
                except EndOfTextError:
                    break
            if ending != tags.before_key:
                break
            key = yield from self._key()
            self._open()
            ending = yield from self._argument(name, key, separator)
            separator = ", "
        self._open()
        self._write("}")
        if ending in (tags.start, tags.before_name):  # belongs to the next call
            self.rest = ending

    def _key(self) -> Reads:
        """Read the name of an argument, from after its first tag to the start of its value."""
        tags = self._tags
        read = ""
        while not read.endswith((tags.after_key, _LINE)):
            read += yield from self._character()
            if len(read) > _MAX_KEY:
                raise MalformedError
            if tags.before_value and read.endswith(tags.before_value):  # the closing tag of the key is missing
                return _checked(read.removesuffix(tags.before_value))
            if read == _LINE and tags.before_value:
                read = ""
        if tags.before_value:
            yield from self._space()
            yield from self._one_of(tags.before_value)
        elif read.endswith(_LINE):
            self._back = tags.wrap  # it is the line end before the value
        return _checked(read.removesuffix(tags.after_key))

    def _argument(self, name: str, key: str, separator: str) -> Reads:
        """Read one argument and return the tag that ended it.

        A string is emitted as it arrives, any other value when it is complete. The end of the output ends a value too.
        """
        root = self._tools[name]
        schema = self._schema(root, key)
        head = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
        if is_text(schema, root):
            self._write(f'{head}"')
            ending = yield from self._text(lambda text: self._write(json.dumps(text, ensure_ascii=False)[1:-1]))
            self._write('"')
            return ending
        pieces: list[str] = []
        ending = yield from self._text(pieces.append)
        self._write(head + json_value("".join(pieces), schema, root))
        return ending

    def _schema(self, root: Schema, key: str) -> Any:
        """Return the schema that determines the meaning of an argument's text."""
        return property_schema(root, key)

    def _text(self, on_text: Callable[[str], None]) -> Reads:
        """Read the text up to the tag that ends it, without the line ends next to the tags; return the tag."""
        tags = self._tags
        held = ""  # a line end, and the start of a tag
        try:
            character = yield from self._character()
            if character == tags.wrap:
                character = yield from self._character()
            while True:
                held += character
                tag = held.removeprefix(_LINE)
                if tag in self._ends:
                    if held != tag and tag == tags.value_end and not tags.wrap:
                        on_text(_LINE)
                    return tag
                if not any(end.startswith(tag) for end in self._ends):
                    on_text(held[:-1])
                    held = character if character in (_LINE, "<") else ""
                    if not held:
                        on_text(character)
                character = yield from self._character()
        except EndOfTextError:
            on_text(held.removesuffix(_LINE))
            return tags.end


def _checked(key: str) -> str:
    """Return an argument's name without surrounding white space and quotes. Raises `MalformedError` if invalid."""
    name = key.strip().strip("\"'")
    if not name or "<" in name or ">" in name:
        raise MalformedError
    return name


class QwenCoderToolParser(ToolParser):
    """Parser of Qwen3-Coder's format. The model sometimes omits the outer tags."""

    TAGS = QWEN
    DELIMITERS = (QWEN.start, QWEN.before_name, QWEN.call_end, QWEN.end)
    CLOSING = (QWEN.call_end, QWEN.end)

    def _reader(self, delimiter: str) -> CallReader:
        return TaggedCall(self._tools, self.TAGS, delimiter)


class SeedToolParser(QwenCoderToolParser):
    """Parser of Seed-OSS's calls: Qwen3-Coder's format with other tag names."""

    TAGS = SEED
    DELIMITERS = (SEED.start, SEED.before_name, SEED.call_end, SEED.end)
    CLOSING = (SEED.call_end, SEED.end)


class MiniMaxToolParser(QwenCoderToolParser):
    """Parser of MiniMax-M2's calls: Qwen3-Coder's format with names in quotes and several calls per outer tag."""

    TAGS = MINIMAX
    DELIMITERS = (MINIMAX.start, MINIMAX.before_name, MINIMAX.call_end, MINIMAX.end)
    CLOSING = (MINIMAX.call_end, MINIMAX.end)


class HunyuanToolParser(QwenCoderToolParser):
    """Parser of Hunyuan 3's calls: GLM's keys and values in tokens, several calls per outer tag."""

    TAGS = HUNYUAN
    DELIMITERS = (HUNYUAN.start, HUNYUAN.before_name, HUNYUAN.call_end, HUNYUAN.end)
    CLOSING = (HUNYUAN.call_end, HUNYUAN.end)


class GlmToolParser(QwenCoderToolParser):
    """Parser of GLM's format: the name, then alternating keys and values."""

    TAGS = GLM
    DELIMITERS = (GLM.start, GLM.end)
    CLOSING = (GLM.end,)


def forced_calls(
    tags: Tags,
    tools: Sequence[ToolSchema],
    most: int,
    special_ids: SpecialIds,
    after_key: Callable[[Any, Schema], str] | None = None,
    token: str = "",
) -> str:
    """Return rules for forced calls, each tag on its own line. Raises `RequestError` if a schema cannot be enforced.

    `after_key`: (an argument's schema, the whole schema) -> the text after its name, if it depends on the schema.
    `token`: the part of each tag that may be a special token; "": the whole tag may be a special token.
    """

    def mark(text: str) -> str:
        return grammar.delimited(text, (token,), special_ids) if token else grammar.delimiter(text, special_ids)

    line = grammar.literal("\n")
    more = f" ({line} {mark(tags.start)} body){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"calls: {mark(tags.start)} tail", f"tail: body{more}", f"body: call {mark(tags.end)}"]
    end = f" {mark(tags.call_end)} {line}" if tags.call_end else ""
    before = f"{line} {mark(tags.before_name)} " if tags.before_name else ""
    value = [line, mark(tags.before_value)] if tags.before_value else [grammar.literal(tags.wrap)] if tags.wrap else []
    for index, (name, schema) in enumerate(tools):
        parts = []
        for number, (key, is_required) in enumerate(argument_names(schema)):
            rule = f"v_{index}_{number}"
            rules += value_rules(rule, schema, key, tags.wrap, tags.value_ends, special_ids)
            behind = tags.after_key if after_key is None else after_key(property_schema(schema, key), schema)
            head = [mark(tags.before_key), grammar.literal(key), mark(behind), *value]
            parts.append(f"({' '.join([*head, rule, line])})" + ("" if is_required else "?"))
        after = f" {mark(tags.after_name)}" if tags.after_name in special_ids else ""
        head = f"{before}{grammar.literal(name if after else name + tags.after_name)}{after} {line}"
        rules.append(f"call_{index}: {' '.join([head, *parts])}{end}")
    return "\n".join([*rules, grammar.one_of_calls(tools)])


def _format(name: str, models: str, parser: type[QwenCoderToolParser], *, aliases: tuple[str, ...] = ()) -> ToolFormat:
    tags = parser.TAGS
    line = "\n" if tags.before_name else ""
    argument = f"{tags.before_key}a{tags.after_key}{tags.wrap}{tags.before_value}x{tags.wrap}{tags.value_end}"
    names = (tags.start, tags.before_key, tags.after_key, tags.before_value, tags.value_end, tags.call_end, tags.end)
    names += tuple(text for text in (tags.before_name, tags.after_name) if text.endswith(">"))
    return ToolFormat(
        name=name,
        models=models,
        example=f"{tags.start}{line}{tags.before_name}f{tags.after_name}\n{argument}\n{tags.call_end}{line}{tags.end}",
        aliases=aliases,
        parser=parser,
        delimiters=tuple(text for text in names if text.startswith("<")),
        forced_calls=partial(forced_calls, tags),
        optional_calls=partial(grammar.text_then_calls, tags.start),
    )


QWEN3_CODER = _format("qwen3_coder", "Qwen3-Coder, Qwen 3.5, Nemotron 3", QwenCoderToolParser, aliases=("qwen3_xml",))
SEED_OSS = _format("seed_oss", "Seed-OSS", SeedToolParser)
MINIMAX_M2 = _format("minimax_m2", "MiniMax-M2", MiniMaxToolParser)
HUNYUAN_3 = _format("hy_v3", "Hunyuan 3", HunyuanToolParser)
GLM45 = _format("glm45", "GLM 4.5 and later", GlmToolParser, aliases=("glm47",))
