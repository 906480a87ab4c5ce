"""The flags of `oarlock plan` that `serve` has not, and what they mean. Imports nothing heavy: help is quick."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oarlock.server.cli.arguments import UsageError

_MOST = 1024  # replicas
_MEASURES, _PERCENTILES = ("ttft", "itl", "e2e"), (50, 95, 99)
_ROUTING = ("prefix", "least-loaded", "random")


def add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the machine")
    group.add_argument("--gpus", metavar="NxKIND", help="such as 2xH100, 2x4090 or, of a size alone, 2x24GB")
    group.add_argument("--cpu", action="store_true", help="this host without a GPU (default where --gpus is not given)")
    group.add_argument("--memory", metavar="SIZE", help="of each GPU, or of the host (default: what is free now)")
    group.add_argument(
        "--bandwidth", metavar="SIZE", help="of memory, bytes a second, such as 1008GB (default: known, or measured)"
    )
    group.add_argument("--tflops", metavar="N", help="of dense 16-bit products (default: known, or estimated)")


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of `--slo`: `ttft_p99` of at most so many seconds."""

    measure: str
    percent: int
    seconds: float

    def holds(self, report: Any) -> bool:
        """Whether a `FleetReport` holds the limit. Every request must have been served, too."""
        found = getattr(report, f"{self.measure}_s")
        value = 0.0 if found is None else getattr(found, f"p{self.percent}")
        return not report.refused + report.failed and value <= self.seconds


def add_simulation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation: a trace through replicas of the plan, in virtual time")
    group.add_argument(
        "--simulate", type=Path, metavar="TRACE", help="JSON lines, ours or Mooncake's, or a result of `bench serve`"
    )
    group.add_argument("--replicas", metavar="A..B", help="how many: 4, 1,2,8 or 1..64 (default 1..8)")
    group.add_argument("--slo", metavar="LIMITS", help="such as ttft_p99=1s,itl_p99=50ms: the fewest that hold them")
    group.add_argument("--routing", choices=_ROUTING, default=_ROUTING[0], help="to replicas (default prefix)")
    group.add_argument(
        "--calibrate", type=Path, nargs="+", action="extend", metavar="RESULT",
        help="`bench serve --output` files: their seconds a step",
    )  # fmt: skip


def parse_replicas(text: str | None) -> tuple[list[int], bool]:
    """Parse `--replicas`: the sizes, ascending, and whether those between may be left out. Raises `UsageError`."""
    text = "1..8" if text is None else text
    fix = "Write a number, several or a range, such as --replicas 4, --replicas 1,2,8 or --replicas 1..64."
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if match is not None:
        low, high = int(match[1]), int(match[2])
        if not 1 <= low <= high <= _MOST:
            raise UsageError(f"--replicas {text}: {low} to {high} is no range from 1 to {_MOST}.", fix)
        return list(range(low, high + 1)), True
    parts = text.split(",")
    if not all(re.fullmatch(r"\d{1,9}", part.strip()) for part in parts):
        raise UsageError(f"--replicas is {text!r}.", fix)
    sizes = sorted({int(part) for part in parts})
    if not 1 <= sizes[0] <= sizes[-1] <= _MOST:
        raise UsageError(f"--replicas {text}: not all are from 1 to {_MOST}.", fix)
    return sizes, False


def parse_slo(text: str | None) -> list[Limit]:
    """Parse `--slo`. Raises `UsageError`."""
    found = []
    for part in (text or "").split(",") if text is not None else []:
        match = re.fullmatch(r"\s*([a-z0-9]+)_p(\d+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", part)
        names = ", ".join(f"{name}_p{percent}" for name in _MEASURES for percent in _PERCENTILES)
        fix = f"Write NAME=TIME with s or ms, such as ttft_p99=1s,itl_p99=50ms; the names are {names}."
        if match is None:
            raise UsageError(f"--slo {text}: {part.strip()!r} is no limit.", fix)
        measure, percent, seconds = match[1], int(match[2]), float(match[3]) * (1e-3 if match[4] == "ms" else 1.0)
        if measure not in _MEASURES or percent not in _PERCENTILES:
            raise UsageError(f"--slo {text}: there is no measure {match[1]}_p{percent}.", fix)
        if seconds <= 0:
            raise UsageError(f"--slo {text}: {part.strip()} can never be held.", fix)
        found.append(Limit(measure, percent, seconds))
    return found
