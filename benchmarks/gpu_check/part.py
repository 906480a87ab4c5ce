"""Parts of the check: their description, the device that they run on, and the rows of their results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

OURS = ("benchmarks", "oarlock", "tests")
FIX = "install it, or name a folder that has its wheel: --wheels DIR"
_MISSING = re.compile(r"\bModuleNotFoundError: (No module named '([^'.]+)[^']*')")
_BEFORE = "During handling of the above exception, another exception occurred:"


class NotHere(Exception):
    """This machine lacks what a part needs. The message says what."""


def missing_package(output: str) -> str | None:
    """The package for want of which a program ended, and the fix, from what it printed. None: it ended otherwise.

    A package whose absence was dealt with is no reason, nor is a file of ours that is missing.
    """
    found = _MISSING.search(output.rpartition(_BEFORE)[2])
    return None if found is None or found[2] in OURS else f"{found[1]}: {FIX}"


@dataclass(frozen=True, slots=True)
class Where:
    """The device that is checked. On the CPU shapes are tiny: the logic is tried, and no figure means anything."""

    device: str  # cuda | cpu

    @property
    def is_tiny(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Row:
    """Row of results. `ok`: of a check; None: a figure, which is neither right nor wrong."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)  # name with its unit -> number
    ok: bool | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the check. `limit_s`: it is ended after so many seconds. With fewer than `needs_devices` it is left
    out."""

    name: str
    run: Callable[[Where], Iterator[Row]]
    limit_s: float = 120.0
    needs_devices: int = 1
