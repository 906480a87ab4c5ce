"""Attention on CUDA devices by kernels in Triton, which read pages in place (`kernels/triton/paged_attention.py`).

Plans tiles of query tokens and how keys are split, and launches the kernels. Nothing is read back from the device.
"""

import importlib.util
import os
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workers.attention.backend import AttentionSpec, KVSpec, LayerKV
from workers.attention.forward_batch import ForwardBatch

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD = 256
_LEAST_SPAN = 256  # keys: shorter ones cost more to merge than they gain
_WAVES = 2  # programs for each multiprocessor, before splitting keys gains no more


def power_of_2(count: int) -> int:
    """The smallest that is not below `count`."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a launch divides its work: chosen so that every kind of device since compute capability 8.0 has the registers
    and the shared memory."""

    rows: int
    keys: int  # of one step
    warps: int
    stages: int


def tile_shapes(head_dim: int, dtype: torch.dtype) -> tuple[TileShape, TileShape]:
    """For few query rows, and for many. float32 takes so many registers that large tiles gain nothing."""
    if dtype == torch.float32:
        small = TileShape(16, 32, 4 if head_dim <= 128 else 8, 2)
        return small, small
    if head_dim <= 128:
        return TileShape(16, 64, 4, 2), TileShape(64, 64, 4, 3)
    return TileShape(16, 32, 4, 3), TileShape(64, 32, 8, 2)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one shape: one launch."""

    shape: TileShape
    seqs: Tensor  # int32 [tiles]
    first_rows: Tensor  # int32 [tiles]
    longest: int  # context, of all tiles' sequences


@dataclass(slots=True)
class TritonPlan:
    """A step's tiles, and scratch memory that its layers share."""

    batch: ForwardBatch
    tiles: list[Tiles]
    scratch: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)


class TritonBackend:
    """Pages are `[blocks, kv_heads, block_size, head_dim]`."""

    name: ClassVar[str] = "triton"

    def __init__(self, spec: KVSpec) -> None:
        from workers.kernels.triton import paged_attention  # needs Triton, which only some machines have

        self.spec = spec
        self._kernels: Any = paged_attention  # a kernel's call compiles it: no annotation describes its arguments
        self.processors = 1
        self.least_span = _LEAST_SPAN
        if spec.device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(spec.device).multi_processor_count

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        if spec.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"it computes on CUDA devices and the model is on {spec.device.type}"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if spec.is_rounded:
            return f"it has no pages of {spec.cache_dtype}"
        if spec.dtype not in _TYPES:
            return f"it knows float32, float16 and bfloat16, not {spec.dtype}"
        if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < (8, 0):
            return "it wants compute capability 8.0 or higher"
        if spec.head_dim > _MAX_HEAD:
            return f"it wants heads of up to {_MAX_HEAD} elements, not {spec.head_dim}"
        return None

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        spec = self.spec
        shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)

        def pages() -> Tensor:
            return torch.zeros(shape, dtype=spec.dtype, device=spec.device)

        return [LayerKV(pages(), pages()) for _ in range(spec.num_layers)]

    def prepare(self, batch: ForwardBatch) -> TritonPlan:
        return TritonPlan(batch, [])

    def write(self, kv: LayerKV, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        spec = self.spec
        assert k.stride(2) == v.stride(2) == 1 and k.stride(1) == v.stride(1) == spec.head_dim
        self._kernels.write_kv[(batch.num_tokens,)](
            k, v, kv.k, kv.v, batch.slot_mapping, k.stride(0), v.stride(0),
            KV_HEADS=spec.num_kv_heads, HEAD_DIM=spec.head_dim, BLOCK_SIZE=spec.block_size,
            WIDTH=power_of_2(spec.num_kv_heads * spec.head_dim),
        )  # fmt: skip

    def attend(self, q: Tensor, kv: LayerKV, plan: TritonPlan, layer: AttentionSpec) -> Tensor:
        rows, heads, width = q.shape
        assert q.stride(2) == 1 and q.stride(1) == width
        out = torch.empty((rows, heads * width), dtype=q.dtype, device=q.device)
        out[plan.batch.num_tokens :] = 0.0  # rows that pad the batch
        if not plan.tiles:
            plan.tiles = self._tiles(plan.batch, heads // self.spec.num_kv_heads)
        for tiles in plan.tiles:
            self._launch(q, kv, plan, layer, tiles, out)
        return out

    def _tiles(self, batch: ForwardBatch, group: int) -> list[Tiles]:
        """Short queries in small tiles, long ones in large ones."""
        lengths, contexts = np.array(batch.query_lens), np.array(batch.context_lens)
        # A group of query heads that is larger than a tile gets a tile of its size.
        small, large = (
            replace(shape, rows=max(shape.rows, power_of_2(group)))
            for shape in tile_shapes(self.spec.head_dim, self.spec.dtype)
        )
        is_short = lengths * group <= small.rows
        found = []
        for shape, here in ((small, is_short), (large, ~is_short)):
            seqs = np.flatnonzero(here & (lengths > 0))
            if not len(seqs):
                continue
            queries = shape.rows // group
            counts = -(-lengths[seqs] // queries)
            ends = np.cumsum(counts)
            number = np.arange(ends[-1]) - np.repeat(ends - counts, counts)  # of each tile within its sequence
            both = np.stack([np.repeat(seqs, counts), number * queries]).astype(np.int32)
            moved = torch.from_numpy(both).to(batch.seq_lens.device, non_blocking=True)
            found.append(Tiles(shape, moved[0], moved[1], int(contexts[seqs].max())))
        return found

    def spans(self, programs: int, longest: int, window: int | None, rows: int, keys: int) -> tuple[int, int]:
        """How many keys one program reads, and how many programs share a tile's `longest` context.

        Enough to occupy the device, by its multiprocessors and the length of the contexts: a rule that looks at the
        number of sequences alone leaves most of it idle when a few of them are long.
        """
        seen = longest if window is None else min(longest, window + rows)
        parts = max(1, min(-(-_WAVES * self.processors // programs), seen // self.least_span))
        if parts == 1:
            return longest, 1
        span = -(-seen // (parts * keys)) * keys
        return span, -(-longest // span)

    def _launch(
        self, q: Tensor, kv: LayerKV, plan: TritonPlan, layer: AttentionSpec, tiles: Tiles, out: Tensor
    ) -> None:
        spec, batch = self.spec, plan.batch
        group = layer.num_heads // layer.num_kv_heads
        programs, shape_of = len(tiles.seqs) * spec.num_kv_heads, tiles.shape
        span, parts = self.spans(programs, tiles.longest, layer.sliding_window, shape_of.rows, shape_of.keys)
        partial_out, partial_stats = self._scratch(plan, parts, tiles, out)
        window = layer.sliding_window or 0
        shape = {
            "KV_HEADS": spec.num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_M": tiles.shape.rows,
            "BLOCK_N": tiles.shape.keys,
            "BLOCK_D": max(16, power_of_2(spec.head_dim)),
            "WINDOW": window > 0,
        }
        where = (batch.query_start_loc, batch.seq_lens, tiles.seqs, tiles.first_rows)
        self._kernels.attend[(len(tiles.seqs), spec.num_kv_heads, parts)](
            q, kv.k, kv.v, out, partial_out, partial_stats, batch.block_tables, *where,
            q.stride(0), batch.block_tables.stride(0), layer.scale, layer.softcap or 0.0, window, span,
            BLOCK_SIZE=spec.block_size, SOFTCAP=layer.softcap is not None, SPANS=parts > 1,
            num_warps=tiles.shape.warps, num_stages=tiles.shape.stages, **shape,
        )  # fmt: skip
        if parts > 1:
            self._kernels.merge_spans[(len(tiles.seqs), spec.num_kv_heads, tiles.shape.rows // group * group)](
                partial_out, partial_stats, out, *where, window, span, **shape
            )

    def _scratch(self, plan: TritonPlan, parts: int, tiles: Tiles, out: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the results of `parts` spans; any tensors where there is one."""
        if parts == 1:
            return out, out
        shape = (parts, len(tiles.seqs), self.spec.num_kv_heads, tiles.shape.rows)
        if shape not in plan.scratch:
            results = torch.empty((*shape, self.spec.head_dim), dtype=torch.float32, device=out.device)
            plan.scratch[shape] = results, torch.empty((*shape, 2), dtype=torch.float32, device=out.device)
        return plan.scratch[shape]
