"""The command line: finds the command, runs it, and turns errors into lines of cause and fix and an exit code.

Exit codes: 2 for a wrong command line, 3 for a wrong file or environment, 141 if nobody reads the output any more, else
the command's own.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import cast

from oarlock.base.errors import StartupError
from oarlock.base.python_child import run_while_read
from oarlock.server.cli.arguments import Command, Parser, UsageError, add_command, opening, parse
from oarlock.server.config.options import OptionError, nearest
from oarlock.server.version import VERSION

# In the order of the help. Each is a module of this folder, or shares a module with another command.
COMMANDS = (
    "serve", "config", "batch", "bench", "chat", "completion", "doctor", "explain", "migrate", "models", "plan", "pull",
    "replay", "snippets", "top", "verify",
)  # fmt: skip
# Commands that share a module, as `OneCommand`s.
_SHARED = {"models": "models", "pull": "models", "verify": "verify", "replay": "verify"}
EXIT_USAGE = 2
_ABOUT = "Oarlock serves language models over the OpenAI API, on as many processes as it is given."
_FIRST = f"""{_ABOUT} Type first:

  oarlock serve           a small model that ships with it; then open http://127.0.0.1:8000/
  oarlock chat            ask it something here, in another terminal
  oarlock serve MODEL     a model of yours: a directory, a GGUF file, or an id of the hub
  oarlock doctor          what this machine has, and what would stand in the way

`oarlock --help` lists all commands, and `oarlock COMMAND --help` says what each takes.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_while_read(lambda: _run_explained(words))


def _run_explained(words: list[str]) -> int:
    try:
        return _run(words)
    except (UsageError, OptionError) as error:
        return _explain(error.cause, error.fix, EXIT_USAGE)
    except StartupError as error:
        return _explain(error.cause, error.fix, error.exit_code)
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        near = nearest(name, COMMANDS)
        fix = f"Did you mean `oarlock {near}`?" if near else "The commands are: " + ", ".join(COMMANDS)
        raise UsageError(f"Unknown command: {name}.", fix)
    parser, parser_of = _parsers()
    command = None if name is None else parser_of[name].chosen(words[words.index(name) + 1 :])
    parsed = parse(parser, command, words)
    if name is None:
        sys.stdout.write(_FIRST)
        return EXIT_USAGE
    return _load(name).run(parsed)


def whole_parser() -> Parser:
    """Return the parser of the whole command line, with the parsers of all commands below it."""
    return _parsers()[0]


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the whole command line, and the parser of each command."""
    parser = Parser(prog="oarlock", allow_abbrev=False)
    parser.opening = opening(_ABOUT, "oarlock serve", "oarlock chat")
    parser.add_argument("--version", action="version", version=f"oarlock {VERSION}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    return parser, {name: add_command(subparsers, name, _load(name)) for name in COMMANDS}


def _load(name: str) -> Command:
    module = importlib.import_module(f"oarlock.server.cli.{_SHARED.get(name, name)}")
    return cast(Command, getattr(module, name.upper()) if name in _SHARED else module)


def _explain(cause: str, fix: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(cause.split())}\nfix: {' '.join(fix.split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
