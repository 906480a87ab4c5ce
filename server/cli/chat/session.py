"""A chat with one server: its conversation, each streamed response, the figures of both, and the slash commands."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from oarlock.base.errors import StartupError
from oarlock.base.paths import expand
from oarlock.server.cli.chat.terminal import PlainScreen, Screen
from oarlock.server.cli.remote import Remote, ServerError
from oarlock.server.config.options import nearest

_PATH = "/v1/chat/completions"
_ROLES = ("system", "developer", "user", "assistant")
_MAX_ATTACHED = 4 << 20  # bytes of a file; more is not a question any more
# Settings at which responses can be compared.
_SETTINGS: dict[str, Callable[[str], object]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "max_tokens": int, "seed": int, "model": str,
}  # fmt: skip


class Listener(Protocol):
    """Receiver of the pieces of a response, in their order."""

    def add_reasoning(self, text: str) -> None: ...

    def add_content(self, text: str) -> None: ...


@dataclass(slots=True)
class ChatResponse:
    """Response to one request, complete or not."""

    request_id: str = ""
    text: str = ""
    tools: list[str] = field(default_factory=list)  # names of the calls that it asks for
    finish_reason: str | None = None
    is_stopped: bool = False  # stopped by Ctrl-C
    began: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    last_at: float | None = None
    chunks: int = 0
    usage: dict[str, Any] | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.began

    @property
    def output_tokens(self) -> int:
        """Number of completion tokens as counted by the server; its chunks if the response was stopped."""
        return self.chunks if self.usage is None else int(self.usage.get("completion_tokens") or 0)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token; None if it cannot be computed."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at or self.output_tokens < 2:
            return None
        return (self.output_tokens - 1) / (self.last_at - self.first_at)


class _Reader:
    """Reader of a stream of server-sent events, whose content it adds to a `ChatResponse`."""

    def __init__(self, response: ChatResponse, listener: Listener) -> None:
        self._response = response
        self._listener = listener
        self._rest = b""
        self.error: str | None = None

    def feed(self, now: float, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                try:
                    self._chunk(now, json.loads(data))
                except (ValueError, TypeError, KeyError, AttributeError, IndexError):
                    self.error = (
                        self.error or f"a chunk is not in OpenAI's format: {data[:200].decode('utf-8', 'replace')}"
                    )

    def _chunk(self, now: float, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = self.error or str(chunk["error"].get("message") or chunk["error"])
            return
        response = self._response
        response.request_id = chunk.get("id") or response.request_id
        response.usage = chunk.get("usage") or response.usage
        for choice in chunk["choices"][:1]:
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            content = delta.get("content")
            response.tools += [call["function"]["name"] for call in delta.get("tool_calls") or () if _begins(call)]
            response.finish_reason = choice.get("finish_reason") or response.finish_reason
            if reasoning or content:
                response.chunks += 1
                response.first_at, response.last_at = response.first_at or now, now
            if reasoning:
                self._listener.add_reasoning(reasoning)
            if content:
                response.text += content
                self._listener.add_content(content)


def _begins(call: dict[str, Any]) -> bool:
    return bool((call.get("function") or {}).get("name"))


async def ask(remote: Remote, fields: dict[str, Any], listener: Listener, response: ChatResponse) -> None:
    """Fill `response`. If cancelled, it keeps the received part, and is marked. Raises `ServerError`.

    `fields`: model, messages and sampling of the request.
    """
    reader = _Reader(response, listener)
    body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    try:
        await remote.stream(_PATH, body, reader.feed)
    except asyncio.CancelledError:  # Ctrl-C: the connection is closed by now, and the server stops computing
        response.is_stopped = True
        return
    if reader.error is not None:
        raise ServerError(f"The response broke off: {reader.error}", 500)
    if response.finish_reason is None:
        raise ServerError("The response broke off: its stream ended without a finish_reason.", 500)


class ConversationError(Exception):
    """A file cannot be written, read or understood; the message is one sentence with a fix."""


@dataclass(slots=True)
class Conversation:
    """Messages of a conversation so far. `system` precedes the messages and is not among them."""

    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    file: Path | None = None  # file that it was last saved to or loaded from

    def as_messages(self) -> list[dict[str, str]]:
        """Return the messages of a request."""
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else list(self.messages)

    def reset(self) -> None:
        """Forget the messages; the system prompt stays."""
        self.messages.clear()

    def save(self, name: str, model: str) -> Path:
        """Write the conversation to `name`, or to the previous file if it is empty: `.md` is Markdown, all else JSON.

        Raises `ConversationError`.
        """
        path = _expanded(name) if name else self.file
        if path is None:
            raise ConversationError("Give a file: /save FILE.json, or FILE.md for a readable one")
        if path.exists() and path != self.file:
            raise ConversationError(f"{path} exists already. Give another file, or remove it first.")
        messages = self.as_messages()
        if path.suffix == ".md":
            text = "\n\n".join(f"## {entry['role'].capitalize()}\n\n{entry['content'].strip()}" for entry in messages)
        else:
            text = json.dumps({"model": model, "messages": messages}, ensure_ascii=False, indent=1)
        try:
            path.write_text(text + "\n", "utf-8")
        except OSError as error:
            raise ConversationError(f"{path} cannot be written ({error.strerror}). Give another file.") from None
        self.file = path
        return path

    def load(self, name: str) -> int:
        """Replace the messages by those of a file, and return their number. Raises `ConversationError`.

        The file is written by `save`, or has a list of messages as in a request, with text only.
        """
        if not name:
            raise ConversationError("Give a file: /load FILE.json")
        path = _expanded(name)
        try:
            read = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ConversationError(f"{path} cannot be read ({error.strerror}). Give another file.") from None
        except ValueError as error:
            raise ConversationError(f"{path} is not JSON ({error}). Give a file that /save wrote.") from None
        messages = _checked(path, read.get("messages") if isinstance(read, dict) else read)
        self.system = "\n\n".join(entry["content"] for entry in messages if entry["role"] in ("system", "developer"))
        self.messages = [entry for entry in messages if entry["role"] in ("user", "assistant")]
        self.file = path
        return len(self.messages)


def _expanded(name: str) -> Path:
    try:
        return expand(name)
    except StartupError as error:
        raise ConversationError(f"{error.cause} {error.fix}") from None


def _checked(path: Path, messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list):
        raise ConversationError(f"{path} contains no list of messages. Give a file that /save wrote.")
    for number, entry in enumerate(messages):
        role = entry.get("role") if isinstance(entry, dict) else None
        if role not in _ROLES:
            raise ConversationError(
                f"{path}: messages[{number}].role is {role!r}; it must be one of {', '.join(_ROLES)}."
            )
        if not isinstance(entry.get("content"), str):
            raise ConversationError(f"{path}: messages[{number}].content is not text; only text can be loaded.")
    return [{"role": entry["role"], "content": entry["content"]} for entry in messages]


@dataclass(slots=True)
class Totals:
    """Totals over all responses of this chat."""

    responses: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Session:
    """One chat with a server. `runner`: its loop runs the requests, and turns Ctrl-C into their cancellation."""

    remote: Remote
    model: str
    screen: Screen | PlainScreen
    runner: asyncio.Runner
    sampling: dict[str, Any] = field(default_factory=dict)
    conversation: Conversation = field(default_factory=Conversation)
    attached: dict[str, str] = field(default_factory=dict)  # names of files -> contents to send with the next message
    last: ChatResponse | None = None
    totals: Totals = field(default_factory=Totals)

    def ask(self, text: str) -> ChatResponse | None:
        """Send a message and show the response. Returns None if it failed; the conversation is then unchanged."""
        conversation, response, problem = self.conversation, ChatResponse(), None
        conversation.messages.append({"role": "user", "content": with_files(text, self.attached)})
        fields = {"model": self.model, "messages": conversation.as_messages(), **self.sampling}
        try:
            self.runner.run(self._show(fields, response))
        except ServerError as error:
            problem = error
        except BaseException:  # a second Ctrl-C, or a signal that ends the chat
            conversation.messages.pop()
            raise
        finally:
            self.screen.end()
        if problem is not None:
            conversation.messages.pop()
            says_fix = problem.status in (None, 401, 403)
            self.screen.problem(f"{problem.cause} {problem.fix}" if says_fix else problem.cause)
            if self.attached:
                self.screen.notice(f"{', '.join(self.attached)}: still attached; /attach without a file removes it.")
            return None
        if response.is_stopped and not response.text:
            conversation.messages.pop()
        else:
            conversation.messages.append({"role": "assistant", "content": response.text})
            self.attached.clear()
        self._count(response)
        for notice in notices(response):
            self.screen.notice(notice)
        return response

    def compare(self, words: Sequence[str], question: str) -> None:
        """Ask with two settings at once, such as `seed=1` and `seed=2`: `question`, or the last question again.

        The conversation does not change. Raises `ConversationError`.
        """
        settings = [read_settings(word) for word in words]
        asked = self.conversation.as_messages()
        if question:
            asked.append({"role": "user", "content": with_files(question, self.attached)})
        while asked and asked[-1]["role"] != "user":
            asked.pop()
        if not asked:
            raise ConversationError("There is no question yet. Write one after the settings.")
        bodies = [{"model": self.model, "messages": asked, **self.sampling, **each} for each in settings]
        responses = [ChatResponse(), ChatResponse()]
        try:
            problems = self.runner.run(self._show_comparison(words, bodies, responses))
        finally:
            self.screen.end()
        for word, response, problem in zip(words, responses, problems, strict=True):
            self._count(response)
            self.screen.notice(f"{word}: {', '.join([*_speed(response), *notices(response)])}")
            if problem is not None:
                self.screen.problem(f"{word}: {problem}")
        first, second = (response.text for response in responses)
        parted = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
        parted = min(len(first), len(second)) if parted is None else parted
        same = "Both responses are the same" if first == second else f"The responses differ after {parted} characters"
        self.screen.notice(f"{same}. Neither is part of the conversation.")

    async def _show_comparison(
        self, titles: Sequence[str], bodies: Sequence[dict[str, Any]], responses: Sequence[ChatResponse]
    ) -> list[BaseException | None]:
        """Show responses next to each other. Return the error of each, or None if it is complete."""
        sides = self.screen.begin_comparison(titles)
        streams = [ask(self.remote, *each) for each in zip(bodies, sides, responses, strict=True)]
        with suppress(asyncio.CancelledError):  # Ctrl-C; each response reports itself that it was stopped
            return await asyncio.gather(*streams, return_exceptions=True)
        return [None] * len(responses)

    async def _show(self, fields: dict[str, Any], response: ChatResponse) -> None:
        self.screen.begin()
        await ask(self.remote, fields, self.screen, response)

    def models(self) -> list[str]:
        """Return the names that the server lists now. Raises `ServerError`."""
        return self.runner.run(self.remote.models())

    def _count(self, response: ChatResponse) -> None:
        self.last = response
        totals, usage = self.totals, response.usage or {}
        totals.responses += 1
        totals.prompt_tokens += usage.get("prompt_tokens") or 0
        totals.cached_tokens += _cached(usage)
        totals.output_tokens += response.output_tokens


def with_files(text: str, attached: dict[str, str]) -> str:
    """Return a message with files before it, each between fences that do not occur in it."""
    parts = []
    for name, content in attached.items():
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", content)), default=0))
        parts.append(f"{name}:\n{fence}\n{content.rstrip()}\n{fence}")
    return "\n\n".join([*parts, text])


def read_settings(word: str) -> dict[str, Any]:
    """Read `seed=1` or `temperature=0.7,top_p=0.9`. Raises `ConversationError`."""
    found: dict[str, Any] = {}
    for part in word.split(","):
        name, _, value = part.partition("=")
        if name not in _SETTINGS:
            near = nearest(name, _SETTINGS)
            hint = f"Did you mean {near}?" if near else f"The settings are: {', '.join(_SETTINGS)}."
            raise ConversationError(f"{name} is not a setting. {hint} For example: /compare seed=1 seed=2 QUESTION")
        try:
            found[name] = _SETTINGS[name](value)
        except ValueError:
            raise ConversationError(f"{name} is {value!r}; it must be a number.") from None
    return found


def notices(response: ChatResponse) -> list[str]:
    """Return notices about how a response ended."""
    found = []
    if response.is_stopped:
        found.append(
            "(stopped)" if response.text else "(stopped before the first token; your message was removed again)"
        )
    if response.finish_reason == "length":
        found.append("(ended by the token limit)")
    if response.tools:
        found.append(f"(requests tool calls, which the chat does not run: {', '.join(response.tools)})")
    return found


def figures(session: Session) -> str:
    """Return the figures that `/stats` shows."""
    last, totals = session.last, session.totals
    if last is None:
        return f"No response yet. Model {session.model} at {session.remote.url}."
    usage, parts = last.usage or {}, _speed(last)
    if usage.get("prompt_tokens"):
        parts.append(f"{_cached(usage)} of {usage['prompt_tokens']} prompt tokens were cached")
    return (
        f"Last response ({last.request_id}): {', '.join(parts)}.\n"
        f"This chat: {totals.responses} response{'' if totals.responses == 1 else 's'}, "
        f"{totals.prompt_tokens} prompt tokens, {totals.cached_tokens} of them cached, "
        f"{totals.output_tokens} tokens generated. Model {session.model} at {session.remote.url}."
    )


def _speed(response: ChatResponse) -> list[str]:
    speed = response.tokens_per_s
    parts = [] if response.ttft_s is None else [f"first token after {1e3 * response.ttft_s:.0f} ms"]
    parts += [] if speed is None else [f"then {speed:.1f} tokens/s"]
    return [*parts, f"{response.output_tokens} tokens" + (", counted by chunks" if response.usage is None else "")]


def _cached(usage: dict[str, Any]) -> int:
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class LeaveError(Exception):
    """The user wants to leave."""


def run_command(session: Session, line: str) -> None:
    """Run one line that begins with a slash. Raises `LeaveError`."""
    word, _, rest = line.strip().partition(" ")
    found = COMMANDS.get(word)
    if found is None:
        near = nearest(word, COMMANDS)
        hint = f"Did you mean {near}?" if near else "/help lists the commands."
        session.screen.problem(f"Unknown command: {word}. {hint} A space before the slash sends it as a message.")
        return
    try:
        found[0](session, rest.strip())
    except (ConversationError, ServerError) as error:
        session.screen.problem(str(error))


def _system(session: Session, text: str) -> None:
    if text:
        session.conversation.system = text
        session.screen.notice("The system prompt is set.")
    else:
        session.screen.notice(session.conversation.system or "There is no system prompt. /system TEXT sets one.")


def _reset(session: Session, text: str) -> None:
    if text == "all":
        session.conversation.system = ""
    elif text:
        raise ConversationError("/reset removes the messages, /reset all also the system prompt.")
    session.conversation.reset()
    kept = " The system prompt stays." if session.conversation.system else ""
    session.screen.notice(f"A new conversation.{kept}")


def _save(session: Session, name: str) -> None:
    path = session.conversation.save(name, session.model)
    session.screen.notice(f"{len(session.conversation.messages)} messages are in {path}.")


def _load(session: Session, name: str) -> None:
    count = session.conversation.load(name)
    session.screen.notice(f"{count} messages are loaded; the next message continues the conversation.")


def _attach(session: Session, name: str) -> None:
    if not name:
        dropped = ", ".join(session.attached)
        session.attached.clear()
        session.screen.notice(
            f"{dropped}: taken back." if dropped else "No file is attached. /attach FILE attaches one."
        )
        return
    path = _expanded(name)
    try:
        if not path.is_file():
            raise ConversationError(f"{path} is not a file. Give a text file.")
        if path.stat().st_size > _MAX_ATTACHED:
            raise ConversationError(f"{path} has more than {_MAX_ATTACHED >> 20} MiB. Attach the part that matters.")
        content = path.read_text("utf-8")
    except OSError as error:
        raise ConversationError(f"{path} cannot be read ({error.strerror}). Give another file.") from None
    except UnicodeDecodeError:
        raise ConversationError(f"{path} is not UTF-8 text. Only text can be attached.") from None
    session.attached[path.name] = content
    size = f"{len(content)} characters"
    with suppress(ServerError, KeyError, TypeError):  # another server has no such route
        count = session.runner.run(session.remote.post_json("/tokenize", {"model": session.model, "prompt": content}))
        size = f"{count['count']} tokens"
    session.screen.notice(f"{path.name}, {size}, is sent with the next message; /attach without a file removes it.")


def _compare(session: Session, text: str) -> None:
    *words, question = [*text.split(maxsplit=2), "", "", ""][:3]
    if not all("=" in word for word in words):
        raise ConversationError("Name two settings, then the question: /compare temperature=0 temperature=1 QUESTION")
    session.compare(words, question)


def _model(session: Session, name: str) -> None:
    names = session.models()
    if name and name not in names:
        raise ConversationError(f"The server has no model {name}. It lists: {', '.join(names)}.")
    session.model = name or session.model
    session.screen.notice("\n".join(f"{'*' if each == session.model else ' '} {each}" for each in names))


def _stats(session: Session, text: str) -> None:
    session.screen.notice(figures(session))


def _help(session: Session, text: str) -> None:
    lines = [f"{name:<8} {about}" for name, (_, about) in COMMANDS.items()]
    keys = [
        "",
        'Paste a message of several lines, or type it: a backslash at the end of a line, or """ before and after.',
        "Ctrl-C stops a response, Ctrl-D quits.",
    ]
    session.screen.notice("\n".join(lines + keys))


def _exit(session: Session, text: str) -> None:
    raise LeaveError


COMMANDS: dict[str, tuple[Callable[[Session, str], None], str]] = {
    "/system": (_system, "TEXT: set the system prompt; without TEXT, show it"),
    "/reset": (_reset, "start a new conversation; /reset all: also remove the system prompt"),
    "/attach": (_attach, "FILE: send a text file with the next message; without FILE, remove the attached files"),
    "/compare": (_compare, "seed=1 seed=2 QUESTION: two responses to compare; without QUESTION, to the last question"),
    "/save": (_save, "FILE.json or FILE.md: write the conversation"),
    "/load": (_load, "FILE.json: continue a saved conversation, or any list of messages"),
    "/model": (_model, "NAME: use another model of this server; without NAME, list them"),
    "/stats": (_stats, "times and tokens of the last response and of this chat"),
    "/help": (_help, "show this list"),
    "/exit": (_exit, "quit"),
}
