"""Jinja with the names that published chat templates expect, and no way from a template to Python's objects.

Only the processes that render import it (`template_process.py`): what a template may take is limited there, from
outside, since a single filter or operator of a template can compute for hours or fill any memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Jinja's global helpers for web pages. Published chat templates use none of them.
_REMOVED_GLOBALS = ("lipsum", "cycler", "joiner")


class TooLargeError(Exception):
    """The template writes more than it may."""


class Renderer:
    """The templates of one checkpoint, each compiled when it is first needed."""

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str]) -> None:
        """`names`: variables of every rendering, such as `bos_token`."""
        self._sources = sources
        self._names = names
        self._environment = _environment()
        self._templates: dict[str, Template] = {}

    def compile(self) -> None:
        """Compile all templates. Raises `jinja2.TemplateSyntaxError` and whatever else Jinja's compiler raises."""
        for name in self._sources:
            self._template(name)

    def render(self, name: str, variables: Mapping[str, Any], max_characters: int) -> str:
        """The text that a template writes. Raises `TooLargeError` and whatever the template raises."""
        pieces: list[str] = []
        size = 0
        for piece in self._template(name).generate({**self._names, **variables}):
            size += len(piece)
            if size > max_characters:
                raise TooLargeError
            pieces.append(piece)
        return "".join(pieces)

    def _template(self, name: str) -> Template:
        template = self._templates.get(name)
        if template is None:
            template = self._templates[name] = self._environment.from_string(self._sources[name])
        return template


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names: dict[str, Any] = environment.globals  # typed by Jinja as what it puts there itself
    for name in _REMOVED_GLOBALS:
        del names[name]
    names |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML; a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _raise(message: str) -> None:
    raise TemplateError(message)
