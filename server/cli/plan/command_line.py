"""The `oarlock serve` command that a plan is for: the flags that were given, and the sizes that were chosen."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import Any

from oarlock.server.config.settings import OPTIONS


def serve_command(arguments: argparse.Namespace, chosen: Mapping[str, Any]) -> str:
    """Write the `oarlock serve` command with the flags of `plan`. `chosen`: values of options that replace theirs."""
    words = ["oarlock", "serve"]
    if arguments.model is not None:
        words.append(arguments.model)
    if arguments.config is not None:
        words += ["--config", arguments.config]
    for option in OPTIONS.values():
        value = chosen.get(option.name, getattr(arguments, option.name, None))
        if option.positional or value is None:
            continue
        if option.kind is bool:
            words.append(option.flag if value else f"--no-{option.flag[2:]}")
        else:
            words += [option.flag, *(map(str, value) if option.many else [str(value)])]
    return shlex.join(words)
