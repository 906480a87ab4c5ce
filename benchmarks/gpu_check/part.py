"""What a part of the check is, and the process that runs one: a row of results is written as soon as it is there.

python -m benchmarks.gpu_check.part NAME --device cuda --rows FILE      # by benchmarks/gpu_check/__main__.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


class NotHere(Exception):
    """This machine lacks what a part needs. The message says what."""


@dataclass(frozen=True, slots=True)
class Where:
    """The device that is checked. On the CPU shapes are tiny: the logic is tried, and no figure means anything."""

    device: str  # cuda | cpu

    @property
    def is_tiny(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Row:
    """One result. `ok`: of a check; None: a figure, which is neither right nor wrong."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)  # name with its unit -> number
    ok: bool | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """`needs_devices`: fewer, and it is left out. `is_check`: it says whether the program is right, not how fast."""

    name: str
    run: Callable[[Where], Iterator[Row]]
    is_check: bool
    needs_devices: int = 1
