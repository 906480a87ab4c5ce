"""`oarlock completion SHELL`: a script that lets a shell complete commands, flags and their values.

shtab makes the script from the parsers, so it has the same content. Nothing is run while the user types.
"""

import argparse
import re
import sys
from collections.abc import Mapping

from oarlock.server.cli.arguments import first_sentence

HELP = "print a script that completes commands and flags in bash, zsh or fish"
EXAMPLE = "oarlock completion bash > ~/.local/share/bash-completion/completions/oarlock"
_EPILOG = """how to enable it:
  bash  oarlock completion bash > ~/.local/share/bash-completion/completions/oarlock
  zsh   oarlock completion zsh > "${fpath[1]}/_oarlock", then a new shell with compinit
  fish  oarlock completion fish > ~/.config/fish/completions/oarlock.fish"""
_SHELLS = ("bash", "zsh", "fish")
_FILES = re.compile(r"FILE|PATH|MODEL|DIR|STRING")  # metavars whose values may be files
_CHOICES = re.compile(r"[a-z0-9_.-]+(\|[a-z0-9_.-]+)+")  # a metavar such as `auto|cpu|cuda`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))


def run(arguments: argparse.Namespace) -> int:
    sys.stdout.write(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    import shtab

    from oarlock.server.cli.main import whole_parser

    parser = whole_parser()
    _describe(parser, shtab.FILE)
    return shtab.complete(parser, shell)


def _describe(parser: argparse.ArgumentParser, file: Mapping[str, object]) -> None:
    """Describe to shtab which values each argument may have; our own parser checks them elsewhere."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _describe(child, file)
            continue
        metavar = str(action.metavar or "")
        action.help = first_sentence(action.help or "").replace("%", "%%")
        if action.choices is None and _CHOICES.fullmatch(metavar):
            action.choices = metavar.split("|")
        elif _FILES.search(metavar):
            setattr(action, "complete", file)  # noqa: B010 - shtab's own attribute
