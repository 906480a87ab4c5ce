"""Finds out at start whether answers have the same bits at every number of ranks that holds whole slices.

Where kernels compute everything, that is how they are built (`kernels/cpu/csrc/gemm/slices.h`); tests compare whole
answers. Here the two places where ranks differ from one another are tried with this model's own weights: slices of the
inputs, each by itself, must add up to the product of a rank, and the ranks' sums must be those of the tree.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, LayerKV
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.tree_sum import tree_sum
from oarlock.workers.distributed.vocab_slices import VOCAB_SLICES
from oarlock.workers.kernels.cpu.collective import ALL_CAME, all_reduce_of
from oarlock.workers.kernels.cpu.gemm import CppMatmul, CppPackedMatmul
from oarlock.workers.kernels.cpu.library import library
from oarlock.workers.kernels.cpu.sampling import can_serve
from oarlock.workers.layers.linear import RowParallelLinear
from oarlock.workers.layers.placement import Placement
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.runner.batch_invariance import one_of_each_kind

_ROWS = 3


@dataclass(frozen=True, slots=True)
class RankInvariance:
    """`reason` is one phrase for the log: what was found, in both cases."""

    rank_invariant: bool
    reason: str


def check_rank_invariance(model: Decoder, kv: list[LayerKV], backend: AttentionBackend) -> RankInvariance:
    """Look at what computes, and try it. Every rank must call this at the same point: it sums over ranks."""
    blocks = [model.layers[layer] for layer in one_of_each_kind(model)]
    outputs = [output for block in blocks for output in (block.attention.output, block.mlp.down)]
    return check_sums(outputs, model.place, _why_not(model, kv, backend))


def check_sums(outputs: Sequence[RowParallelLinear], place: Placement, why_not: str | None) -> RankInvariance:
    """Try the sums of `outputs`, the products whose inputs ranks share. `why_not`: a reason why nothing is promised
    whatever they do; the same on every rank."""
    started = time.monotonic()
    sizes = [size for size in (1, 2, 4, 8) if size <= place.slices]
    device = place.device
    if device.type != "cpu":
        why_not = f"on {device.type} libraries add up in an order that depends on the shape of a rank's weights"
    elif why_not is None and (place.tp.size not in sizes or VOCAB_SLICES % place.tp.size):
        working = ", ".join(map(str, sizes))
        why_not = f"{place.tp.size} ranks do not hold whole slices of the inputs; {working} would"
    reason = why_not or _fault(outputs, place)
    if reason is not None:
        return RankInvariance(False, reason)
    named = " and ".join(filter(None, (", ".join(map(str, sizes[:-1])), str(sizes[-1]))))
    ranks = "1 rank" if sizes == [1] else f"{named} ranks"
    spent = time.monotonic() - started
    return RankInvariance(True, f"the same bits with {ranks}: parts of sums add up in one tree ({spent:.2f} s)")


def _why_not(model: Decoder, kv: list[LayerKV], backend: AttentionBackend) -> str | None:
    """The reason why this model's kernels promise nothing, the same on every rank; None if there is none."""
    device = model.place.device
    if device.type != "cpu":
        return None
    if model.prepared_for(kv, backend) is None:
        return f"not everything is computed by kernels that add up in one order: {model.why_not_prepared}"
    if model.is_last and not (isinstance(model.head.product, CppMatmul | CppPackedMatmul) and can_serve(device)):
        return "logits or samples are computed by torch, in an order that depends on the shape of a rank's vocabulary"
    return None


def _fault(outputs: Sequence[RowParallelLinear], place: Placement) -> str | None:
    tp = place.tp
    draw = torch.Generator().manual_seed(tp.rank)
    found = None
    for output in outputs:
        if not _adds_up(output, place.local_slices, draw):
            found = f"{output.name}: slices of the inputs do not add up to the product of all"
    if not _ranks_add_up(tp, draw):
        found = f"the sum over {tp.size} ranks is not that of the tree"
    return found


def _adds_up(layer: RowParallelLinear, slices: int, draw: torch.Generator) -> bool:
    """Whether a rank's product equals the sum of its slices, each computed with all other inputs at zero."""
    product = layer.product
    assert isinstance(product, CppMatmul | CppPackedMatmul)
    share = product.as_share()
    x = torch.randn((_ROWS, layer.weight_shard.local_inputs), generator=draw).to(product.dtype)
    parts: list[Tensor] = []
    for place in range(slices):
        alone = torch.zeros_like(x)
        alone.chunk(slices, 1)[place].copy_(x.chunk(slices, 1)[place])
        parts.append(share(alone))
    return torch.equal(share(x), tree_sum(parts))


def _ranks_add_up(tp: TensorParallel, draw: torch.Generator) -> bool:
    if tp.size == 1:
        return True
    mine = torch.randn(67, generator=draw)
    expected = tree_sum(list(tp.all_gather(mine)))
    same = torch.equal(tp.all_reduce(mine.clone()), expected)
    group = tp.group_for_kernels
    if group is not None:
        missing = all_reduce_of(library())(group.address, mine.data_ptr(), len(mine))
        if missing != ALL_CAME:
            raise group.lost(missing)
        same &= torch.equal(mine, expected)
    return same
