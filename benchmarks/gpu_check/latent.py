"""Measures latent attention: decode steps and prompts, and the matmuls with a matrix for each head.

A row of 576 elements per token serves all query heads. In bfloat16, 16 heads compute 30 operations for each byte that
is read, and 128 heads 240, so that the memory or the multipliers may be the limit: each figure is compared with both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_check.device import Ceilings, measure_ceilings, seconds_of
from benchmarks.gpu_check.part import Row, Where
from benchmarks.gpu_check.roofline import attend_seconds
from oarlock.workers.attention.backend import AttentionSpec, KVSpec
from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch
from oarlock.workers.attention.selector import choose
from oarlock.workers.kernels.triton import availability
from oarlock.workers.layers.head_matmul import HeadMatmul
from oarlock.workers.quantization.fixed_order import FixedOrderHeadMatmul
from oarlock.workers.runner.cuda_graphs import Calls, CudaGraphs, GraphMaker
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step

_WIDTH, _RANK, _NOPE = 576, 512, 128  # elements of a row, of its value, and of a query's part that is not rotated
_IN_ALL = 1 << 30  # bytes of pages, or of matrices, which no cache holds

# Query heads of a rank, and format of pages. Each is compiled anew, so 128 heads are tried with one format.
_KINDS = ((16, "auto"), (16, "fp8"), (16, "int8"), (128, "auto"))


def latent_attention(where: Where) -> Iterator[Row]:
    """Times of attention, then of the matmuls of heads: by a library, and by the kernel of `--batch-invariant`."""
    limits = measure_ceilings(where)
    for heads, cache in ((3, "auto"), (3, "int8")) if where.is_tiny else _KINDS:
        yield from _decodes(where, limits, heads, cache)
        yield _prompt(where, limits, heads, cache)
    yield from _matmuls(where, limits)


def _spec(where: Where, layers: int, cache: str) -> KVSpec:
    device = torch.device(where.device)
    return KVSpec(layers, 1, _WIDTH, 32, torch.bfloat16, device, cache, value_dim=_RANK, value_in_key=True)


def _row(name: str, limits: Ceilings, seconds: float, moved: float, operations: float) -> Row:
    """`moved`: bytes."""
    figures = {"us": seconds * 1e6, "share of bandwidth": moved / seconds / limits.bytes_s}
    return Row(name, figures | {"share of products": operations / seconds / limits.product_flop_s})


def _decodes(where: Where, limits: Ceilings, heads: int, cache: str) -> Iterator[Row]:
    """One token of each of some sequences, on pages of several layers."""
    for batch, context in ((2, 40),) if where.is_tiny else ((1, 32768), (32, 4096), (256, 1024)):
        of_layer = batch * context * _spec(where, 1, cache).bytes_per_token
        layers = 2 if where.is_tiny else max(2, -(-_IN_ALL // of_layer))
        spec = _spec(where, layers, cache)
        backend = choose(spec, "auto", lambda line: None)
        seconds = attend_seconds(where, backend, spec, batch, context, heads) / layers
        operations = 2.0 * batch * context * heads * (_WIDTH + _RANK)
        name = f"{backend.name}, {heads} heads, {cache}: {batch} x {context} tokens"
        yield _row(name, limits, seconds, of_layer, operations)


def _prompt(where: Where, limits: Ceilings, heads: int, cache: str) -> Row:
    """All tokens of one sequence."""
    length, spec = 20 if where.is_tiny else 4096, _spec(where, 1, cache)
    backend = choose(spec, "auto", lambda line: None)
    (pages,) = backend.allocate(2 + length // spec.block_size)
    step = greedy_step([SequenceChunk([0] * length, 0, range(1, 2 + length // spec.block_size))], spec.block_size)
    batch = ForwardBatch.from_step(step, BlockTables.of_step(step, spec.block_size, spec.device))
    q = torch.randn(len(batch.token_ids), heads, _WIDTH, device=spec.device).bfloat16()
    layer, plan = AttentionSpec(0, heads, 1, _WIDTH, _WIDTH**-0.5), backend.prepare(batch)
    seconds = seconds_of(where, partial(backend.attend, q, pages, plan, layer))
    operations = 2.0 * heads * (_WIDTH + _RANK) * length * (length + 1) / 2
    name = f"{backend.name}, {heads} heads, {cache}: a prompt of {length}"
    return _row(name, limits, seconds, length * spec.bytes_per_token, operations)


def _matmuls(where: Where, limits: Ceilings) -> Iterator[Row]:
    """The matrices that absorb queries, of several layers, so that no cache holds them."""
    device, heads = torch.device(where.device), 3 if where.is_tiny else 128
    # The interpreter, which runs tiny shapes, has no products of bfloat16.
    dtype = torch.float16 if where.is_tiny else torch.bfloat16
    size = heads * _RANK * _NOPE * dtype.itemsize
    kinds: dict[str, type[HeadMatmul | FixedOrderHeadMatmul]] = {"by a library": HeadMatmul}
    if availability.why_not(device) is None:
        kinds["in one order"] = FixedOrderHeadMatmul
    for name, kind in kinds.items():
        matmuls = [
            kind(torch.randn(heads, _RANK, _NOPE, device=device).to(dtype))
            for _ in range(2 if where.is_tiny else _IN_ALL // size)
        ]
        for rows in (1, 5) if where.is_tiny else (1, 32, 256, 2048):
            x = torch.randn(rows, heads, _NOPE + _WIDTH - _RANK, device=device).to(dtype)[..., :_NOPE]
            out = torch.empty(rows, heads, _WIDTH, device=device, dtype=dtype)[..., :_RANK]
            maker: GraphMaker = CudaGraphs() if where.device == "cuda" else Calls()
            seconds = seconds_of(where, maker.capture(partial(_multiply, matmuls, x, out)).replay) / len(matmuls)
            moved = size + rows * heads * (_NOPE + _RANK) * dtype.itemsize
            operations = 2.0 * rows * heads * _NOPE * _RANK
            yield _row(f"matmuls of {heads} heads {name}: {rows} rows", limits, seconds, moved, operations)


def _multiply(matmuls: list[HeadMatmul | FixedOrderHeadMatmul], x: torch.Tensor, out: torch.Tensor) -> None:
    for matmul in matmuls:
        matmul(x, out=out)
