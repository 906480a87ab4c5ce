"""The layers of a decoder with every residual addition in the kernel of the norm that follows it.

Each half of a layer, attention or MLP, begins with a norm and ends with an addition. Where a launch costs as much as a
pass over the rows, the addition at the end of one half and the norm at the beginning of the next are one kernel, across
layers too. The layers' own `__call__` is the reference; results differ in when they are rounded: a sum over ranks comes
in float32, and is rounded once, with the residual.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.kernels.triton import availability
from oarlock.workers.layers.layer_halves import Block
from oarlock.workers.layers.norm import RMSNorm


def pays_off(device: torch.device) -> bool:
    """Whether there are kernels for it on `device`; without, layers compute the same in more operations."""
    return availability.can_serve(device)


def can_join(layers: Sequence[Block]) -> bool:
    """Whether no norm was replaced, by what records its result for example."""
    return all(type(norm) is RMSNorm for block in layers for norm in _norms(block) if norm is not None)


def run(
    layers: Sequence[Block],
    last_norm: RMSNorm,
    hidden: Tensor,
    angles: Sequence[tuple[Tensor, Tensor]],
    batch: ForwardBatch,
    kv: list[LayerKV],
    backend: AttentionBackend,
    plan: Any,
) -> Tensor:
    """`hidden` [T, hidden size] -> the same shape, after the last layer and `last_norm`.

    `angles`: cos and sin for each layer (`RotaryTable`). `plan`: what the backend's `prepare` returned for this step.
    """
    normed = layers[0].attention_norm(hidden)
    following = [*(block.attention_norm for block in layers[1:]), last_norm]
    for block, (cos, sin), pages, next_norm in zip(layers, angles, kv, following, strict=True):
        _, attention_post_norm, _, mlp_post_norm = _norms(block)
        mixed = block.attention.mixed(normed, cos, sin, batch, pages, backend, plan)
        attended = block.attention.output.unrounded(mixed)
        hidden, normed = block.mlp_norm.of_sum(hidden, attended, attention_post_norm)
        fed = block.mlp.unrounded(normed)
        hidden, normed = next_norm.of_sum(hidden, fed, mlp_post_norm)
    return normed


def _norms(block: Block) -> tuple[RMSNorm, RMSNorm | None, RMSNorm, RMSNorm | None]:
    """Norms before and after attention, before and after the MLP. Only some families have norms after."""
    after = getattr(block, "attention_post_norm", None), getattr(block, "mlp_post_norm", None)
    return block.attention_norm, after[0], block.mlp_norm, after[1]
