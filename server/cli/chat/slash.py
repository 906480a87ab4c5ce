"""The commands that are typed in a chat: a slash and a word."""

from __future__ import annotations

from collections.abc import Callable

from oarlock.server.cli.chat.conversation import ConversationError
from oarlock.server.cli.chat.session import Session, figures
from oarlock.server.cli.remote import ServerError
from oarlock.server.config.options import nearest


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
        raise ConversationError("/reset forgets the messages, /reset all the system prompt too.")
    session.conversation.reset()
    kept = " The system prompt stays." if session.conversation.system else ""
    session.screen.notice(f"A new conversation.{kept}")


def _save(session: Session, name: str) -> None:
    path = session.conversation.save(name, session.model)
    session.screen.notice(f"{len(session.conversation.messages)} messages are in {path}.")


def _load(session: Session, name: str) -> None:
    count = session.conversation.load(name)
    session.screen.notice(f"{count} messages are loaded; the next one goes on from there.")


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
        'A backslash at the end of a line, or """ before and after, makes a message of several lines.',
        "Ctrl-C stops an answer, Ctrl-D leaves.",
    ]
    session.screen.notice("\n".join(lines + keys))


def _exit(session: Session, text: str) -> None:
    raise LeaveError


COMMANDS: dict[str, tuple[Callable[[Session, str], None], str]] = {
    "/system": (_system, "TEXT: set the system prompt; without TEXT, show it"),
    "/reset": (_reset, "begin a new conversation; /reset all: without the system prompt too"),
    "/save": (_save, "FILE.json: write the conversation"),
    "/load": (_load, "FILE.json: go on with one that was written, or with any list of messages"),
    "/model": (_model, "NAME: ask another model of this server; without NAME, list them"),
    "/stats": (_stats, "times and tokens of the last answer and of this chat"),
    "/help": (_help, "this list"),
    "/exit": (_exit, "leave"),
}
