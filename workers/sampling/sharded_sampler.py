"""Sampling on several CUDA devices, each of which has the logits of some ids of every row.

Rows that are not filtered and report no logprobs need little from the other ranks: the best id of each shard, with its
score (`ShardSampler`). Filters and logprobs need all ids of a row. For these the ranks exchange logits, so that each
rank has some rows completely, samples them by itself, and sends the tokens to the others (`RowSampler`). This takes
1/TP of the bytes and of the work of gathering all rows on every rank. The bits are the same as on one rank, since the
kernels are the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.sampling.columns import SamplingColumns, Variant
from oarlock.workers.sampling.device_sampler import DeviceOutputs, DeviceSampler, power_of_2
from oarlock.workers.sampling.token_histories import DenseHistories


class ShardSampler(DeviceSampler):
    """Sampler of rows that are not filtered and report no logprobs, from this rank's V ids of their logits."""

    _forms = (Variant(), Variant(random=True), Variant(random=True, processed=True))

    def __init__(
        self,
        first_id: int,
        vocab_size: int,
        max_rows: int,
        histories: DenseHistories,
        device: torch.device,
        all_gather: Callable[[Tensor], Tensor],
    ) -> None:
        """Allocate the scratch memory.

        `first_id`: first of this rank's V ids; `histories` has all ids. `all_gather`: stacks every rank's tensor in the
        order of ranks, which is the order of ids.
        """
        from oarlock.workers.kernels.triton.sampling import shards

        super().__init__(vocab_size, max_rows, histories, device, first_id=first_id)
        self._shards: Any = shards
        self._all_gather = all_gather

    @staticmethod
    def serves(variant: Variant) -> bool:
        """Return whether rows of `variant` can be sampled here."""
        return not variant.filtered and not variant.logprobs

    def sample(
        self, logits: Tensor, columns: SamplingColumns, outputs: DeviceOutputs, variant: Variant, first: int = 0
    ) -> None:
        """Sample like `DeviceSampler.sample`, with `logits` float32 [L, V or more] of this rank. A collective call."""
        c, s, rows = columns, self._scratch, len(logits)
        assert self.serves(variant) and rows <= self.max_rows and logits.stride(1) == 1
        random = variant.random or variant.processed
        if variant.processed:
            self._process(logits, c, first)
        self._survey(logits, c, first, {"RANDOM": random, "FILTERED": False, "PROCESSED": variant.processed})
        found = torch.empty((rows, self._shards.FOUND), dtype=torch.float64, device=self._device)
        self._shards.best_of_shard[(rows,)](
            logits, s.adjusted, s.maxima, s.screens, s.per_tile, s.banned, found, c.changed, c.temperature, c.top_k,
            c.keys, first, self._first_id, logits.stride(0), self.vocab_size, self._blocks, self._tiles,
            WIDTH=power_of_2(self._blocks), TILES=power_of_2(self._tiles), RANDOM=random,
            PROCESSED=variant.processed, num_warps=4,
        )  # fmt: skip
        parts = self._all_gather(found)  # [ranks, L, FOUND]
        self._shards.merge_shards[(rows,)](
            parts, outputs.tokens, outputs.states, c.changed, c.target_ids, first, rows, RANKS=len(parts),
            PROCESSED=variant.processed, num_warps=1,
        )  # fmt: skip


class RowSampler:
    """Sampler of any rows of `local` logits on each rank. Each rank samples 1/TP of the rows from all their logits."""

    def __init__(
        self, tp: TensorParallel, vocab_size: int, local: int, max_rows: int, histories: DenseHistories
    ) -> None:
        """Allocate the sampler of this rank.

        `vocab_size`: number of the tp.size * local ids that are not padding. `max_rows`: rows of logits at a time, over
        all ranks.
        """
        share, device = -(-max_rows // tp.size), histories.seen.device
        self._tp = tp
        self._sampler = DeviceSampler(vocab_size, share, histories, device)
        self._whole = torch.empty((share, tp.size, local), dtype=torch.float32, device=device)

    def warm_up(self) -> None:
        """Compile all kernels."""
        self._sampler.warm_up(self._whole[0].numel())

    def sample(
        self, logits: Tensor, columns: SamplingColumns, outputs: DeviceOutputs, variant: Variant, first: int = 0
    ) -> None:
        """Sample like `DeviceSampler.sample`, with `logits` float32 [L, local] of this rank. A collective call."""
        rows, ranks = len(logits), self._tp.size
        share = -(-rows // ranks)
        before = self._tp.rank * share
        own = max(0, min(share, rows - before))
        if rows % ranks:  # `pad` copies even if it adds nothing
            logits = pad(logits, (0, 0, 0, ranks * share - rows))
        parts = self._tp.all_to_all(logits.unflatten(0, (ranks, share)))
        whole = self._whole[:share].copy_(parts.transpose(0, 1)).flatten(1)  # [share, ids]
        if own:
            self._sampler.sample(whole[:own], columns, outputs, variant, first + before)
        columns_found = _columns(outputs, variant)
        widths = [column.shape[1] for column in columns_found]
        found = torch.empty((share, sum(widths)), dtype=torch.int32, device=logits.device)
        if own:
            torch.cat([column[first + before : first + before + own] for column in columns_found], 1, out=found[:own])
        of_all = self._tp.all_gather(found).flatten(0, 1)[:rows]
        for column, values in zip(columns_found, of_all.split(widths, 1), strict=True):
            column[first : first + rows].copy_(values)

    def count(self, columns: SamplingColumns, outputs: DeviceOutputs, rows: int) -> None:
        """Count tokens like `DeviceSampler.count`."""
        self._sampler.count(columns, outputs, rows)


def _columns(outputs: DeviceOutputs, variant: Variant) -> list[Tensor]:
    """Return the columns of `outputs` that rows of `variant` have, as int32 [R, width] on the same memory."""
    columns = [outputs.tokens, outputs.states]
    if variant.logprobs:
        columns += [outputs.logprobs, outputs.ranks, outputs.top_ids, outputs.top_logprobs]
    return [column.view(torch.int32).view(len(column), -1) for column in columns]
