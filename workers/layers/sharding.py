"""Division of heads, rows and vocabulary among tensor-parallel ranks. Torch-free, for the checks before the start.

Query heads are divided in order. KV heads are divided if there is at least one per rank. With more ranks than KV heads,
neighbouring ranks hold a copy of the same head, which is the head that their query heads use.
"""

from dataclasses import dataclass

from oarlock.base.errors import StartupError
from oarlock.workers.distributed.topology import vocab_shard_size

LARGEST_TP = 1024
SLICES = (8, 4, 2, 1)  # numbers of slices that kernels support (`kMostSlices` in csrc/gemm/slices.h)


@dataclass(frozen=True, slots=True)
class HeadShard:
    """One rank's heads: their number, and the index of the first among all heads."""

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int


def heads_divide(num_heads: int, num_kv_heads: int, tp: int) -> bool:
    return num_heads % tp == 0 and (num_kv_heads % tp == 0 or tp % num_kv_heads == 0)


def supported_tp_sizes(num_heads: int, num_kv_heads: int, intermediate_size: int) -> list[int]:
    """Return every tensor-parallel size that divides this model."""
    return [
        size
        for size in range(1, min(num_heads, LARGEST_TP) + 1)
        if heads_divide(num_heads, num_kv_heads, size) and intermediate_size % size == 0
    ]


def slices_for(num_heads: int, num_kv_heads: int, intermediate_size: int) -> int:
    """Return the number of slices of the inputs that ranks share: inputs of the output and of the down projection.

    It is the largest power of two up to 8 that is a tensor-parallel size of this model. Ranks of every smaller power of
    two hold whole slices, and get the same bits (`LinearWeight.matmul`).
    """
    sizes = supported_tp_sizes(num_heads, num_kv_heads, intermediate_size)
    return next(count for count in SLICES if count in sizes)


def shard_heads(layer: str, num_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadShard:
    """Return the heads of `rank` of `size`, from global counts. Raises `StartupError` naming the layer."""
    if not heads_divide(num_heads, num_kv_heads, size):
        raise StartupError(
            f"{layer}: {num_heads} heads over {num_kv_heads} key-value heads cannot be divided among {size} ranks.",
            f"Use a tensor-parallel size among {supported_tp_sizes(num_heads, num_kv_heads, 0)}.",
        )
    local_heads, local_kv_heads = num_heads // size, max(1, num_kv_heads // size)
    assert local_heads % local_kv_heads == 0, f"{layer}: {local_heads} local heads over {local_kv_heads} KV heads"
    return HeadShard(local_heads, local_kv_heads, rank * local_heads, rank * num_kv_heads // size)


def kv_heads_of_rank(num_kv_heads: int, size: int) -> int:
    """Return the number of key-value heads whose keys and values each of `size` ranks stores."""
    return max(1, num_kv_heads // size)


def shard_evenly(layer: str, what: str, total: int, size: int) -> int:
    """Return `total / size`. Raises `StartupError` naming the layer and both numbers if there is a remainder."""
    if total % size:
        raise StartupError(
            f"{layer}: {what} {total} cannot be divided into {size} equal parts.",
            f"Use a tensor-parallel size that divides {total}.",
        )
    return total // size


@dataclass(frozen=True, slots=True)
class WidthShard:
    """One rank's part of a width that is padded so that ranks hold whole slices of equal length."""

    padded_width: int  # width over all ranks
    first: int
    count: int
    slices: int  # slices of this rank


def shard_width(width: int, unit: int, rank: int, size: int, slices: int) -> WidthShard:
    """Divide a padded width among ranks.

    `slices`: number over all ranks if `size` divides it, else each rank has one slice. `unit` divides their length.
    """
    parts = slices if slices % size == 0 else size
    each = -(-width // (parts * unit)) * unit
    held = parts // size
    return WidthShard(each * parts, rank * held * each, held * each, held)


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """One rank's experts, in groups of `group` consecutive experts; the last groups may have fewer, or none."""

    first: int
    count: int
    group: int
    groups: int  # groups of this rank


def shard_experts(experts: int, rank: int, size: int, slices: int) -> ExpertShard:
    """Divide whole experts among ranks.

    `slices`: number of groups over all ranks if `size` divides it, else each rank has one group.
    """
    parts = slices if slices % size == 0 else size
    group = -(-experts // parts)
    held = parts // size
    first = min(experts, rank * held * group)
    return ExpertShard(first, min(experts, first + held * group) - first, group, held)


def shard_vocab(vocab_size: int, rank: int, size: int) -> tuple[int, int, int]:
    """Return (first id, ids in this rank's shard, ids of the shard that are in the vocabulary).

    Every shard has the same size, so the last shards may have padding ids beyond the vocabulary. With 1, 2, 4 or 8
    ranks each rank has whole slices.
    """
    local = vocab_shard_size(vocab_size, size)
    start = rank * local
    return start, local, max(0, min(vocab_size, start + local) - start)
