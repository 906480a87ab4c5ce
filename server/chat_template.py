"""Conversations to text by the checkpoint's own Jinja template, in an immutable sandbox with limits.

A template is foreign code: it gets no attribute that could reach Python, a bounded output and a bounded time. Knows
nothing of tokens or of HTTP.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import RequestError, StartupError

_MAX_SECONDS = 2.0


class ChatTemplate:
    """One compiled template, or the knowledge that the checkpoint has none."""

    def __init__(self, source: str | None, names: dict[str, str]) -> None:
        self._names = names
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateError as error:
                raise StartupError(
                    f"The chat template of the checkpoint is not valid Jinja: {error}.",
                    "Mend chat_template.jinja, or remove it to serve completions only.",
                ) from None

    @staticmethod
    def from_config(config: dict[str, Any], names: dict[str, str]) -> ChatTemplate:
        """The template in a tokenizer configuration: a text, or several with names, of which `default` is meant."""
        source = config.get("chat_template")
        if isinstance(source, list):
            source = {item["name"]: item["template"] for item in source}.get("default")
        return ChatTemplate(source, names)

    @property
    def exists(self) -> bool:
        return self._template is not None

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, max_size: int) -> str:
        """The prompt's text. Raises `RequestError` when the template refuses, runs too long or writes too much."""
        if self._template is None:
            raise RequestError(
                "This model has no chat template. Use /v1/completions with a prompt of your own.", "messages"
            )
        deadline = time.monotonic() + _MAX_SECONDS
        pieces, size = [], 0
        variables = {**self._names, "messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            for piece in self._template.generate(**variables):
                pieces.append(piece)
                size += len(piece)
                if size > max_size or time.monotonic() > deadline:
                    raise RequestError("The chat template takes too long or writes too much on this input.", "messages")
        except jinja2.TemplateError as error:
            message = f"The chat template refuses these messages: {str(error)[:300]}"
            raise RequestError(message, "messages") from None
        except (TypeError, ValueError, KeyError, ZeroDivisionError, OverflowError) as error:
            message = f"The chat template fails on these messages ({type(error).__name__})."
            raise RequestError(message, "messages") from None
        return "".join(pieces)


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The names that published templates expect, and no others."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names: dict[str, Any] = environment.globals  # typed by Jinja as what it puts there itself
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
    raise jinja2.TemplateError(message)
