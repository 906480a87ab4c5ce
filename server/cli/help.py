"""Help of the commands that take the flags of `serve`: a line for each option by groups, and all of it on request.

`--help` shows the first sentence of each option. `--help=all` shows everything, `--help=WORD` a group, an option, or
every option whose name or text has the word, as vLLM's does.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence

from oarlock.server.config.options import nearest

_END = re.compile(r"; |\. | \((?=default|environment|docs/)")
_COLON_AFTER = 20  # characters: what stands before a colon earlier than that is a value, not a sentence
_OF_HELP = "this list; --help=all: everything, --help=WORD: all of a group, of an option, or of those with this word"

Group = tuple[str, Sequence[argparse.Action]]


def first_sentence(text: str) -> str:
    """The beginning of a help text that says what an option is for, without values, defaults and exceptions."""
    sentence = _END.split(text.replace("%%", "%"), maxsplit=1)[0]
    at = sentence.find(": ", _COLON_AFTER)
    return sentence if at < 0 else sentence[:at]


def short_help(parser: argparse.ArgumentParser) -> str:
    """Usage, then a line for each option, by groups."""
    usage, description, epilog = (parser._get_formatter() for _ in range(3))
    usage.add_usage(None, [action for action in parser._actions if not action.option_strings], ())
    description.add_text(parser.description)
    epilog.add_text(parser.epilog)
    parts = [f"{usage.format_help().strip()} [OPTIONS]", description.format_help().strip()]
    for title, actions in _groups(parser):
        names = [_shown(action) for action in actions]
        width = max(map(len, names))
        texts = [
            _OF_HELP if isinstance(action, argparse._HelpAction) else first_sentence(action.help or "")
            for action in actions
        ]
        lines = [f"  {name:<{width}}  {text}" for name, text in zip(names, texts, strict=True)]
        parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(part for part in [*parts, epilog.format_help().strip()] if part) + "\n"


def help_about(parser: argparse.ArgumentParser, word: str) -> str | None:
    """Everything about the group or the option that `word` names, else about those that have it; None: nothing does."""
    wanted = word.strip("- ").replace("_", "-").lower()
    groups = _groups(parser)
    found = (
        [group for group in groups if group[0].lower().replace(" ", "-") == wanted.replace(" ", "-")]
        or _those(groups, lambda action: wanted in _names(action))
        or _those(groups, lambda action: any(wanted in text.lower() for text in (*_names(action), action.help or "")))
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
    """Fix where `help_about` knows nothing."""
    groups = _groups(parser)
    near = nearest(word.strip("-"), [name for _, actions in groups for action in actions for name in _names(action)])
    known = ", ".join(title for title, _ in groups)
    return f"Did you mean --help={near}?" if near else f"The groups are: {known}; --help=all says everything."


def _groups(parser: argparse.ArgumentParser) -> list[Group]:
    return [(group.title or "", group._group_actions) for group in parser._action_groups if group._group_actions]


def _those(groups: Sequence[Group], is_wanted: Callable[[argparse.Action], bool]) -> list[Group]:
    found = [(title, [action for action in actions if is_wanted(action)]) for title, actions in groups]
    return [(title, actions) for title, actions in found if actions]


def _shown(action: argparse.Action) -> str:
    if isinstance(action, argparse._HelpAction):
        return ", ".join(action.option_strings)
    return next((name for name in action.option_strings if name.startswith("--")), str(action.metavar or action.dest))


def _names(action: argparse.Action) -> list[str]:
    return [name.lstrip("-").lower() for name in action.option_strings or [str(action.metavar or action.dest)]]
