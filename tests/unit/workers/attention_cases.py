"""Builds mixed batches over scattered pages with NaN in unused slots, for the tests of attention backends."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, AttentionSpec, KVSpec, LayerKV
from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch
from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.protocol import NULL_BLOCK
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from tests.unit.workers import kernel_levels

# oneDNN takes bfloat16 on every processor with AVX512, but where it has no instructions for it, a row's bits depend on
# how many rows there are and on how they fall to the threads. The measurement at start reports it.
EMULATES_BFLOAT16 = (
    "oneDNN emulates bfloat16 on this processor and is not batch-invariant"
    if torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    else None
)


def cpp_at(level: ISALevel) -> type[CppBackend]:
    """`CppBackend` with the kernels of `level`."""

    class AtLevel(CppBackend):
        def __init__(self, spec: KVSpec) -> None:
            with kernel_levels.using(level):
                super().__init__(spec)

    AtLevel.__name__ = f"cpp-{level.name}"
    return AtLevel


CPP = [cpp_at(level) for level in kernel_levels.LEVELS]
EMULATED = [
    pytest.param(cpp_at(case.values[0]), id=f"cpp-{case.id}", marks=case.marks)
    for case in kernel_levels.PARAMETERS
    if not kernel_levels.is_here(case.values[0])
]


@dataclass(frozen=True)
class Seq:
    """A sequence whose last `query` of `context` tokens are in the step."""

    query: int
    context: int


def tables_for(seqs: list[Seq], block_size: int, seed: int = 0) -> tuple[np.ndarray, int]:
    """Block tables over a random permutation of the blocks, and the number of blocks (some stay unused)."""
    counts = [-(-seq.context // block_size) for seq in seqs]
    num_blocks = sum(counts) + 4
    free = list(np.random.default_rng(seed).permutation(np.arange(1, num_blocks)))
    tables = np.full((len(seqs), max(counts)), NULL_BLOCK, np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [free.pop() for _ in range(count)]
    return tables, num_blocks


def batch_of(tables: np.ndarray, seqs: list[Seq], block_size: int, device: torch.device) -> ForwardBatch:
    """The batch that writes and attends the last `query` tokens of each sequence."""
    chunks = [
        SequenceChunk([0] * seq.query, seq.context - seq.query, table.tolist())
        for seq, table in zip(seqs, tables, strict=True)
    ]
    step = greedy_step(chunks, block_size, step_id=1)
    return ForwardBatch.from_step(step, BlockTables.of_step(step, block_size, device))


class Case:
    """Random q, k, v of several sequences, the same for every backend; with `sinks`, some of which outweigh keys."""

    def __init__(
        self,
        spec: KVSpec,
        layer: AttentionSpec,
        seqs: list[Seq],
        seed: int = 0,
        key_bias: float = 0.0,
        sinks: bool = False,
    ) -> None:
        self.spec, self.layer, self.seqs = spec, layer, seqs
        random = torch.Generator().manual_seed(seed)
        heads, width = spec.num_kv_heads, spec.head_dim

        def noise(rows: int, count: int, width: int = width) -> Tensor:
            return torch.randn(rows, count, width, generator=random).to(spec.device, spec.dtype)

        bias = torch.full((width,), key_bias, dtype=spec.dtype, device=spec.device)
        self.k = [noise(seq.context, heads) + bias for seq in seqs]  # one [context, kv_heads, D] per sequence
        if spec.value_in_key:  # rotated elements may be much larger than those of the latent
            for keys in self.k:
                keys[..., spec.value_width :] *= 3
        self.v = [noise(seq.context, heads, spec.value_width) for seq in seqs]
        self.q = [noise(seq.context, layer.num_heads) for seq in seqs]
        drawn = torch.randn(layer.num_heads, generator=random) * 3 if sinks else None
        self.sinks = None if drawn is None else drawn.to(spec.device)
        self.tables, self.num_blocks = tables_for(seqs, spec.block_size, seed)

    def run(
        self,
        backend: AttentionBackend,
        chunks: list[list[Seq]] | None = None,
        alone: int | None = None,
        frees: bool = False,
        attends_earlier: bool = True,
    ) -> list[Tensor]:
        """Results [query, heads * D] per sequence of all steps. `chunks` are the steps to take, one `Seq` per
        sequence (query 0: not in the step); by default the earlier context in one, then `self.seqs`. `frees`: blocks
        that lie outside the window are not in the tables and hold NaN, the null block too. Without `attends_earlier`
        the keys and values of steps before the last are written, and that is all."""
        kv = backend.allocate(self.num_blocks)[0]
        self._poison(kv, backend)
        if chunks is None:
            chunks = [[Seq(seq.context - seq.query, seq.context - seq.query) for seq in self.seqs], self.seqs]
        results: list[list[Tensor]] = [[] for _ in self.seqs]
        for step in chunks:
            here = [i for i, seq in enumerate(step) if seq.query and alone in (None, i)]
            if here:
                tables = self._freed(backend, kv, step) if frees else self.tables
                attends = attends_earlier or step is chunks[-1]
                found = self._step(backend, kv, tables, [step[i] for i in here], here, attends)
                for i, rows in zip(here, found, strict=attends):
                    results[i].append(rows)
        return [torch.cat(rows) if rows else torch.empty(0) for rows in results]

    def _freed(self, backend: AttentionBackend, kv: LayerKV, step: list[Seq]) -> np.ndarray:
        """The tables without the blocks that no query of `step` sees."""
        window, chunk = self.layer.sliding_window, self.layer.chunk
        tables = self.tables.copy()
        for row, seq in enumerate(step):
            first = seq.context - seq.query
            if chunk is not None:
                seen_from = first // chunk * chunk
            else:
                assert window is not None
                seen_from = max(0, first - window + 1)
            tables[row, : seen_from // self.spec.block_size] = NULL_BLOCK
        self._fill([NULL_BLOCK, *self.tables[tables != self.tables].tolist()], float("nan"), kv, backend)
        return tables

    def _step(
        self,
        backend: AttentionBackend,
        kv: LayerKV,
        tables: np.ndarray,
        seqs: list[Seq],
        here: list[int],
        attends: bool = True,
    ) -> list[Tensor]:
        batch = batch_of(tables[here], seqs, self.spec.block_size, self.spec.device)
        pad = len(batch.token_ids) - batch.num_tokens

        def cut(source: list[Tensor]) -> Tensor:
            rows = torch.cat([source[i][s.context - s.query : s.context] for i, s in zip(here, seqs, strict=True)])
            return torch.cat([rows, torch.ones_like(rows[:1]).expand(pad, -1, -1)])

        backend.write(kv, cut(self.k), None if self.spec.value_in_key else cut(self.v), batch)
        if not attends:
            return []
        plan = backend.prepare(batch)
        out = backend.attend(cut(self.q), kv, plan, self.layer, self.sinks)
        assert out.shape == (batch.num_tokens + pad, self.layer.num_heads * self.spec.value_width)
        assert out[batch.num_tokens :].isfinite().all()
        return list(out[: batch.num_tokens].split([seq.query for seq in seqs]))

    def _poison(self, kv: LayerKV, backend: AttentionBackend) -> None:
        """NaN in every slot of every block but the null block."""
        self._fill(range(1, self.num_blocks), float("nan"), kv, backend)

    def _fill(self, blocks: Iterable[int], value: float, kv: LayerKV, backend: AttentionBackend) -> None:
        """`value` in every slot of `blocks`, written by the backend itself."""
        tables = np.array([list(blocks)], np.int32)
        slots = tables.size * self.spec.block_size
        batch = batch_of(tables, [Seq(slots, slots)], self.spec.block_size, self.spec.device)
        widths = self.spec.head_dim, self.spec.value_width
        shapes = [(len(batch.slots[0]), self.spec.num_kv_heads, width) for width in widths]
        k, v = (torch.full(shape, value, dtype=self.spec.dtype, device=self.spec.device) for shape in shapes)
        backend.write(kv, k, None if self.spec.value_in_key else v, batch)
