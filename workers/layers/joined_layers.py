"""Decoder layers with Triton kernels: the kernel of each norm also computes the residual addition before it.

This crosses the borders of layers, because a launch costs as much as a pass over the rows. Results differ in rounding
from those of separate operations: an all-reduced output is float32, and is rounded once, together with the residual.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from oarlock.workers.attention.backend import LayerStep
from oarlock.workers.kernels.triton import availability
from oarlock.workers.layers.fused_layer import Layer
from oarlock.workers.layers.norm import RMSNorm


def has_join_kernels(device: torch.device) -> bool:
    """Return whether `device` has kernels for `run_joined`; without them, layers need more operations."""
    return availability.can_serve(device)


def can_join(layers: Sequence[Layer]) -> bool:
    """Return whether every branch reads its own norm of the residual, and no norm was wrapped (e.g. to record its
    output)."""
    branches = [branch for layer in layers for branch in layer.branches]
    plain = all(type(branch.norm) is RMSNorm and type(branch.post_norm) in (RMSNorm, type(None)) for branch in branches)
    in_turn = all(len(stage) == 1 for layer in layers for stage in layer.stages)
    in_turn = in_turn and not any(layer.scalar is not None or any(layer.sum_norms) for layer in layers)
    in_turn = in_turn and not any(layer.adds_held for layer in layers)
    return plain and in_turn and all(branch.scale == 1.0 for branch in branches)


def run_joined(layers: Sequence[Layer], last_norm: RMSNorm, hidden: Tensor, steps: Sequence[LayerStep]) -> Tensor:
    """Run `hidden` [T, hidden size] through the layers and `last_norm`; the shape stays. `steps`: one per layer."""
    branches = [(branch, step) for layer, step in zip(layers, steps, strict=True) for branch in layer.branches]
    normed = branches[0][0].norm(hidden)
    following = [*(branch.norm for branch, _ in branches[1:]), last_norm]
    for (branch, step), next_norm in zip(branches, following, strict=True):
        unrounded = branch.sublayer.unrounded(normed, step)
        hidden, normed = next_norm.add_and_norm(hidden, unrounded, branch.post_norm)
    return normed
