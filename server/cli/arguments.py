"""Parsers of the command line, and their help. The flags of `serve` and `config` are generated from `Settings`.

Each help begins with the purpose of the command and an example. A mistake is reported as one line of cause and one line
of fix, without the usage; errors of numbers name the limit. If a command takes the flags of `serve`, `--help` shows the
first sentence of each option, by groups. `--help=all` shows all text, and `--help=WORD` a group, an option, or every
option whose name or text has the word, as in vLLM.
"""

import argparse
import itertools
import math
import re
import sys
import textwrap
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from oarlock.base.errors import StartupError
from oarlock.server.config import vllm_flags
from oarlock.server.config.option_checks import removed
from oarlock.server.config.options import Option, OptionError, format_size, nearest
from oarlock.server.config.settings import OPTIONS
from oarlock.server.config.sources import LoadedSettings, load_settings

_END = re.compile(r"; |\. | \((?=default|environment|docs/)")
_DEFAULT = re.compile(r"\(default: ([^()]*)\)")
_WIDTH = 100  # characters of a line
_SHORT_WIDTH = 120  # characters of a line of the short help
_MOST_VALUES = 70  # maximum characters of the values in the short help
_COLON_AFTER = 20  # characters; text before an earlier colon is a value, not a sentence
_HELP_HELP = "show this help; --help=all: all options; --help=WORD: a group, an option, or options with the word"

KINDS_OF_MODEL = OPTIONS["model"].help.partition(";")[0]  # description of the kinds of MODEL

Group = tuple[str, Sequence[argparse.Action]]
_CONFIG_HELP = "TOML file with the same names (environment: OARLOCK_CONFIG)"
# Returns the command line with our own flags, and a note for each flag of another server that asks for our default.
Rewrite = Callable[[Sequence[str]], tuple[list[str], list[str]]]


def first_sentence(text: str) -> str:
    """Return the beginning of a help text, which describes the option without values, defaults and exceptions."""
    sentence = _END.split(text.replace("%%", "%"), maxsplit=1)[0]
    at = sentence.find(": ", _COLON_AFTER)
    return sentence if at < 0 else sentence[:at]


def short_help(parser: argparse.ArgumentParser) -> str:
    """Return the usage, then a line for each option, by groups."""
    usage, epilog = (parser._get_formatter() for _ in range(2))
    usage.add_usage(None, [action for action in parser._actions if not action.option_strings], ())
    epilog.add_text(parser.epilog)
    parts = [f"{usage.format_help().strip()} [OPTIONS]"]
    for title, actions in _groups(parser):
        names = [_shown(action) for action in actions]
        width = max(map(len, names))
        lines = [
            line
            for name, action in zip(names, actions, strict=True)
            for line in _lines_of(f"  {name:<{width}}  ", action)
        ]
        parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(part for part in [*parts, epilog.format_help().strip()] if part) + "\n"


def _lines_of(start: str, action: argparse.Action) -> list[str]:
    """Return the lines of one option in the short help: its first sentence, then its default and allowed values."""
    if isinstance(action, argparse._HelpAction):
        return [start + _HELP_HELP]
    line = start + first_sentence(action.help or "")
    described = OPTIONS.get(action.dest)
    if described is None:
        return [line]
    values = described.values_text
    if len(values) > _MOST_VALUES:
        values = f"--help={described.name.replace('_', '-')} lists the others"
    note = f"[default: {_default_of(described)}{f'; {values}' if values else ''}]"
    if len(line) + 1 + len(note) <= _SHORT_WIDTH:
        return [f"{line} {note}"]
    return [line, " " * len(start) + note]


def _default_of(described: Option) -> str:
    """Return the default as the short help shows it. The wording of the option's text is preferred if it is more
    specific."""
    if described.kind is bool:
        return "on" if described.default else "off"
    if described.is_bytes and described.default is not None:
        return format_size(described.default).replace(".0 ", " ")
    in_words = _DEFAULT.search(described.help)
    return in_words[1] if in_words and described.default in (None, ()) else described.default_text


def help_about(parser: argparse.ArgumentParser, word: str) -> str | None:
    """Return the help about the group or the option named `word`, else about options that contain it; None if none
    does."""
    wanted = word.strip("- ").replace("_", "-").lower()
    groups = _groups(parser)
    found = (
        [group for group in groups if group[0].lower().replace(" ", "-") == wanted.replace(" ", "-")]
        or _filtered(groups, lambda action: wanted in _names(action))
        or _filtered(
            groups, lambda action: any(wanted in text.lower() for text in (*_names(action), action.help or ""))
        )
    )
    if not wanted or not found:
        return None
    formatter = parser._get_formatter()
    for title, actions in found:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def fix_of(parser: argparse.ArgumentParser, word: str) -> str:
    """Return the fix if `help_about` finds nothing."""
    groups = _groups(parser)
    near = nearest(word.strip("-"), [name for _, actions in groups for action in actions for name in _names(action)])
    known = ", ".join(title for title, _ in groups)
    return f"Did you mean --help={near}?" if near else f"The groups are: {known}; --help=all shows every option."


def _groups(parser: argparse.ArgumentParser) -> list[Group]:
    return [(group.title or "", group._group_actions) for group in parser._action_groups if group._group_actions]


def _filtered(groups: Sequence[Group], is_wanted: Callable[[argparse.Action], bool]) -> list[Group]:
    found = [(title, [action for action in actions if is_wanted(action)]) for title, actions in groups]
    return [(title, actions) for title, actions in found if actions]


def _shown(action: argparse.Action) -> str:
    if isinstance(action, argparse._HelpAction):
        return ", ".join(action.option_strings)
    return next((name for name in action.option_strings if name.startswith("--")), str(action.metavar or action.dest))


def _names(action: argparse.Action) -> list[str]:
    return [name.lstrip("-").lower() for name in action.option_strings or [str(action.metavar or action.dest)]]


class UsageError(Exception):
    """The command line is wrong: a line of cause and a line of fix."""

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(cause)
        self.cause = cause
        self.fix = fix


class Command(Protocol):
    """Interface of a command's module."""

    @property
    def HELP(self) -> str: ...

    @property
    def EXAMPLE(self) -> str: ...

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Run the command. Returns the exit code. Raises `UsageError`, `OptionError` or `StartupError`."""
        ...


class OneCommand(NamedTuple):
    """A command that shares its module with others."""

    HELP: str
    EXAMPLE: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UsageError` instead of printing the usage and exiting."""

    opening = ""  # first lines of the help
    takes_settings = False
    rewrite: Rewrite | None = None  # takes other servers' flags out of the command line
    help_with_unknown: str | None = None  # fix for an unknown flag or argument, if there is a usual mistake

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.children: dict[str, Parser] = {}  # subcommands by name

    def chosen(self, words: Sequence[str]) -> "Parser":
        """Return this parser, or the child that the words name."""
        name = next((word for word in words if not word.startswith("-")), None)
        if not self.children or name is None:
            return self
        if name in self.children:
            return self.children[name]
        near = nearest(name, list(self.children))
        known = "The commands are: " + ", ".join(self.children)
        raise UsageError(
            f"Unknown command: {self.prog} {name}.", f"Did you mean `{self.prog} {near}`?" if near else known
        )

    def format_help(self) -> str:
        return self.opening + (short_help(self) if self.takes_settings else super().format_help())

    def help_about(self, word: str) -> str:
        """Return the help of `--help=WORD`. Raises `UsageError`."""
        found = self.opening + super().format_help() if word == "all" else help_about(self, word)
        if found is None:
            raise UsageError(f"--help={word}: no group or option matches.", fix_of(self, word))
        return found

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", f"`{self.prog} --help` lists the options.")


def opening(text: str, *examples: str) -> str:
    """Return the beginning of a help: its purpose, in lines that fit a terminal, and examples."""
    return "\n".join([*textwrap.wrap(text, _WIDTH), "", *(f"  {example}" for example in examples), "", ""])


def add_command(subparsers: Any, name: str, command: Command) -> Parser:
    """Add a command's parser to the parsers of its parent."""
    parser: Parser = subparsers.add_parser(name, help=command.HELP, allow_abbrev=False)
    command.add_arguments(parser)
    text = parser.description or f"{command.HELP[0].upper()}{command.HELP[1:]}."
    parser.description, parser.opening = None, opening(text, command.EXAMPLE)
    return parser


def parse(parser: Parser, command: Parser | None, words: list[str]) -> argparse.Namespace:
    """Parse the whole command line, of which `command` parses a part. Raises `UsageError` and `OptionError`."""
    if command is None:
        return parser.parse_args(words)
    asked = next((word.partition("=")[2] for word in words if word.startswith("--help=")), None)
    if asked is not None and command.takes_settings:
        sys.stdout.write(command.help_about(asked))
        parser.exit()
    words, notes = (words, []) if command.rewrite is None else command.rewrite(words)
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        raise (_unknown_setting if command.takes_settings else _unknown_flag)(command, unknown[0])
    parsed.notes = notes
    return parsed


def add_settings(parser: argparse.ArgumentParser, *, positional: bool, without: Container[str] = frozenset()) -> None:
    """Add `--config` and a flag for every option not in `without`. `positional`: MODEL is given without a flag."""
    assert isinstance(parser, Parser)
    parser.takes_settings, parser.rewrite = True, vllm_flags.take_out
    parser.add_argument("--config", metavar="FILE.toml", help=_CONFIG_HELP)
    groups: dict[str, Any] = {}
    for described in OPTIONS.values():
        if described.name in without:
            continue
        if described.group not in groups:
            groups[described.group] = parser.add_argument_group(described.group)
        _add_option(groups[described.group], described, positional)


def _add_option(group: Any, described: Option, positional: bool) -> None:
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
        metavar = described.type_name if described.choices else described.item_type_name.upper()
        # A flag that is given again adds to a list, such as the API keys, and replaces a single value.
        how: dict[str, Any] = {"action": "append", "nargs": "+"} if described.many else {}
        group.add_argument(*names, dest=described.name, default=None, metavar=metavar, help=help_text, **how)


def _help(described: Option) -> str:
    values = [] if described.kind is bool else [described.values_text]
    parts = [f"default {described.default_text}", *filter(None, values), described.env]
    if described.example and not described.positional:
        parts.append(f"e.g. {described.usage}")
    return f"{described.help} ({'; '.join(parts)})".replace("%", "%%")


def given_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the given flags as typed values. Raises `OptionError`."""
    given = {}
    for described in OPTIONS.values():
        value = getattr(parsed, described.name, None)
        if value is None:
            continue
        if described.many:
            given[described.name] = described.from_texts(itertools.chain.from_iterable(value))
        else:
            given[described.name] = value if described.kind is bool else described.from_text(value)
    return given


def loaded_settings(parsed: argparse.Namespace) -> LoadedSettings:
    """Return the flags joined with the environment and the file. Raises `OptionError` for a flag, else
    `StartupError`."""
    given = given_settings(parsed)
    try:
        return load_settings(given, config_file=parsed.config)
    except OptionError as error:
        raise StartupError(error.cause, error.fix) from None


def _unknown_flag(command: argparse.ArgumentParser, word: str, what: str = "flag or argument") -> UsageError:
    flag = word.split("=")[0]
    near = nearest(flag, list(command._option_string_actions))
    if isinstance(command, Parser) and command.help_with_unknown:
        return UsageError(f"Unknown {what}: {flag}.", command.help_with_unknown)
    fix = f"Did you mean {near}?" if near else f"`{command.prog} --help` lists every option."
    return UsageError(f"Unknown {what}: {flag}.", removed(flag) or fix)


def _unknown_setting(command: argparse.ArgumentParser, word: str) -> UsageError:
    flag = word.split("=")[0]
    if not flag.startswith("-"):
        takes_model = any(action.dest == "model" and not action.option_strings for action in command._actions)
        fix = "Give only one MODEL." if takes_model else f"`{command.prog} --help` lists the options."
        return UsageError(f"Unexpected argument: {word}.", fix)
    if flag == "--model":
        return UsageError("MODEL is a positional argument, not --model.", f"Write {command.prog} MODEL.")
    return _unknown_flag(command, word, "flag")


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a parser of integers from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < low or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{value} is out of range: it must be {limit}")
        return value

    return parse


def positive(text: str) -> float:
    """Parse a number above 0, or `inf`."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is out of range: it must be above 0")
    return value


def finite(text: str) -> float:
    """Parse a finite number above 0."""
    value = positive(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError("inf is out of range: it must be finite")
    return value


def not_negative(text: str) -> float:
    """Parse a finite number of at least 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is out of range: it must be finite and at least 0")
    return value


def below_one(text: str) -> float:
    """Parse a number of at least 0 and below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range: it must be at least 0 and below 1")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if math.isnan(value):
        raise argparse.ArgumentTypeError("nan is not a number")
    return value
