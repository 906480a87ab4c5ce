"""Conversion of chat messages to text by the checkpoint's Jinja template, with the variables of Hugging Face templates.

A template is foreign code, so it is compiled and rendered in separate processes (`template_renderers.py`).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oarlock.base.errors import StartupError, shown
from oarlock.base.json_files import read_text
from oarlock.engine.errors import EngineError, RequestError
from oarlock.server.llm.template_messages import CPU_LIMIT_S, ReplyKind, request
from oarlock.server.llm.template_renderers import TemplateLimitError, TemplateRenderers

_DEFAULT, _TOOL_USE = "default", "tool_use"
_TOOLS = "tools"
_PAIR = ("query", "document")  # roles
_MAX_TRIAL = 64 * 1024  # limit in characters for a rendered trial conversation
_CONFIG = "in tokenizer_config.json"
MOST_CHARACTERS = 8 << 20  # limit for a template's file
_FIX = "Correct it, serve with --chat-template and your own file, or remove it to serve completions only."


class Rendering(NamedTuple):
    """Messages and variables, serialized for the renderer process."""

    data: bytes
    max_characters: int


class ChatTemplate:
    """Templates of the checkpoint; there may be none."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        names: dict[str, str],
        parsers: Mapping[str, str] | None = None,
        cpu_limit_s: float = CPU_LIMIT_S,
        source_file: str | Path = _CONFIG,
    ) -> None:
        """`parsers`: the operator's `tool_call_parser`, `reasoning_parser` and `chat_template_content_format`; if
        absent, they are detected from the source. `source_file`: for errors. Raises `StartupError` if a template cannot
        be compiled.
        """
        self.parsers = dict(parsers or {})
        given = {_DEFAULT: source} if isinstance(source, str) else dict(source or {})
        self._sources = {name: given[name] for name in (_DEFAULT, _TOOL_USE) if name in given}
        # the template for tools, if there is one, else the default
        self.source = given.get(_TOOL_USE) or given.get(_DEFAULT) or ""
        self._renderers = TemplateRenderers(self._sources, names, cpu_limit_s)
        self._written: dict[tuple[tuple[str, ...], bool], bool] = {}
        self.trials: dict[Any, Any] = {}  # cached results of trials by other modules
        if self._sources:
            _compile(self._renderers, f"The chat template {source_file}", _FIX)

    @staticmethod
    def from_config(config: dict[str, Any], names: dict[str, str], template_file: Path | None = None) -> "ChatTemplate":
        """Return the template in a tokenizer configuration: a text, or several with names (`default`, `tool_use`).

        `template_file`: the file it was read from, if not `tokenizer_config.json`. Raises `StartupError` if the entry
        has another type or cannot be compiled.
        """
        source = config.get("chat_template")
        if isinstance(source, list):
            source = {_member(item, "name"): _member(item, "template") for item in source}
        elif source is not None and not isinstance(source, str):
            raise _not_a_template(source)
        return ChatTemplate(source, names, config.get("parsers"), source_file=template_file or _CONFIG)

    @property
    def exists(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._sources)

    async def reads_parts(self) -> bool:
        """Return whether contents must be lists of parts.

        The operator's choice if there is one, else whether the template writes parts but not plain texts.
        """
        asked = self.parsers.get("chat_template_content_format")
        if asked is not None:
            return asked == "openai"
        return not await self._writes("user", as_parts=False) and await self._writes("user", as_parts=True)

    async def takes_pairs(self) -> bool:
        """Return whether it is a template for rerankers, whose source names the roles `query` and `document`.

        It must also write turns of both roles. A template that writes turns of any role does not name them.
        """
        named = all(re.search(rf"""['"]{role}['"]""", self.source) for role in _PAIR)
        return named and await self._writes(*_PAIR, as_parts=False)

    async def _writes(self, *roles: str, as_parts: bool) -> bool:
        """Return whether turns of these roles are accepted and all of them written."""
        if (roles, as_parts) not in self._written:
            texts = [f"turn{number}" for number in range(len(roles))]
            contents = [text_parts(text) if as_parts else text for text in texts]
            turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
            written = await self.try_render(turns, True, _MAX_TRIAL)
            self._written[roles, as_parts] = written is not None and all(text in written for text in texts)
        return self._written[roles, as_parts]

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        max_characters: int,
        *,
        tools: list[dict[str, Any]] | None = None,
        tools_variable: str = _TOOLS,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendering:
        """Return a conversation prepared for `write`. Takes a while for a long conversation.

        `variables` are the caller's, such as `enable_thinking`; they never replace the variables set here.
        `tools_variable`: the template's variable for the tools. Raises `RequestError` if there is no template or the
        input is nested too deeply.
        """
        name = _TOOL_USE if tools and _TOOL_USE in self._sources else _DEFAULT
        if name not in self._sources:
            raise RequestError(
                "This model has no chat template. Use /v1/completions with a complete prompt.", "messages"
            )
        given = {
            "messages": messages,
            _TOOLS: None,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        if tools is not None:
            given[tools_variable] = tools
        try:
            return Rendering(request(name, {**(variables or {}), **given}, max_characters), max_characters)
        except RecursionError:
            raise RequestError("The messages or tools are nested too deeply. Send flatter ones.", "messages") from None

    async def write(self, rendering: Rendering) -> str:
        """Return the prompt's text.

        Raises `RequestError` if the template refuses, and the errors of `TemplateRenderers`.
        """
        kind, text = await self._renderers.render(*rendering)
        if kind is ReplyKind.REFUSED:
            raise RequestError(f"The chat template refuses these messages: {text}", "messages")
        if kind is not ReplyKind.TEXT:
            raise RequestError(f"The chat template fails on these messages ({text}).", "messages")
        return text

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        max_characters: int,
        *,
        tools: list[dict[str, Any]] | None = None,
        tools_variable: str = _TOOLS,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a short conversation: `prepare` and `write` in one call."""
        rendering = self.prepare(
            messages,
            add_generation_prompt,
            max_characters,
            tools=tools,
            tools_variable=tools_variable,
            variables=variables,
        )
        return await self.write(rendering)

    async def try_render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        max_characters: int,
        *,
        tools: list[dict[str, Any]] | None = None,
        tools_variable: str = _TOOLS,
        variables: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Render a trial conversation, or return None if the template refuses it.

        Raises `TemplateLimitError`: a limit is no information about the conversation.
        """
        try:
            return await self.render(
                messages,
                add_generation_prompt,
                max_characters,
                tools=tools,
                tools_variable=tools_variable,
                variables=variables,
            )
        except TemplateLimitError:
            raise
        except RequestError:
            return None

    def close(self) -> None:
        """Kill the renderer processes."""
        self._renderers.close()


def text_parts(*texts: str) -> list[dict[str, str]]:
    """Return texts as a message's content in OpenAI's list of parts."""
    return [{"type": "text", "text": text} for text in texts]


def read_template(file: str | Path) -> str:
    """Return the chat template that the operator gave. Raises `StartupError` if it is unreadable or not a template."""
    path = Path(file)
    fix = "Give --chat-template a file with a Jinja template, such as a checkpoint's chat_template.jinja."
    try:
        source = read_text(path, MOST_CHARACTERS)
    except StartupError as error:
        raise StartupError(f"The chat template {error.cause}", fix) from None
    if "messages" not in source:  # also true of an empty file; every prompt would be the same
        raise StartupError(f"The chat template {path} does not render the messages.", fix)
    renderers = TemplateRenderers({_DEFAULT: source}, {})
    try:
        _compile(
            renderers, f"The chat template {path}", "Correct that line, or make the template smaller and less nested."
        )
    finally:
        renderers.close()
    return source


def _compile(renderers: TemplateRenderers, what: str, fix: str) -> None:
    """Compile all templates. Raises `StartupError` if one is invalid or exceeds a limit."""
    try:
        kind, text = renderers.compile()
    except TemplateLimitError as error:
        raise StartupError(f"{what} {error.did} to compile.", fix) from None
    except EngineError as error:
        raise StartupError(f"{what} cannot be compiled: {error}", "See the log for the reason.") from None
    if kind is ReplyKind.REFUSED:
        raise StartupError(f"{what} is not valid Jinja: {text}.", fix)
    if kind is not ReplyKind.TEXT:
        raise StartupError(f"{what} cannot be compiled ({text}).", fix)


def _member(item: Any, name: str) -> str:
    """Return a text of an entry in a list of templates. Raises `StartupError` if it is not a text."""
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise _not_a_template(item)
    return value


def with_template(config: Mapping[str, Any], name: str, source: str) -> list[dict[str, str]]:
    """Return the templates of a tokenizer configuration, with the template `name` replaced by `source`."""
    given = config.get("chat_template")
    if isinstance(given, str):
        given = [{"name": _DEFAULT, "template": given}]
    elif not isinstance(given, list | None):
        raise _not_a_template(given)
    others = [item for item in given or () if _member(item, "name") != name]
    return [*others, {"name": name, "template": source}]


def _not_a_template(value: Any) -> StartupError:
    what = "neither a string nor a list of named strings"
    return StartupError(f"chat_template in tokenizer_config.json is {what}: {shown(value)}.", _FIX)
