"""The start and the end of every program with random inputs: its seed, and its problems. A file of its own, since both
programs of this folder need it and neither may import the other's targets."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence

_MOST_SHOWN, _LONGEST = 200, 600  # problems, and characters of a problem


def seed_of(given: argparse.Namespace) -> int:
    """Return `--seed`, or a new seed without it, and print it."""
    seed = given.seed if given.seed is not None else secrets.randbelow(2**31)
    print(f"==> seed {seed}", flush=True)
    return seed


def finish(problems: Sequence[str], seed: int) -> int:
    """Print the problems that a run with `seed` found. Return the exit status: 1 if there are any."""
    for problem in problems[:_MOST_SHOWN]:
        print(f"    FAILED  {problem[:_LONGEST]}")
    print(f"\n{len(problems)} problems; again with --seed {seed}" if problems else "\nall well")
    return 1 if problems else 0
