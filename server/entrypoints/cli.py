"""The command line. Flags are generated from `Settings`; nothing heavy is imported before a command needs it.

Knows argparse and exit codes: 2 for a wrong command line, 3 for a wrong file or environment, else the command's own.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from server.config import vllm_flags
from server.config.options import Option, OptionError, nearest
from server.config.settings import OPTIONS, LoadedSettings, as_markdown, as_table, load_settings
from server.entrypoints import commands
from server.version import VERSION

EXIT_USAGE = 2
EXIT_CONFIGURATION = 3
_OWN_COMMANDS = ("serve", "config")
_CONFIG_HELP = "TOML file with the same names (environment: OARLOCK_CONFIG)"


class _UsageError(Exception):
    """The command line is wrong: one line of cause, one of fix."""

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(cause)
        self.cause = cause
        self.fix = fix


class Command(Protocol):
    """What a file in `server/commands/` offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


class _Parser(argparse.ArgumentParser):
    """Never prints usage at people who mistyped one word."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}.", f"`{self.prog} --help` lists what there is.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except _UsageError as error:
        return _explain(error.cause, error.fix, EXIT_USAGE)
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    name = next((word for word in arguments if not word.startswith("-")), None)
    others = _other_commands()
    known = (*_OWN_COMMANDS, *others)
    if name is not None and name not in known:
        near = nearest(name, known)
        fix = f"Did you mean `oarlock {near}`?" if near else "The commands are: " + ", ".join(known)
        raise _UsageError(f"Unknown command: {name}.", fix)
    if name in others:
        return _run_other(name, arguments)
    parser = _parser(others if name is None else ())
    try:
        arguments, notes = vllm_flags.take_out(arguments)
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise _unknown_flag(unknown[0])
        given = _given_flags(parsed) if parsed.command is not None else {}
    except OptionError as error:
        return _explain(error.cause, error.fix, EXIT_USAGE)
    if parsed.command is None:
        parser.print_help()
        return EXIT_USAGE
    if parsed.command == "config" and parsed.markdown:
        sys.stdout.write(as_markdown())
        return 0
    try:
        loaded = load_settings(given, config_file=parsed.config)
    except OptionError as error:
        return _explain(error.cause, error.fix, EXIT_CONFIGURATION)
    if parsed.command == "serve":
        _check_model_was_not_swallowed(given, loaded)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    return _serve(loaded) if parsed.command == "serve" else _show(loaded)


def _other_commands() -> tuple[str, ...]:
    """The commands that have a file of their own."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(commands.__path__)))


def _command(name: str) -> Command:
    return cast(Command, importlib.import_module(f"{commands.__name__}.{name}"))


def _run_other(name: str, arguments: list[str]) -> int:
    """Parse and run a command that has a file of its own."""
    from engine.errors import StartupError

    command = _command(name)
    parser = _Parser(prog="oarlock", allow_abbrev=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    own = subparsers.add_parser(name, help=command.HELP, description=command.HELP, allow_abbrev=False)
    command.add_arguments(own)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].split("=")[0]
        near = nearest(flag, [word for word in own._option_string_actions if word.startswith("--")])
        fix = f"Did you mean {near}?" if near else f"`oarlock {name} --help` lists all of them."
        raise _UsageError(f"Unknown flag or argument: {flag}.", fix)
    try:
        return command.run(parsed)
    except OptionError as error:
        return _explain(error.cause, error.fix, EXIT_USAGE)
    except StartupError as error:
        return _explain(error.cause, error.fix, error.exit_code)


def _serve(loaded: LoadedSettings) -> int:
    from engine.errors import StartupError
    from server.entrypoints.supervisor import serve

    try:
        return serve(loaded.settings)
    except StartupError as error:
        return _explain(error.cause, error.fix, error.exit_code)


def _show(loaded: LoadedSettings) -> int:
    rows = as_table(loaded)
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    return 0


def _explain(cause: str, fix: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(cause.split())}\nfix: {' '.join(fix.split())}\n")
    return code


def _parser(others: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of `serve` and `config`; `others` are listed in its help."""
    parser = _Parser(prog="oarlock", description="OpenAI-compatible, tensor-parallel inference.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"oarlock {VERSION}")
    commands_parser = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    serve = commands_parser.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model. Order of sources: flag > environment > file > default.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXIT_CODES,
    )
    config = commands_parser.add_parser(
        "config", help="show the settings and where each comes from", allow_abbrev=False
    )
    config.add_argument("action", nargs="?", choices=("show",), default="show", help="what to do with them")
    config.add_argument("--markdown", action="store_true", help="the table of the documentation instead")
    for target in (serve, config):
        target.add_argument("--config", metavar="FILE.toml", help=_CONFIG_HELP)
        _add_options(target, positional=target is serve)
    for name in others:
        commands_parser.add_parser(name, help=_command(name).HELP)
    return parser


def _add_options(parser: argparse.ArgumentParser, positional: bool) -> None:
    groups: dict[str, Any] = {}
    for described in OPTIONS.values():
        if described.group not in groups:
            groups[described.group] = parser.add_argument_group(described.group)
        group = groups[described.group]
        help_text = _help(described)
        if described.positional:
            if positional:
                group.add_argument(described.name, nargs="?", default=None, metavar="MODEL", help=help_text)
            else:
                group.add_argument(f"--{described.name}", dest=described.name, default=None, help=help_text)
        elif described.kind is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(described.flag, dest=described.name, default=None, action=action, help=help_text)
        else:
            names = [name for name in (described.flag, described.short) if name]
            metavar = described.type_name.upper().removesuffix(" …") if not described.choices else described.type_name
            nargs = "+" if described.many else None
            group.add_argument(*names, dest=described.name, default=None, nargs=nargs, metavar=metavar, help=help_text)


def _help(described: Option) -> str:
    parts = [f"default {described.default_text}", described.env]
    if described.example and not described.positional:
        parts.append(f"e.g. {described.usage}")
    return f"{described.help} ({'; '.join(parts)})".replace("%", "%%")


def _given_flags(parsed: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as typed values."""
    given = {}
    for described in OPTIONS.values():
        value = getattr(parsed, described.name)
        if value is None:
            continue
        if described.many:
            given[described.name] = described.from_texts(value)
        else:
            given[described.name] = value if described.kind is bool else described.from_text(value)
    return given


def _check_model_was_not_swallowed(given: dict[str, Any], loaded: LoadedSettings) -> None:
    """`--api-key KEY MODEL` reads both as keys; to serve the demo model then would be a surprise."""
    if loaded.settings.model is not None:
        return
    for described in OPTIONS.values():
        values = given.get(described.name, ())
        if described.many and (len(values) > 1 or (values and Path(values[-1]).exists())):
            raise _UsageError(
                f"There is no MODEL, and {described.flag} took {len(values)} value(s), of which the last may be it.",
                f"Write MODEL first: oarlock serve MODEL {described.flag} …; for the demo model, put the values into "
                f"{described.env}, with commas between them.",
            )


def _unknown_flag(word: str) -> _UsageError:
    flag = word.split("=")[0]
    if not flag.startswith("-"):
        return _UsageError(f"Unexpected argument: {word}.", "One MODEL is served at a time.")
    if flag == "--model":
        return _UsageError("MODEL is given without a flag, not as --model.", "Write oarlock serve MODEL.")
    known = [name for described in OPTIONS.values() for name in (described.flag, described.short) if name]
    known += [f"--no-{described.name.replace('_', '-')}" for described in OPTIONS.values() if described.kind is bool]
    near = nearest(flag, [*known, "--config", "--help", "--version"])
    fix = f"Did you mean {near}?" if near else "`oarlock serve --help` lists all of them."
    return _UsageError(f"Unknown flag: {flag}.", fix)


_EXIT_CODES = """exit codes:
  0  stopped in order                     5  a worker process died
  2  wrong command line                   6  a worker hung (--step-timeout)
  3  wrong configuration or model         7  --drain-timeout ran out, requests were lost
  4  out of memory at start               130, 143  stopped at once by a second Ctrl-C or SIGTERM"""


if __name__ == "__main__":
    sys.exit(main())
