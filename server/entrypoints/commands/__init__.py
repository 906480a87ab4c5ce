"""The commands of `oarlock`: one file each, named as the command.

A command imports nothing heavy before it runs, and no tensors at all: what needs them is a program of its own.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from typing import Protocol, cast

_FIRST = ("serve", "config")  # in the help


class Command(Protocol):
    """Interface of a command's file."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Returns the exit code. Raises `UsageError`, `OptionError` or `StartupError`."""
        ...


def names() -> tuple[str, ...]:
    """Every command, in the order of the help."""
    found = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(found, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)))


def load(name: str) -> Command:
    """The command of this name."""
    return cast(Command, importlib.import_module(f"{__name__}.{name}"))
