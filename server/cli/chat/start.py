"""The run of a chat: find or start its server, then handle one question from a pipe, or run until the user leaves."""

import argparse
import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.server.cli.arguments import UsageError
from oarlock.server.cli.chat.own_server import OwnServer, own_flag
from oarlock.server.cli.chat.session import COMMANDS, Conversation, ConversationError, LeaveError, Session, run_command
from oarlock.server.cli.chat.terminal import History, LineEditor, history_file, make_screen
from oarlock.server.cli.remote import DEFAULT_URL, Remote, ServerError, given_key, is_bare_address, is_url
from oarlock.server.hub.local_model import find_local
from oarlock.server.launch.child_process import signals_handled

_SAMPLING = ("temperature", "top_p", "max_tokens", "seed")


def chat(arguments: argparse.Namespace) -> int:
    """Run `oarlock chat`. Returns the exit code. Raises `UsageError` and `StartupError`."""
    flags = _serve_flags(arguments)
    conversation = _conversation(arguments)
    interactive = sys.stdin.isatty()
    question = "" if interactive else _question()
    # SIGTERM and a closed terminal exit in order, so that a server that was started is ended.
    with (
        signals_handled((signal.SIGTERM, signal.SIGHUP), lambda number, frame: sys.exit(128 + number)),
        ExitStack() as stack,
    ):
        runner = stack.enter_context(asyncio.Runner())
        remote, own = _server(arguments.target, flags, runner, stack)
        stack.callback(remote.close)
        try:
            model = _model(runner.run(remote.models()), arguments.model)
        except ServerError as error:
            raise error.as_startup_error() from None
        sampling = {name: value for name in _SAMPLING if (value := getattr(arguments, name)) is not None}
        session = Session(remote, model, make_screen(interactive=interactive), runner, sampling, conversation)
        if not interactive:
            return _ask_once(session, question)
        kept = None if arguments.no_history else history_file()
        with LineEditor(list(COMMANDS), None if kept is None else History(kept)) as editor:
            return _converse(session, editor, own)


def _ask_once(session: Session, question: str) -> int:
    response = session.ask(question)
    if response is None:
        return 1
    return 130 if response.is_stopped else 0 if response.finish_reason == "stop" else 1


def _converse(session: Session, editor: LineEditor, own: OwnServer | None) -> int:
    session.screen.notice(f"{session.model} at {session.remote.url}; /help lists the commands, Ctrl-D quits")
    while True:
        try:
            text = editor.read()
            if text.startswith("/") and ("\n" not in text.strip() or text.split()[0] in COMMANDS):
                run_command(session, text)
            elif text.strip():
                response = session.ask(text.strip())
                if response is None and own is not None and own.has_ended:
                    raise own.failure()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            session.screen.notice("(Ctrl-D or /exit quits)")
        except UnicodeDecodeError:
            session.screen.problem("The input is not UTF-8: set the terminal to UTF-8.")
        except EOFError:
            sys.stdout.write("\n")
            return 0
        except LeaveError:
            return 0


def _server(
    target: str | None, flags: list[str], runner: asyncio.Runner, stack: ExitStack
) -> tuple[Remote, OwnServer | None]:
    """Return the server named by `target`, or the usual one if it responds, or a new one."""
    if target is not None and is_url(target):
        if flags:
            raise UsageError(
                "--serve-flags apply to a server that is started.", f"Leave them out, or leave out {target}."
            )
        return Remote(target, given_key()), None
    if target is None and not flags:
        remote = Remote(DEFAULT_URL, given_key())
        try:
            runner.run(remote.models())
        except ServerError as error:
            remote.close()
            if error.status is not None:
                raise error.as_startup_error() from None
        else:
            return remote, None
    if target is not None and is_bare_address(target):
        _check_model(target)
    own = stack.enter_context(OwnServer(target, flags))
    with _progress_line() as show:
        show("starting a server")
        own.wait(show)
    return Remote(own.url, own.key), own


def _check_model(target: str) -> None:
    """Refuse an address without a scheme, unless a model of this machine has that name."""
    try:
        found = find_local(target)
    except StartupError:
        found = None
    if found is None:
        raise UsageError(
            f"{target} is not a model on this machine, and the address of a server needs a scheme.",
            f"Write http://{target}",
        )


@contextmanager
def _progress_line() -> Generator[Any]:
    """Yield a function that rewrites one line of the terminal, and remove the line at the end. Shows nothing
    elsewhere."""
    terminal = sys.stderr if sys.stderr.isatty() else None

    def show(text: str) -> None:
        if terminal is not None:
            terminal.write(f"\r\x1b[K{text[: os.get_terminal_size(terminal.fileno()).columns - 1]}")
            terminal.flush()

    try:
        yield show
    finally:
        show("")


def _model(names: list[str], wanted: str | None) -> str:
    if wanted is not None and wanted not in names:
        raise StartupError(f"The server has no model {wanted!r}.", f"It lists: {', '.join(names)}.")
    return wanted or names[0]


def _serve_flags(arguments: argparse.Namespace) -> list[str]:
    try:
        flags = shlex.split(arguments.serve_flags)
    except ValueError as error:
        raise UsageError(f"--serve-flags cannot be read: {error}.", "Close all quotation marks.") from None
    own = own_flag(flags)
    if own is not None:
        raise UsageError(
            f"{own} in --serve-flags: the chat sets it itself.", "Use `oarlock serve`, then `oarlock chat URL`."
        )
    return flags


def _conversation(arguments: argparse.Namespace) -> Conversation:
    conversation = Conversation()
    try:
        if arguments.load:
            conversation.load(arguments.load)
    except ConversationError as error:
        raise StartupError(f"--load: {error}", "Correct the file, or leave out --load.") from None
    conversation.system = arguments.system_prompt or conversation.system
    return conversation


def _question() -> str:
    try:
        text = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise StartupError(
            f"The standard input is not UTF-8: {error}.", "Convert it, for example with iconv."
        ) from None
    if not text:
        raise UsageError("The standard input is empty.", "Write: echo 'a question' | oarlock chat")
    return text
