"""A head's attention has the same bits on any rank, however many heads it has and whether KV heads are copied."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionSpec, KVSpec
from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.layers.sharding import shard_heads
from tests.unit.workers.attention_cases import CPP, EMULATED, Case, Seq

HEADS, KV_HEADS, DIM = 16, 2, 48
# Tokens that are decoded, a prompt, and chunks that end in the second and in the fifth span of 256 positions.
SEQS = [Seq(1, 1), Seq(1, 700), Seq(37, 37), Seq(9, 300), Seq(40, 1100)]


def part_of(case: Case, rank: int, size: int) -> Case:
    """Part of a case with the heads of one rank."""
    heads = shard_heads("attention", HEADS, KV_HEADS, rank, size)
    part = copy.copy(case)
    part.spec = replace(case.spec, num_kv_heads=heads.num_kv_heads)
    part.layer = replace(case.layer, num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads)
    mine = slice(heads.first_kv_head, heads.first_kv_head + heads.num_kv_heads)
    part.k, part.v = [k[:, mine] for k in case.k], [v[:, mine] for v in case.v]
    if case.sinks is not None:
        part.sinks = case.sinks[heads.first_head : heads.first_head + heads.num_heads]
    part.q = [q[:, heads.first_head : heads.first_head + heads.num_heads] for q in case.q]
    return part


@pytest.mark.parametrize("backend", [*CPP, *EMULATED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (100, None, True), (None, 3.0, True)])
@pytest.mark.slow
def test_heads_have_the_same_bits_on_any_rank(
    backend: type[CppBackend], dtype: torch.dtype, window: int | None, softcap: float | None, sinks: bool
) -> None:
    spec = KVSpec(1, KV_HEADS, DIM, 16, dtype, torch.device("cpu"))
    layer = AttentionSpec(0, HEADS, KV_HEADS, DIM, DIM**-0.5, window, softcap)
    case = Case(spec, layer, SEQS, sinks=sinks)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = case.run(backend(spec))
        for size, threads in ((2, 1), (4, 3), (8, 1), (16, 4)):  # with more threads, spans are cut otherwise
            torch.set_num_threads(threads)
            ranks: list[list[Tensor]] = []
            for rank in range(size):
                part = part_of(case, rank, size)
                ranks.append(part.run(backend(part.spec)))
            for row, expected in enumerate(whole):
                assert torch.equal(torch.cat([rank[row] for rank in ranks], 1), expected)
    finally:
        torch.set_num_threads(before)
