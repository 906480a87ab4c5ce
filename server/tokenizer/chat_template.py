"""Conversations to text by the checkpoint's own Jinja template, with the variables that Hugging Face templates expect.

Rendered in the sandbox of `jinja_sandbox.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from engine.errors import RequestError, StartupError
from server.tokenizer.jinja_sandbox import Sandbox, TemplateLimitError

MAX_SECONDS = 2.0  # of this thread's own CPU time: a busy machine does not make a template slow
_TOOL_USE = "tool_use"
_PAIR = ("query", "document")  # roles
_MAX_TRIAL = 64 * 1024  # characters of a rendered trial conversation


class ChatTemplate:
    """The checkpoint's compiled templates; it may have none."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        names: dict[str, str],
        max_seconds: float = MAX_SECONDS,
        parsers: Mapping[str, str] | None = None,
    ) -> None:
        """`parsers`: the operator's `tool_call_parser`, `reasoning_parser` and `chat_template_content_format`; without:
        found out from the source."""
        self.parsers = dict(parsers or {})
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._names = names
        self._max_seconds = max_seconds
        self._sandbox = _sandbox()
        self._templates: dict[str, jinja2.Template] = {}
        self.source = sources.get(_TOOL_USE) or sources.get("default") or ""  # of the one for tools, if there is one
        for name in ("default", _TOOL_USE):
            if name not in sources:
                continue
            try:
                self._templates[name] = self._sandbox.from_string(sources[name])
            except jinja2.TemplateError as error:
                raise StartupError(
                    f"The chat template of the checkpoint is not valid Jinja: {error}.",
                    "Mend chat_template.jinja, or remove it to serve completions only.",
                ) from None

    @staticmethod
    def from_config(config: dict[str, Any], names: dict[str, str]) -> ChatTemplate:
        """The template in a tokenizer configuration: a text, or several with names (`default`, `tool_use`).

        Raises `StartupError` for one that is not valid Jinja.
        """
        source = config.get("chat_template")
        if isinstance(source, list):
            source = {item["name"]: item["template"] for item in source}
        return ChatTemplate(source, names, parsers=config.get("parsers"))

    @property
    def exists(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._templates)

    @cached_property
    def reads_parts(self) -> bool:
        """Tells whether contents are lists of parts: as the operator says, else where it writes parts alone."""
        asked = self.parsers.get("chat_template_content_format")
        if asked is not None:
            return asked == "openai"
        return not self._writes("user", as_parts=False) and self._writes("user", as_parts=True)

    @cached_property
    def takes_system(self) -> bool:
        """Whether messages of the role `system` are written: some templates refuse them, some drop them silently."""
        return self._writes("system", "user", as_parts=self.reads_parts)

    @cached_property
    def takes_runs(self) -> bool:
        """Whether turns of one role may follow each other."""
        return self._writes("user", "user", "assistant", "assistant", "user", as_parts=self.reads_parts)

    @cached_property
    def takes_pairs(self) -> bool:
        """Whether it is a template for rerankers, which names the roles of a query and a document. One that writes any
        role is none."""
        named = all(re.search(rf"""['"]{role}['"]""", self.source) for role in _PAIR)
        return named and self._writes(*_PAIR, as_parts=False)

    def _writes(self, *roles: str, as_parts: bool) -> bool:
        """Whether turns of these roles are accepted and all of them written."""
        texts = [f"turn{number}" for number in range(len(roles))]
        contents = [text_parts(text) if as_parts else text for text in texts]
        turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            written = self.render(turns, True, _MAX_TRIAL)
        except RequestError:
            return False
        return all(text in written for text in texts)

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        max_size: int,
        *,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, at most `max_size` characters.

        Raises `RequestError` when the template refuses, runs too long or writes too much. `variables` are the
        caller's, such as `enable_thinking`; they never replace the ones named here.
        """
        template = self._templates.get(_TOOL_USE if tools else "default") or self._templates.get("default")
        if template is None:
            raise RequestError(
                "This model has no chat template. Use /v1/completions with a prompt of your own.", "messages"
            )
        given = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with self._sandbox.limits(self._max_seconds, max_size):
                return self._sandbox.collect(template.generate({**self._names, **(variables or {}), **given}))
        except TemplateLimitError:
            raise RequestError(
                "The chat template takes too long or writes too much on this input.", "messages"
            ) from None
        except jinja2.TemplateError as error:
            message = f"The chat template refuses these messages: {str(error)[:300]}"
            raise RequestError(message, "messages") from None
        except Exception as error:  # the template is foreign code: any error in it is about this input
            message = f"The chat template fails on these messages ({type(error).__name__})."
            raise RequestError(message, "messages") from None


def text_parts(*texts: str) -> list[dict[str, str]]:
    """Make a message's content of texts, as OpenAI's list of parts."""
    return [{"type": "text", "text": text} for text in texts]


def read_template(file: str | Path) -> str:
    """The chat template that the operator gave. Raises `StartupError` for a file that cannot be read, and for one that
    is no template."""
    path = Path(file).expanduser()
    fix = "Give --chat-template a file with a template in Jinja, such as a checkpoint's chat_template.jinja."
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"The chat template {path} cannot be read: {error.strerror}.", fix) from None
    except UnicodeDecodeError:
        raise StartupError(f"The chat template {path} is not UTF-8 text.", fix) from None
    if "messages" not in source:  # also of an empty file: each prompt would be the same
        raise StartupError(f"The chat template {path} does not write the messages.", fix)
    try:
        _sandbox().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise StartupError(f"Line {error.lineno} of the chat template {path}: {error}.", "Mend that line.") from None
    return source


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _sandbox() -> Sandbox:
    """A sandbox with the names that published templates expect, and no others."""
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    sandbox.filters["tojson"] = _to_json
    names: dict[str, Any] = sandbox.globals  # typed by Jinja as what it puts there itself
    names |= {"raise_exception": _raise, "strftime_now": _now}
    return sandbox


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML; a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
