"""Faults of Mamba 2 and of stages of branches, for `faults.py`."""

import math
from typing import Any

from pytest import MonkeyPatch
from torch import Tensor

from oarlock.workers.layers.gated_norm import GatedNorm
from oarlock.workers.models.decoder import DecoderLayer
from oarlock.workers.recurrent import operations
from tests.golden.mutations import with_init


def b_and_c_swapped(patch: MonkeyPatch) -> None:
    recurrence = operations.mamba2

    def patched(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *others: Any) -> Tensor:
        return recurrence(x, dt, a, c, b, *others)

    patch.setattr(operations, "mamba2", patched)


def steps_without_limits(patch: MonkeyPatch) -> None:
    steps = operations.mamba_steps
    patch.setattr(operations, "mamba_steps", lambda dt, bias, least, most: steps(dt, bias, 0.0, math.inf))


def norm_of_the_ranks_own_heads(patch: MonkeyPatch) -> None:
    """Each rank norms its heads by their own squares, though other ranks have heads of the same group."""
    patch.setattr(GatedNorm, "_squares_of_groups", lambda self, squares: squares.unflatten(1, (self.groups, -1)))


def branches_of_a_stage_in_turn(patch: MonkeyPatch) -> None:
    with_init(patch, DecoderLayer, "stages", lambda layer: [(branch,) for branch in layer.branches])
    with_init(patch, DecoderLayer, "sum_norms", lambda layer: [None] * len(layer.branches))
