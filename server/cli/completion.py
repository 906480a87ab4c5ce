"""`oarlock completion SHELL`: what a shell needs to complete commands, flags and their values.

The script is made from the parsers, so it knows what they know; nothing is run while the user types.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass

HELP = "print a script that lets bash, zsh or fish complete commands and flags"
_EPILOG = """to use it:
  bash  oarlock completion bash > ~/.local/share/bash-completion/completions/oarlock
  zsh   oarlock completion zsh > "${fpath[1]}/_oarlock", then a new shell with compinit
  fish  oarlock completion fish > ~/.config/fish/completions/oarlock.fish"""
_SHELLS = ("bash", "zsh", "fish")
_FILES = re.compile(r"FILE|PATH|MODEL|DIR|STRING")  # in a metavar: what may be a file


@dataclass(frozen=True, slots=True)
class Words:
    """Words that may follow `path`, the names of a command and of its subcommands; `()`: `oarlock` alone."""

    path: tuple[str, ...]
    commands: dict[str, str]  # name -> what it does
    flags: dict[str, str]
    values: dict[str, tuple[str, ...]]  # of flags that take one, by every name of the flag; (): nothing is known of it
    files: frozenset[str]  # flags whose value may be a file
    takes_file: bool  # as an argument of its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))


def run(arguments: argparse.Namespace) -> int:
    from oarlock.server.cli.main import whole_parser

    found = list(_walk(whole_parser(), ()))
    sys.stdout.write({"bash": as_bash, "zsh": as_zsh, "fish": as_fish}[arguments.shell](found))
    return 0


def _walk(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[Words]:
    commands: dict[str, str] = {}
    flags: dict[str, str] = {}
    values: dict[str, tuple[str, ...]] = {}
    children: dict[str, argparse.ArgumentParser] = {}
    files: set[str] = set()
    takes_file = False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            children = dict(action.choices)
            commands = {choice.dest: choice.help or "" for choice in action._choices_actions}
            continue
        if not action.option_strings:
            commands |= dict.fromkeys(map(str, action.choices or ()), "")
            takes_file = takes_file or bool(_FILES.search(str(action.metavar or "")))
        choices = tuple(map(str, action.choices or ())) or _choices_in(str(action.metavar or ""))
        for name in action.option_strings:
            flags[name] = " ".join((action.help or "").replace("%%", "%").split("(default")[0].split())
            if choices or action.nargs != 0:
                values[name] = choices
            if not choices and _FILES.search(str(action.metavar or "")):
                files.add(name)
    yield Words(path, commands, flags, values, frozenset(files), takes_file)
    for name, child in children.items():
        yield from _walk(child, (*path, name))


def _choices_in(metavar: str) -> tuple[str, ...]:
    """Choices of a metavar such as `auto|cpu|cuda`."""
    return tuple(metavar.split("|")) if re.fullmatch(r"[\w.-]+(\|[\w.-]+)+", metavar) and metavar.islower() else ()


def _cases(found: list[Words]) -> Iterator[tuple[str, Words]]:
    for words in found:
        yield " ".join(words.path), words


def as_bash(found: list[Words]) -> str:
    """Completion script for bash 4 and later."""
    lines = [
        "# Completion of oarlock for bash.",
        "_oarlock() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" path="" each next',
        "    COMPREPLY=()",
        '    for each in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        '        next="${path:+$path }$each"',
        f'        case "$next" in {_alternatives(found)}) path="$next" ;; esac',
        "    done",
        '    case "$path:$before" in',
    ]
    for path, words in _cases(found):
        for flag, choices in words.values.items():
            kind = "-f" if flag in words.files else f"-W {shlex.quote(' '.join(choices))}"
            reply = f'COMPREPLY=($(compgen {kind} -- "$word"))'
            lines.append(f"        {shlex.quote(f'{path}:{flag}')}) {reply}; return ;;")
    lines += ["    esac", '    case "$path" in']
    for path, words in _cases(found):
        names = shlex.quote(" ".join([*words.commands, *words.flags]))
        files = ' $([[ $word == -* ]] || compgen -f -- "$word")' if words.takes_file else ""
        lines.append(f'        {shlex.quote(path)}) COMPREPLY=($(compgen -W {names} -- "$word"){files}) ;;')
    lines += [
        "    esac",
        "}",
        "complete -o filenames -F _oarlock oarlock",
    ]
    return "\n".join(lines) + "\n"


def _alternatives(found: list[Words]) -> str:
    return "|".join(shlex.quote(path) for path, _ in _cases(found) if path)


def as_zsh(found: list[Words]) -> str:
    """Completion script for zsh with compinit, which shows what each word does."""
    lines = [
        "#compdef oarlock",
        "_oarlock() {",
        '    local where="" each next',
        "    local -a found",
        '    for each in "${(@)words[2,CURRENT-1]}"; do',
        '        next="${where:+$where }$each"',
        f'        case "$next" in ({_alternatives(found)}) where="$next" ;; esac',
        "    done",
        '    case "$where:${words[CURRENT-1]}" in',
    ]
    for path, words in _cases(found):
        for flag, choices in words.values.items():
            reply = "_files" if flag in words.files else f"compadd -- {shlex.join(choices)}" if choices else ":"
            lines.append(f"        ({shlex.quote(f'{path}:{flag}')}) {reply}; return ;;")
    lines += ["    esac", '    case "$where" in']
    for path, words in _cases(found):
        known = [
            f"{name.replace(':', chr(92) + ':')}:{about}" for name, about in (words.commands | words.flags).items()
        ]
        lines.append(f"        ({shlex.quote(path)}) found=({shlex.join(known)}) ;;")
    lines += ["    esac", "    _describe 'oarlock' found || _files", "}", '_oarlock "$@"']
    return "\n".join(lines) + "\n"


def as_fish(found: list[Words]) -> str:
    """Completion script for fish 3 and later."""
    lines = ["# Completion of oarlock for fish."]
    for words in found:
        seen = [f"__fish_seen_subcommand_from {name}" for name in words.path]
        if not words.path:
            seen = ["__fish_use_subcommand"]
        elif words.commands:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(words.commands)}")
        begin = f"complete -c oarlock -n {shlex.quote('; and '.join(seen))}"
        for name, about in words.commands.items():
            lines.append(f"{begin} -f -a {shlex.quote(name)} -d {_fish(about)}")
        for flag, about in words.flags.items():
            kind = (
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"
            )
            choices = words.values.get(flag)
            value = "" if choices is None else " -r -F" if flag in words.files else " -x"
            value += f" -a {shlex.quote(' '.join(choices))}" if choices else ""
            lines.append(f"{begin} {kind}{value} -d {_fish(about)}")
    return "\n".join(lines) + "\n"


def _fish(text: str) -> str:
    """Put a text in single quotes, for which fish has an escape."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
